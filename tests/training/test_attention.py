"""Attention document by document: its plan, and its results against a dense mask."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from raylane.training.model.attention import AttentionPiece, PackedRows, attend, document_lengths, pieces, take_chunks
from raylane.training.parallel.mesh import local_chunks


@pytest.mark.parametrize(
    ("positions", "lengths"),
    [
        ([0, 1, 2, 0, 1, 0], [3, 2, 1]),
        ([0, 1, 2, 3], [4]),
        ([5, 6, 0, 1], [2, 2]),  # a row may begin in the middle of a document
        ([0, 0, 0], [1, 1, 1]),
        ([7], [1]),
    ],
)
def test_documents_begin_where_positions_restart(positions: list[int], lengths: list[int]) -> None:
    assert document_lengths(torch.tensor(positions)) == lengths


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_chunks_of_all_ranks_are_the_whole_row(size: int) -> None:
    chunks = [local_chunks(24, rank, size) for rank in range(size)]
    tokens = [token for of_rank in chunks for start, stop in of_rank for token in range(start, stop)]
    assert sorted(tokens) == list(range(24))
    # A query at place i sees i + 1 keys; every rank sees as many as any other.
    keys = {sum(sum(range(start + 1, stop + 1)) for start, stop in of_rank) for of_rank in chunks}
    assert len(keys) == 1


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="a row of 10 tokens does not divide into 2 x 2 equal parts"):
        local_chunks(10, 0, 2)


def test_pieces_end_at_documents_and_chunks() -> None:
    assert pieces([6, 7, 3], [(0, 16)]) == [
        AttentionPiece(0, 6, 0, 6),
        AttentionPiece(6, 7, 1, 7),
        AttentionPiece(13, 3, 2, 3),
    ]
    # Rank 0 of two: tokens 0..4 and 12..16.
    assert pieces([6, 7, 3], [(0, 4), (12, 16)]) == [
        AttentionPiece(0, 4, 0, 4),
        AttentionPiece(4, 1, 1, 7),
        AttentionPiece(5, 3, 2, 3),
    ]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_query_is_in_one_piece(size: int) -> None:
    lengths = [5, 1, 9, 1, 8]
    for rank in range(size):
        chunks = local_chunks(24, rank, size)
        found = pieces(lengths, chunks)
        local = sum(stop - start for start, stop in chunks)
        covered = [query for piece in found for query in range(piece.query, piece.query + piece.queries)]
        assert covered == list(range(local))


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], window: int | None) -> torch.Tensor:
    """Return attention with one mask of T x T positions, [1, T, N, D]."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(sum(lengths))
    mask = (document[:, None] == document) & (place[:, None] >= place)
    if window is not None:
        mask &= place[:, None] - place < window
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_equals_a_dense_mask(window: int | None, kv_heads: int) -> None:
    torch.manual_seed(0)
    lengths = [5, 1, 7, 3]
    shapes = [(1, heads, 16, 8) for heads in (4, kv_heads, kv_heads)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    ours, none = attend(None, *inputs, None, sliding_window=window, packed_rows=PackedRows.of(positions))
    wanted = dense(*inputs, lengths, window)
    assert none is None
    torch.testing.assert_close(ours, wanted)
    for mine, theirs in zip(*(torch.autograd.grad(out.sin().sum(), inputs) for out in (ours, wanted)), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_soft_capped_scores_equal_their_formula() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    rows = PackedRows.of(torch.tensor([[0, 1, 2, 3, 0, 1]]))
    ours, _ = attend(None, q, k, v, None, scaling=0.5, softcap=2.0, packed_rows=rows)
    for start, stop in itertools.pairwise((0, 4, 6)):
        part = slice(start, stop)
        scores = 2.0 * torch.tanh(q[:, :, part] @ k[:, :, part].transpose(2, 3) * 0.5 / 2.0)
        scores += torch.full(scores.shape[2:], float("-inf")).triu(1)
        torch.testing.assert_close(ours[:, part], (scores.softmax(-1) @ v[:, :, part]).transpose(1, 2))


def test_chunks_are_cut_out_of_rows() -> None:
    rows = torch.arange(12).view(1, 12)
    assert take_chunks(rows, [(0, 12)]) is rows
    assert take_chunks(rows, [(0, 3), (9, 12)]).tolist() == [[0, 1, 2, 9, 10, 11]]


@pytest.mark.parametrize("arguments", [{}, {"sliding_window": 3}, {"softcap": 5.0}, {"s_aux": torch.arange(4.0)}])
def test_rows_alike_are_computed_as_each_alone(arguments: dict[str, Any]) -> None:
    """Rows with documents of the same lengths go through one kernel; the others through one each."""
    torch.manual_seed(0)
    alike = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 3)
    query, key, value = (torch.randn(3, heads, 9, 8, requires_grad=True) for heads in (4, 2, 2))
    results = []
    for rows in (PackedRows.of(alike), PackedRows.of(alike[:1])):
        single = len(rows.lengths) == 1
        parts = [slice(i, i + 1) for i in range(3)] if single else [slice(None)]
        out = torch.cat(
            [
                attend(SimpleNamespace(), query[i], key[i], value[i], None, packed_rows=rows, **arguments)[0]
                for i in parts
            ]
        )
        results.append((out, *torch.autograd.grad(out.square().sum(), (query, key, value))))
    assert PackedRows.of(alike).alike
    assert not PackedRows.of(torch.tensor([[0, 1, 2], [0, 1, 0]])).alike
    for together, alone in zip(*results, strict=True):
        torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-6)

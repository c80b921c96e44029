"""Attention over packed rows, document by document, also when each worker holds only a part of every row.

transformers calls `attend` for every layer, through its registry of attention functions. Its cost is in proportion to
the sum of the squares of the document lengths; a mask of T x T positions would cost T squared whatever the documents.

    row of T = 16 tokens    a a a a a b b b b b b b c c c c       documents a, b, c
    piece of a              queries 0..5  on keys 0..5
    piece of b              queries 5..12 on keys 5..12           no piece crosses a document

Context parallelism cuts a row into 2 * cp chunks; rank r holds the chunks r and 2 * cp - 1 - r, because late chunks see
many keys and early ones few. Keys and values of all ranks are gathered, queries stay where they are:

    rank 0 of cp = 2        chunks 0 and 3: queries 0..4 and 12..16
    rank 1                  chunks 1 and 2: queries 4..8 and 8..12

`PackedRows` holds the plan of one micro-batch, made of numbers on the CPU only. Called by `supervised`. B = rows, T =
tokens in a row, t = T / cp, N = heads, D = size of a head.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from raylane.errors import ConfigError
from raylane.training.parallel.sharded import own_part

NAME = "raylane"
"""Name of this implementation in transformers' registry, and of the default of `attn_implementation`."""


# torch 2.13 warns of the old names, which torch 2.9 has only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class AttentionPiece(NamedTuple):
    """Queries of one document that this rank holds, and the keys that they see (besides causality)."""

    query: int
    """First query, counted in the tokens of this rank."""
    queries: int
    """Number of queries."""
    document: int
    """Number of the document in its row."""
    keys: int
    """Number of keys, from the first token of the document to the last query."""


def document_lengths(positions: Tensor) -> list[int]:
    """Return the lengths of the documents of one row from its `position_ids`, int64 [T] on the CPU.

    A document begins wherever a position is not its predecessor plus 1, which is transformers' rule too
    (masking_utils.find_packed_sequence_indices, 5.23).
    """
    starts = (torch.diff(positions) != 1).nonzero().flatten() + 1
    edges = [0, *starts.tolist(), positions.numel()]
    return [stop - start for start, stop in itertools.pairwise(edges)]


def pieces(lengths: Sequence[int], chunks: Sequence[tuple[int, int]]) -> list[AttentionPiece]:
    """Return the pieces of one row: each overlap of a document with a chunk, in the order of the local tokens."""
    overlaps, local = [], 0
    for start, stop in chunks:
        begin = 0
        for number, length in enumerate(lengths):
            first, last = max(start, begin), min(stop, begin + length)
            if first < last:
                overlaps.append(AttentionPiece(local + first - start, last - first, number, last - begin))
            begin += length
        local += stop - start
    return overlaps


def take_chunks(values: Tensor, chunks: Sequence[tuple[int, int]]) -> Tensor:
    """Return the local tokens of rows [B, T, ...]; the same tensor if they are all."""
    if chunks == [(0, values.shape[1])]:
        return values
    return torch.cat([values[:, start:stop] for start, stop in chunks], dim=1)


@dataclass(frozen=True)
class PackedRows:
    """Plan of the attention of one micro-batch; passed through transformers' layers to `attend`."""

    lengths: list[list[int]]
    """Lengths of the documents of each row, B lists."""
    pieces: list[list[AttentionPiece]]
    """Pieces of each row that this rank computes."""
    row_tokens: int
    group: Any = None
    """Process group of the ranks that share the rows; None if every rank holds whole rows."""

    @functools.cached_property
    def alike(self) -> bool:
        """True if the documents of all rows have the same lengths, so that one kernel can compute all rows."""
        return all(row == self.lengths[0] for row in self.lengths[1:])

    @classmethod
    def of(cls, positions: Tensor, chunks: Sequence[tuple[int, int]] | None = None, group: Any = None) -> PackedRows:
        """Return the plan for whole rows with these `position_ids`, int64 [B, T] on the CPU.

        `chunks` are the parts of a row that this rank of `group` holds, None for the whole row.
        """
        row_tokens = positions.shape[1]
        lengths = [document_lengths(row) for row in positions]
        local_pieces = [pieces(row, chunks or [(0, row_tokens)]) for row in lengths]
        return cls(lengths, local_pieces, row_tokens, group)

    def gather(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, N, T, D] of whole rows from those of this rank [B, N, t, D]. Collective."""
        if self.group is None:
            return keys, values
        both: Tensor = _GatherRows.apply(torch.cat([keys, values], dim=-1), self.group)  # type: ignore[no-untyped-call]
        # One gather for both: half the messages.
        gathered = torch.split(both, [keys.shape[-1], values.shape[-1]], dim=-1)
        return gathered[0], gathered[1]


class _GatherRows(torch.autograd.Function):
    """All-gather of the local tokens of rows into whole rows; its backward pass sums and distributes the gradients."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: Any) -> Tensor:
        ctx.group, size = group, dist.get_world_size(group)
        parts = local.new_empty(size * local.shape[0], *local.shape[1:])
        _all_gather(parts, local.contiguous(), group=group)
        # First chunks of all ranks in order, then second ones in reverse order: see `mesh.local_chunks`.
        halves = [part.chunk(2, dim=2) for part in parts.chunk(size)]
        return torch.cat([*(half[0] for half in halves), *(half[1] for half in reversed(halves))], dim=2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        size = dist.get_world_size(ctx.group)
        chunks = gradients[0].chunk(2 * size, dim=2)
        # The inverse of the order above. Every rank has a gradient for every key that its queries saw.
        parts = torch.cat([torch.cat([chunks[r], chunks[2 * size - 1 - r]], dim=2) for r in range(size)])
        local = parts.new_empty(parts.shape[0] // size, *parts.shape[1:])
        _reduce_scatter(local, parts, group=ctx.group)
        return local, None


class _Scoring(NamedTuple):
    """Rules by which the scores of queries and keys become weights."""

    scale: float
    """Factor of the scores."""
    dropout: float
    window: int | None
    """Number of keys that a query sees, itself included; None for all keys before it."""
    softcap: float | None
    """Bound of the scores (Gemma 2)."""
    sinks: Tensor | None
    """Score [N] of one more key in each head, whose value is zero (gpt-oss)."""

    @property
    def explicit(self) -> bool:
        """True if no fused kernel of torch computes these weights."""
        return self.softcap is not None or self.sinks is not None


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    packed_rows: PackedRows | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the attention output [B, t, N, D] of queries [B, N, t, D]; keys and values have as many heads or fewer.

    The interface is that of transformers' attention functions (5.23). `s_aux` are attention sinks [N]. `position_ids`
    are those that `packed_rows` was made from. Raises ConfigError for anything else that is not None or False, because
    the result would silently be another one than that of the model.
    """
    unknown = {name: value for name, value in others.items() if value is not None and value is not False}
    if attention_mask is not None:
        unknown["attention_mask"] = attention_mask
    if is_causal is False or (is_causal is None and getattr(module, "is_causal", True) is False):
        unknown["is_causal"] = False
    if unknown:
        raise ConfigError(
            f"raylane's attention cannot compute the attention of this model: {type(module).__name__} passes "
            f"{', '.join(sorted(unknown))}, which raylane does not know. Set policy.hf_config_overrides."
            "attn_implementation to eager or sdpa of transformers",
            key="attn_implementation",
        )
    if packed_rows is None:
        raise ConfigError(
            f"raylane's attention cannot tell the documents of a row apart: the layers of this model do not pass the "
            f"arguments of the model on to {type(module).__name__}. Set policy.hf_config_overrides.attn_implementation "
            "to sdpa or eager of transformers",
            key="attn_implementation",
        )
    # Gemma 2 scales by another number than the size of a head.
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # With tensor parallelism a worker holds the sinks of its own heads.
    sinks = None if s_aux is None else own_part(s_aux)
    scoring = _Scoring(scale, dropout, sliding_window, softcap, sinks)
    key, value = packed_rows.gather(key, value)
    half = query.dtype in (torch.bfloat16, torch.float16)
    # torch's kernel for rows of several lengths (FlashAttention) knows neither dropout nor explicit scores.
    if query.is_cuda and half and not scoring.dropout and not scoring.explicit and (kernel := varlen_kernel()):
        return _varlen(kernel, query, key, value, packed_rows, scoring), None
    if (repeats := query.shape[1] // key.shape[1]) > 1 and (scoring.explicit or query.is_cuda):
        # For float32, and for masks, CUDA has a fused kernel only for as many key heads as query heads. torch would
        # compute all scores [N, q, k] and keep them (2.11).
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    lengths, of_rows = packed_rows.lengths, packed_rows.pieces
    if packed_rows.alike:
        return _rows(query, key, value, lengths[0], of_rows[0], scoring).transpose(1, 2), None
    parts = zip(torch.split(query, 1), torch.split(key, 1), torch.split(value, 1), strict=True)
    rows = [_rows(*row, lengths[i], of_rows[i], scoring) for i, row in enumerate(parts)]
    return torch.cat(rows).transpose(1, 2), None


def _rows(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], of_row: list[AttentionPiece], scoring: _Scoring
) -> Tensor:
    """Return the output [B, N, t, D] of rows whose documents have these lengths in all of them."""
    # `split` instead of slices: the backward pass of a slice fills a gradient of the whole row with zeros.
    queries = torch.split(query, [piece.queries for piece in of_row], dim=2)
    keys, values = torch.split(key, lengths, dim=2), torch.split(value, lengths, dim=2)
    out = []
    for piece, some in zip(of_row, queries, strict=True):
        seen = (keys[piece.document][:, :, : piece.keys], values[piece.document][:, :, : piece.keys])
        out.append(_one_piece(some, *seen, scoring))
    return torch.cat(out, dim=2)


def _one_piece(query: Tensor, key: Tensor, value: Tensor, scoring: _Scoring) -> Tensor:
    """Return the output of queries [B, N, q, D] that are the last q of the k tokens of the keys [B, ., k, D]."""
    q, k, window = query.shape[2], key.shape[2], scoring.window
    # Shorter documents never reach beyond the window.
    windowed = window is not None and k > window
    mask = None
    if scoring.explicit or windowed or q not in (1, k):
        places = torch.arange(k, device=query.device)
        query_places = places[k - q :, None]
        mask = places[None] <= query_places
        if window is not None:
            mask &= places[None] > query_places - window
    if scoring.explicit:
        # Soft-capped scores or sinks: the scores [N, q, k] are whole in memory.
        scores = query @ key.transpose(2, 3) * scoring.scale
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        if scoring.sinks is not None:
            sinks = scoring.sinks.to(scores.dtype)[:, None, None].expand(scores.shape[0], -1, q, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        # The sink takes its share of the weights and adds nothing.
        return F.dropout(weights[..., :k], scoring.dropout) @ value
    # Fewer key heads than query heads: on CPUs the kernel repeats them without a copy.
    out: Tensor = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=scoring.dropout,
        is_causal=mask is None and q > 1,
        scale=scoring.scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return out


@functools.cache
def varlen_kernel() -> Callable[..., Any] | None:
    """Return torch's kernel for rows of several lengths; None if this torch has none (2.9), or none for windows (2.10).

    It is called with as few key heads as the model has, which 2.12 wants to be told and 2.11 takes without a word.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    if "window_size" not in known:
        return None
    return functools.partial(varlen_attn, enable_gqa=True) if "enable_gqa" in known else varlen_attn


def _varlen(
    kernel: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scoring: _Scoring
) -> Tensor:
    """Return the output [B, t, N, D] with one kernel for all pieces of the micro-batch."""
    taken, query_edges, key_edges = [], [0], [0]
    for row, (lengths, of_row) in enumerate(zip(rows.lengths, rows.pieces, strict=True)):
        # Places of the documents in the row, whose keys are all here.
        begins = [sum(lengths[:number]) for number in range(len(lengths))]
        for piece in of_row:
            first = row * rows.row_tokens + begins[piece.document]
            taken.append(torch.arange(first, first + piece.keys))
            query_edges.append(query_edges[-1] + piece.queries)
            key_edges.append(key_edges[-1] + piece.keys)
    # `non_blocking` from pinned memory: the computing thread does not wait for the GPU.
    index = torch.cat(taken).pin_memory().to(query.device, non_blocking=True)
    edges = torch.tensor([query_edges, key_edges], dtype=torch.int32).pin_memory().to(query.device, non_blocking=True)
    flat = [x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in (query, key, value)]
    out = kernel(
        flat[0],
        flat[1].index_select(0, index),
        flat[2].index_select(0, index),
        edges[0],
        edges[1],
        max(piece.queries for of_row in rows.pieces for piece in of_row),
        max(piece.keys for of_row in rows.pieces for piece in of_row),
        scale=scoring.scale,
        window_size=(-1 if scoring.window is None else scoring.window - 1, 0),
    )
    assert isinstance(out, Tensor)
    return out.view(query.shape[0], query.shape[2], *out.shape[1:])


def register() -> None:
    """Make `attend` known to transformers under NAME.

    No function for masks goes with it: transformers then makes none, and does not look for packed rows, which would
    make the CPU wait for the GPU once per micro-batch (`masking_utils.find_packed_sequence_indices`, 5.23).
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)

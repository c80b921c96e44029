"""Regions of published tensors, compared with what torch makes of the same views."""

from __future__ import annotations

import random

import pytest
import torch

from raylane.weights.layout.boxes import Box, View
from raylane.weights.layout.regions import ViewPiece, contiguous_strides, joined, pieces_of_view, regions_of, runs


def view_of(tensor: torch.Tensor) -> View:
    return View(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def whole(shape: list[int]) -> ViewPiece:
    return ViewPiece((0,) * len(shape), "x", View(tuple(shape), contiguous_strides(shape), 0))


def box_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(start, start + size) for start, size in zip(*box, strict=True))]


def written(base: torch.Tensor, pieces: list[ViewPiece], shape: torch.Size) -> torch.Tensor:
    """Return a tensor of this shape into which the regions of all pieces were copied."""
    target = torch.full(shape, -1)
    for piece in pieces:
        size, strides, _ = view_of(target)
        for region in regions_of(piece, base.shape, "t", View(size, strides, 0)):
            place = target.view(-1).as_strided(*region.view)
            assert bool((place == -1).all()), "an element was written twice"
            place.copy_(box_of(base, region.box))
    return target


def random_view(random_numbers: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    for _ in range(random_numbers.randint(0, 4)):
        dims = tensor.dim()
        dim = random_numbers.randrange(dims) if dims else 0
        kind = random_numbers.choice(["transpose", "narrow", "flat", "halves", "new", "select", "step", "expand"])
        if kind == "transpose" and dims > 1:
            tensor = tensor.transpose(0, dim)
        elif kind == "narrow" and dims:
            start = random_numbers.randrange(tensor.shape[dim])
            tensor = tensor.narrow(dim, start, random_numbers.randint(1, tensor.shape[dim] - start))
        elif kind == "flat" and tensor.is_contiguous():
            tensor = tensor.view(-1)
        elif kind == "halves" and tensor.is_contiguous() and tensor.numel() % 2 == 0:
            tensor = tensor.view(2, -1)
        elif kind == "new":
            tensor = tensor.unsqueeze(dim)
        elif kind == "select" and dims:
            tensor = tensor.select(dim, tensor.shape[dim] - 1)
        elif kind == "step" and dims:
            tensor = tensor[::2]
        elif kind == "expand" and dims and tensor.shape[0] == 1:
            tensor = tensor.expand(3, *tensor.shape[1:])
    return tensor


@pytest.mark.claim("weights", "other names and shapes are read by the reader's own loader or by rules")
@pytest.mark.parametrize("seed", range(100))
def test_views_of_views_are_regions(seed: int) -> None:
    random_numbers = random.Random(seed)
    shape = [random_numbers.choice([1, 2, 3, 4, 6]) for _ in range(random_numbers.randint(0, 3))]
    base = torch.arange(torch.Size(shape).numel()).view(shape)
    view = random_view(random_numbers, base)
    pieces = pieces_of_view(shape, [whole(shape)], view_of(view))
    assert torch.equal(written(base, pieces, view.shape), view)
    copy = view.contiguous().clone()  # a tensor of its own, of which a further view is taken
    further = random_view(random_numbers, copy)
    both = pieces_of_view(tuple(copy.shape), pieces, view_of(further))
    assert torch.equal(written(base, both, further.shape), further)


def test_rows_of_heads_are_one_region() -> None:
    heads = torch.empty(32 * 4, 64).view(32, 4, 64)
    (region,) = regions_of(
        ViewPiece((0, 0, 0), "q", view_of(heads)), (128, 64), "qkv", View((32, 4, 64), (256, 64, 1), 0)
    )
    assert region == ViewPiece((0, 0), "qkv", View((128, 64), (64, 1), 0))


def test_a_transpose_is_one_region() -> None:
    turned = torch.empty(6, 4).t()
    (region,) = regions_of(ViewPiece((0, 0), "w", view_of(turned)), (6, 4), "t", View((4, 6), (6, 1), 12))
    assert region == ViewPiece((0, 0), "t", View((6, 4), (1, 6), 12))


def test_every_second_row_is_a_region_for_each() -> None:
    found = runs((8, 3), View((4, 3), (6, 1), 3))
    assert [run.box.start for run in found] == [(1, 0), (3, 0), (5, 0), (7, 0)]


def test_regions_that_follow_each_other_are_joined() -> None:
    rows = [ViewPiece((row, 0), "t", View((1, 8), (0, 1), 100 + 16 * row)) for row in range(4)]
    assert joined(rows) == [ViewPiece((0, 0), "t", View((4, 8), (16, 1), 100))]
    assert joined(rows[::2]) == rows[::2]
    assert len(joined([rows[0], rows[1]._replace(name="u")])) == 2


def test_boxes_in_a_target_are_where_a_region_lies() -> None:
    region = View((2, 3), (1, 6), 12)  # turned into rows 2 to 4 of a tensor of 6 columns
    assert [run.box for run in runs((5, 6), region)] == [Box((2, 0), (3, 2))]

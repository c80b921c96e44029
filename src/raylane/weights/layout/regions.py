"""Regions of published tensors, and where their elements lie in the tensors of a reader. Pure.

A reader may have other names and shapes than the publisher: fused, split or transposed tensors. Each step from one to
the other is a *view*: a size and a stride for each dimension, and an offset, in elements of a contiguous tensor. `runs`
divides a view into regions that are boxes of that tensor, because versions are stored, and copied, in boxes:

    published q_proj [4, 8]                     reader's qkv_proj [8, 8]
    rows 0 to 3, columns 0 to 7        ->       offset 0, strides (8, 1)

Called by `recording` and `mapping`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from raylane.weights.layout.boxes import Box, View


class BoxRun(NamedTuple):
    """Part of a view that is a box of the tensor on which the view is."""

    start: tuple[int, ...]
    """First index in the view."""
    size: tuple[int, ...]
    at: tuple[int, ...]
    """First element of the box in the tensor."""
    dims: tuple[int | None, ...]
    """Dimension of the tensor along which each dimension of the view runs; None where it has one element."""


class ViewPiece(NamedTuple):
    """Box of a tensor whose elements are those of a view of a published tensor."""

    start: tuple[int, ...]
    name: str
    """Name of the published tensor."""
    view: View


class TargetRegion(NamedTuple):
    """Box of a published tensor, and where its elements lie in a tensor of the reader."""

    box: Box
    target: str
    """Name of the reader's tensor."""
    offset: int
    """Element of the target at which the box begins."""
    strides: tuple[int, ...]
    """Elements of the target from one index of the box to the next, for each dimension."""


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    return tuple(itertools.accumulate(shape[:0:-1], lambda a, b: a * b, initial=1))[::-1] if shape else ()


def _index(offset: int, shape: Sequence[int]) -> list[int]:
    """Return the index of the element at an offset."""
    index = []
    for stride in contiguous_strides(shape):
        index.append(offset // stride)
        offset %= stride
    return index


def runs(shape: Sequence[int], view: View) -> list[BoxRun]:
    """Divide a view of a contiguous tensor into boxes of the tensor. As few as its dimensions permit.

    Where an index of the view is more than one row of the tensor away from the next, each index is a box of its own.
    """
    if 0 in view.size:
        return []
    dims = [dim for dim, length in enumerate(shape) if length > 1]
    steps = contiguous_strides(shape)
    todo = [((0,) * len(view.size), view.size, view.offset)]
    done = []
    while todo:
        start, size, offset = todo.pop()
        at = _index(offset, shape)
        along: list[int | None] = []
        for number, (length, stride) in enumerate(zip(size, view.strides, strict=True)):
            dim = next((dim for dim in dims if steps[dim] <= stride), None) if length > 1 else None
            along.append(dim)
            if length == 1:
                continue
            # No row of the tensor, or not the next one: each index is a box of its own.
            if dim is None or steps[dim] != stride or dim in along[:-1]:
                cuts = list(range(length + 1))
            elif at[dim] + length > shape[dim]:  # it goes on in the next row of the dimension before
                cuts = [0, *range(shape[dim] - at[dim], length, shape[dim]), length]
            else:
                continue
            for first, stop in reversed(list(itertools.pairwise(cuts))):
                head, sizes = list(start), list(size)
                head[number], sizes[number] = start[number] + first, stop - first
                todo.append((tuple(head), tuple(sizes), offset + first * stride))
            break
        else:
            done.append(BoxRun(start, size, tuple(at), tuple(along)))
    return done


def pieces_of_view(shape: Sequence[int], pieces: Sequence[ViewPiece], view: View) -> list[ViewPiece]:
    """Return the pieces of a view of a tensor that consists of pieces. Elements of no piece are left out."""
    if len(pieces) == 1 and pieces[0].view == View(tuple(shape), contiguous_strides(shape), 0):
        return [ViewPiece((0,) * len(view.size), pieces[0].name, view)]  # the tensor is a published one
    parts = []
    for run in runs(shape, view):
        length = [1] * len(shape)
        for dim, size in zip(run.dims, run.size, strict=True):
            if dim is not None:
                length[dim] = size
        # What the run and a piece have in common, in indices of the tensor.
        for piece in pieces:
            bounds = list(zip(run.at, length, piece.start, piece.view.size, strict=True))
            lo = [max(at, start) for at, _, start, _ in bounds]
            hi = [min(at + size, start + count) for at, size, start, count in bounds]
            if any(first >= stop for first, stop in zip(lo, hi, strict=True)):
                continue
            rows = [(0, 1, 0) if dim is None else (lo[dim] - run.at[dim], hi[dim] - lo[dim], dim) for dim in run.dims]
            skipped = [first - start for first, start in zip(lo, piece.start, strict=True)]
            sources = piece.view.strides
            parts.append(
                ViewPiece(
                    tuple(start + first for start, (first, _, _) in zip(run.start, rows, strict=True)),
                    piece.name,
                    View(
                        tuple(size for _, size, _ in rows),
                        tuple(0 if dim is None else sources[dim] for dim in run.dims),
                        piece.view.offset + _dot(skipped, sources),
                    ),
                )
            )
    return parts


def regions_of(piece: ViewPiece, shape: Sequence[int], target: str, written: View) -> list[TargetRegion]:
    """Return the regions of a published tensor of this shape that a piece brings into a view of a reader's tensor."""
    regions = []
    for run in runs(shape, piece.view):
        size, strides = [1] * len(shape), [0] * len(shape)
        for dim, length, stride in zip(run.dims, run.size, written.strides, strict=True):
            if dim is not None:
                size[dim], strides[dim] = length, stride
        first = [begin + start for begin, start in zip(piece.start, run.start, strict=True)]
        offset = written.offset + _dot(first, written.strides)
        regions.append(TargetRegion(Box(run.at, tuple(size)), target, offset, tuple(strides)))
    return joined(regions)


def joined(regions: Iterable[TargetRegion]) -> list[TargetRegion]:
    """Return regions with adjacent ones made one where they are adjacent on both sides, and in order."""
    regions = list(regions)
    while True:
        merged: list[TargetRegion] = []
        for region in regions:
            both = _union(merged[-1], region) if merged else None
            if both is None:
                merged.append(region)
            else:
                merged[-1] = both
        if len(merged) == len(regions):
            return merged
        regions = merged


def _union(first: TargetRegion, second: TargetRegion) -> TargetRegion | None:
    """Return one region for two that follow each other along one dimension; None if they do not."""
    (start, size), (next_start, next_size) = first.box, second.box
    if first.target != second.target:
        return None
    other = [dim for dim, (a, b) in enumerate(zip(start, next_start, strict=True)) if a != b]
    if len(other) != 1:
        return None
    (dim,) = other
    if next_start[dim] != start[dim] + size[dim]:
        return None
    strides = list(first.strides)
    moved = second.offset - first.offset
    if size[dim] == 1:
        strides[dim] = moved  # a single row has no stride of its own
    if next_size[dim] > 1 and second.strides[dim] != strides[dim]:
        return None
    sizes = list(size)
    sizes[dim] += next_size[dim]
    fits = moved == size[dim] * strides[dim] and all(
        a == b and (x == y or a == 1)
        for at, (a, b, x, y) in enumerate(zip(size, next_size, first.strides, second.strides, strict=True))
        if at != dim
    )
    return TargetRegion(Box(start, tuple(sizes)), first.target, first.offset, tuple(strides)) if fits else None


def boxes_in_target(region: TargetRegion, shape: Sequence[int]) -> list[Box]:
    """Return the boxes of the reader's tensor, of this shape and contiguous, that a region fills."""
    boxes = []
    for run in runs(shape, View(region.box.size, region.strides, region.offset)):
        size = [1] * len(shape)
        for dim, length in zip(run.dims, run.size, strict=True):
            if dim is not None:
                size[dim] = length
        boxes.append(Box(run.at, tuple(size)))
    return boxes


def _dot(index: Sequence[int], strides: Sequence[int]) -> int:
    return sum(number * stride for number, stride in zip(index, strides, strict=True))

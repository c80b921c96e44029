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
    box: Box
    """Box of the tensor."""
    dims: tuple[int | None, ...]
    """Dimension of the tensor along which each dimension of the view runs; None where it has one element."""


class ViewPiece(NamedTuple):
    """Box of one tensor whose elements are those of a view of another one."""

    start: tuple[int, ...]
    """First element of the box."""
    name: str
    """Name of the other tensor."""
    view: View
    """View of the other tensor, of the size of the box."""

    @property
    def box(self) -> Box:
        """Box of the one tensor."""
        return Box(self.start, self.view.size)


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
            lengths = dict(zip(along, size, strict=True))
            box = Box(tuple(at), tuple(lengths.get(dim, 1) for dim in range(len(shape))))
            done.append(BoxRun(start, box, tuple(along)))
    return done


def pieces_of_view(shape: Sequence[int], pieces: Sequence[ViewPiece], view: View) -> list[ViewPiece]:
    """Return the pieces of a view of a tensor that consists of pieces. Elements of no piece are left out."""
    if len(pieces) == 1 and pieces[0].view == View(tuple(shape), contiguous_strides(shape), 0):
        return [ViewPiece((0,) * len(view.size), pieces[0].name, view)]  # the tensor is a published one
    parts = []
    for start, box, dims in runs(shape, view):
        for piece in pieces:
            common = box.common(piece.box)
            if common is None:
                continue
            skipped = common.within(box).start
            first = [at if dim is None else at + skipped[dim] for at, dim in zip(start, dims, strict=True)]
            size = tuple(1 if dim is None else common.size[dim] for dim in dims)
            strides = tuple(0 if dim is None else piece.view.strides[dim] for dim in dims)
            offset = piece.view.at(common.within(piece.box).start)
            parts.append(ViewPiece(tuple(first), piece.name, View(size, strides, offset)))
    return parts


def regions_of(piece: ViewPiece, shape: Sequence[int], target: str, written: View) -> list[ViewPiece]:
    """Return the boxes of a published tensor of this shape that a piece of it brings into a view of a reader's tensor.

    Their views are those of the reader's tensor, which has the name `target`.
    """
    regions = []
    for start, box, dims in runs(shape, piece.view):
        stride_of = dict(zip(dims, written.strides, strict=True))
        strides = tuple(stride_of.get(dim, 0) for dim in range(len(shape)))
        offset = written.at([begin + first for begin, first in zip(piece.start, start, strict=True)])
        regions.append(ViewPiece(box.start, target, View(box.size, strides, offset)))
    return joined(regions)


def joined(regions: Iterable[ViewPiece]) -> list[ViewPiece]:
    """Return regions with adjacent ones made one where they are adjacent on both sides, and in order."""
    regions = list(regions)
    while True:
        merged: list[ViewPiece] = []
        for region in regions:
            both = _union(merged[-1], region) if merged else None
            if both is None:
                merged.append(region)
            else:
                merged[-1] = both
        if len(merged) == len(regions):
            return merged
        regions = merged


def _union(first: ViewPiece, second: ViewPiece) -> ViewPiece | None:
    """Return one region for two that follow each other along one dimension; None if they do not."""
    start, name, (size, strides, offset) = first
    next_start, next_name, (next_size, next_strides, next_offset) = second
    other = [dim for dim, (a, b) in enumerate(zip(start, next_start, strict=True)) if a != b]
    if name != next_name or len(other) != 1:
        return None
    (dim,) = other
    moved = next_offset - offset
    # A single row has no stride of its own.
    stride = moved if size[dim] == 1 else strides[dim]
    if next_start[dim] != start[dim] + size[dim] or moved != size[dim] * stride:
        return None
    if next_size[dim] > 1 and next_strides[dim] != stride:
        return None
    for at, (a, b, x, y) in enumerate(zip(size, next_size, strides, next_strides, strict=True)):
        if at != dim and (a != b or (x != y and a != 1)):
            return None
    sizes = (*size[:dim], size[dim] + next_size[dim], *size[dim + 1 :])
    return ViewPiece(start, name, View(sizes, (*strides[:dim], stride, *strides[dim + 1 :]), offset))

"""Plans for reads of parts of a value: slices of its tensors, and reads straight into memory of another layout. Pure.

A read moves *parts*: contiguous runs of bytes that both the source's tensor and the reader's memory have in common.

    source, 4 columns of 8        reader, contiguous         parts
    . . # # # # . .               # # # #                    (block, offset of row 0, 4 elements)
    . . # # # # . .       ->      # # # #                    (block, offset of row 1, 4 elements)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from raylane.core.memory.spans import Span, strided_span
from raylane.transport.value.layout import ARRAY, LeafSpec

RUN_BYTES = 2048
"""Bytes that could be moved in the time that one more run costs, about 0.2 us."""
MAX_RUNS = 1 << 15
"""Limit of the runs of one leaf."""


class Part(NamedTuple):
    """A run of bytes of a block in the source, and the address in this process where it belongs."""

    block: int
    offset: int
    nbytes: int
    address: int


def sliced(spec: LeafSpec, itemsize: int, slices: Any) -> LeafSpec:
    """Return the layout of `leaf[slices]` within the same block; `itemsize` is in bytes.

    `slices` is an integer, a slice, an Ellipsis, or a tuple of these. IndexError, TypeError or ValueError names what is
    wrong.
    """
    selections = slices if isinstance(slices, tuple) else (slices,)
    rank = len(spec.shape)
    named = sum(selection is not Ellipsis for selection in selections)
    if named > rank or len(selections) - named > 1:
        raise IndexError(f"slices {slices!r} do not fit a tensor of shape {spec.shape}: it has {rank} dimensions")
    gap = next((i for i, selection in enumerate(selections) if selection is Ellipsis), len(selections))
    rest = (slice(None),) * (rank - named)
    full = (*selections[:gap], *rest, *selections[gap + 1 :])
    offset, shape, strides = spec.offset, [], []
    for dimension, (selection, size, stride) in enumerate(zip(full, spec.shape, spec.strides, strict=True)):
        if isinstance(selection, slice):
            start, stop, step = selection.indices(size)
            if step < 0 and spec.kind != ARRAY:
                raise ValueError(
                    f"slices {slices!r} have a negative step, which torch tensors cannot have. Read with a positive "
                    "step, and flip the result"
                )
            count = len(range(start, stop, step))
            offset += start * stride if count else 0
            shape.append(count)
            strides.append(stride * step)
            continue
        try:
            index = operator.index(selection)
        except TypeError:
            raise TypeError(
                f"slices must be integers, slices or an Ellipsis, got {selection!r}. Read a slice and index the result"
            ) from None
        if not -size <= index < size:
            raise IndexError(f"index {index} is out of range for dimension {dimension} of shape {spec.shape}")
        offset += (index % size) * stride
    block = -1 if 0 in shape else spec.block
    offset = 0 if block < 0 else offset
    return msgspec.structs.replace(spec, shape=tuple(shape), strides=tuple(strides), block=block, offset=offset)


def span_of(spec: LeafSpec, itemsize: int) -> Span:
    """Return the bytes of its block from the first to the last one that a leaf touches."""
    return strided_span(spec.offset, spec.shape, spec.strides, itemsize)


def size_of(spec: LeafSpec, itemsize: int) -> int:
    """Return the size of a leaf's elements in bytes."""
    return int(np.prod(spec.shape, dtype=np.int64)) * itemsize


def contiguous_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the strides in bytes of a contiguous array."""
    strides, step = [], itemsize
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def runs(
    shape: Sequence[int], itemsize: int, source_strides: Sequence[int], strides: Sequence[int]
) -> tuple[int, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the runs that two layouts of one shape have in common: their size, and their offsets in both layouts.

    Strides and results are in bytes. The shape must have elements.
    """
    # From the largest stride to the smallest, whatever the order of the dimensions.
    axes = sorted(
        ((size, a, b) for size, a, b in zip(shape, source_strides, strides, strict=True) if size > 1),
        key=lambda axis: (abs(axis[1]), abs(axis[2])),
    )
    nbytes = itemsize
    while axes and axes[0][1] == nbytes == axes[0][2]:
        nbytes *= axes.pop(0)[0]
    offsets = [np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)]
    # The smallest remaining stride varies fastest, so that offsets ascend in the source.
    for size, a, b in axes:
        steps = np.arange(size, dtype=np.int64)[:, None]
        offsets = [(steps * a + offsets[0]).ravel(), (steps * b + offsets[1]).ravel()]
    return nbytes, offsets[0], offsets[1]


def parts_of(spec: LeafSpec, itemsize: int, address: int, strides: Sequence[int]) -> list[Part] | None:
    """Return the parts that bring a leaf to an address, where it has these strides in bytes.

    None if one read of the leaf's whole span is cheaper: its runs are too many or too short.
    """
    if spec.block < 0:
        return []
    count = size_of(spec, itemsize)
    nbytes, there, target_runs = runs(spec.shape, itemsize, spec.strides, strides)
    if len(there) > MAX_RUNS or len(there) * RUN_BYTES > span_of(spec, itemsize).nbytes + count + RUN_BYTES:
        return None
    starts, targets = (there + spec.offset).tolist(), (target_runs + address).tolist()
    return [Part(spec.block, start, nbytes, target) for start, target in zip(starts, targets, strict=True)]

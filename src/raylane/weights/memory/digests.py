"""Digests of tensors: sums over their elements of mixed position and bits, so that those of parts add up.

The digest of a tensor depends on its shape, the size of its elements and their bits, and on nothing else: neither on
the ranks that hold it, nor on strides, order, or the number of parts in which it is read. `native.add_digests` computes
it; here regions of tensors are made the rows of its table, once for many versions:

    region of a tensor        rows of the table                           sums
    rows 0 to 3 of w    ->    address, position 0, 4 x 8 words     ->     sums[number of w] += ...
    rows 4 to 7 of w    ->    address, position 32, 4 x 8 words    ->     sums[number of w] += ...

Called by `publisher` and `verification`.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from raylane.core import native
from raylane.core.process.copying import MAX_THREADS, THREADED_FROM_BYTES, ThreadChoice
from raylane.weights.layout.boxes import Box, StoredLayout
from raylane.weights.layout.regions import contiguous_strides
from raylane.weights.memory.tensors import Regions, views_of

WORD_BYTES = 4
"""Largest word: elements of 8 and 16 bytes count as several words."""
DIMENSIONS = 3
"""Dimensions of a row; regions with more are several rows."""
COLUMNS = 4 + 3 * DIMENSIONS
PIECE_WORDS = 1 << 18
"""Number of words from which a row is divided, so that threads share the work."""
SCRATCH_BYTES = 2 << 20
"""Memory in which elements are converted before they are counted: small enough to stay in a cache."""
ALIGNMENT = 64
Sums = np.ndarray[Any, np.dtype[np.uint64]]
"""[tensors] Digests, modulo 2**64."""

_choice = ThreadChoice(min(MAX_THREADS, len(os.sched_getaffinity(0))))


class DigestPlace(NamedTuple):
    """Place of a region in a whole tensor, and the sum to which its elements are added."""

    number: int
    """Number of the sum."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: tuple[int, ...]
    """First element of the region in it."""
    dtype: torch.dtype
    """Dtype whose bits count: elements of another one are converted to it."""


class _Dimension(NamedTuple):
    """One dimension of a row, as `native.add_digests` has it."""

    length: int
    stride_bytes: int
    step: int
    """Distance of two words in the whole tensor."""


def rows_of(
    address: int, itemsize: int, strides: Sequence[int], box: Box, shape: Sequence[int], number: int
) -> Iterator[tuple[int, ...]]:
    """Yield the rows of a region: `box` of a tensor of this shape, of which the first element lies at an address.

    `strides` are those of the region in memory, in elements.
    """
    size = min(itemsize, WORD_BYTES)
    words = itemsize // size
    steps = contiguous_strides(shape)
    position = sum(first * step for first, step in zip(box.start, steps, strict=True)) * words
    each = zip(box.size, strides, steps, strict=True)
    dims = [_Dimension(count, stride * itemsize, step * words) for count, stride, step in each]
    for outer, inner in _divided(_merged([*dims, _Dimension(words, size, 1)])):
        at = address + sum(index * dim.stride_bytes for index, dim in outer)
        first = position + sum(index * dim.step for index, dim in outer)
        yield (at, size, number, first, *(value for column in zip(*inner, strict=True) for value in column))


def _merged(dims: Sequence[_Dimension]) -> list[_Dimension]:
    """Return as few dimensions as possible with the same words; at least `DIMENSIONS`."""
    merged: list[_Dimension] = []
    for dim in dims:
        before = merged[-1] if merged else None
        if dim.length == 1:
            continue
        if before and (before.stride_bytes, before.step) == (dim.stride_bytes * dim.length, dim.step * dim.length):
            merged[-1] = dim._replace(length=before.length * dim.length)
        else:
            merged.append(dim)
    single = dims[-1]._replace(length=1)
    return [single] * (DIMENSIONS - len(merged)) + merged


def _divided(
    dims: Sequence[_Dimension],
) -> Iterator[tuple[list[tuple[int, _Dimension]], list[_Dimension]]]:
    """Yield (indices with their dimensions, dimensions of a row): of a row at most about `PIECE_WORDS` words."""
    outer, inner = dims[:-DIMENSIONS], list(dims[-DIMENSIONS:])
    for indices in itertools.product(*(range(dim.length) for dim in outer)):
        fixed = list(zip(indices, outer, strict=True))
        if math.prod(dim.length for dim in inner) <= PIECE_WORDS:
            yield fixed, inner
            continue
        at = next(at for at, dim in enumerate(inner) if dim.length > 1)
        cut = inner[at]
        length = max(1, PIECE_WORDS // math.prod(dim.length for dim in inner[at + 1 :]))
        for first in range(0, cut.length, length):
            piece = cut._replace(length=min(length, cut.length - first))
            yield [*fixed, (first, cut)], [*inner[:at], piece, *inner[at + 1 :]]


def _is_counted_in_place(view: torch.Tensor, dtype: torch.dtype) -> bool:
    return view.is_cpu and view.dtype == dtype and not view.is_neg() and not view.is_conj()


class PreparedDigests:
    """Digests of regions of this process, which can be computed while the memory stays where it is.

    Of the regions it keeps addresses only, so that it does not keep tensors alive. Elements that lie on a device, or
    have another dtype than the one that counts, are converted in scratch memory.
    """

    def __init__(self, places: Sequence[DigestPlace], views: Sequence[torch.Tensor], count: int) -> None:
        """Prepare so many sums of regions: `views`, with the place of each."""
        self._count = count
        self._converted: list[int] = []
        """Numbers of the regions that are converted."""
        self._batches: list[_Batch] = []
        rows: list[tuple[int, ...]] = []
        for index, (place, view) in enumerate(zip(places, views, strict=True)):
            if not view.numel():
                continue
            if _is_counted_in_place(view, place.dtype):
                box = Box(place.start, tuple(view.shape))
                rows += rows_of(view.data_ptr(), view.itemsize, view.stride(), box, place.shape, place.number)
            else:
                self._convert(index, place, tuple(view.shape))
        self._rows = _table(rows)
        self._row_bytes = sum(view.nbytes for view in views)

    def _convert(self, index: int, place: DigestPlace, size: tuple[int, ...]) -> None:
        """Note a region that is converted, in pieces that fit into the scratch memory."""
        self._converted.append(index)
        number = len(self._converted) - 1
        itemsize = place.dtype.itemsize
        for box in _pieces(Box((0,) * len(size), size), max(1, SCRATCH_BYTES // itemsize)):
            nbytes = box.elements * itemsize
            if not self._batches or self._batches[-1].nbytes + nbytes > SCRATCH_BYTES:
                self._batches.append(_Batch())
            self._batches[-1].add(number, box, place)

    def run(self, find_views: Callable[[Sequence[int]], Sequence[torch.Tensor]]) -> Sums:
        """Return the sums. `find_views` returns the regions of these numbers, which lie where they lay before."""
        sums = np.zeros(self._count, dtype=np.uint64)
        _add(self._rows, sums, self._row_bytes)
        if self._converted:
            views = find_views(self._converted)
            scratch = torch.empty(max(batch.nbytes for batch in self._batches), dtype=torch.uint8)
            with torch.no_grad():
                for batch in self._batches:
                    batch.run(views, scratch, sums)
        return sums


class WrittenDigests:
    """Digests of what a rank writes to a version, from the tensors from which it writes."""

    def __init__(
        self,
        stored: StoredLayout,
        rank: int,
        regions: Regions,
        tensors: Mapping[str, torch.Tensor],
        written: Sequence[torch.Tensor],
    ) -> None:
        """Prepare the digests. `regions` and `written` are those of `writes_of`."""
        self._regions = regions
        # A second copy from a device would take as long as the first one.
        own = views_of(tensors, regions)
        self._written = {number: copy for number, copy in enumerate(written) if own[number].is_cuda}
        """Regions of the version that are counted instead of the tensors from which they were written."""
        views = [self._written.get(number, view) for number, view in enumerate(own)]
        places = [
            DigestPlace(number, tensor.shape, box.start, getattr(torch, tensor.dtype))
            for number, tensor in enumerate(stored.tensors.values())
            for room in tensor.boxes
            for writer, box in room.writes
            if writer == rank
        ]
        self._prepared = PreparedDigests(places, views, len(stored.tensors))

    def run(self, find_tensors: Callable[[], Mapping[str, torch.Tensor]]) -> Sums:
        """Return a sum for each stored tensor: 0 for those of which the rank writes nothing."""

        def find_views(numbers: Sequence[int]) -> Sequence[torch.Tensor]:
            own = iter(views_of(find_tensors(), [self._regions[n] for n in numbers if n not in self._written]))
            return [self._written[n] if n in self._written else next(own) for n in numbers]

        device = next((copy.device for copy in self._written.values() if copy.is_cuda), None)
        if device is None:
            return self._prepared.run(find_views)
        with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]  # not behind the next step
            return self._prepared.run(find_views)


class _Batch:
    """Pieces of regions that are converted at the same time, one after the other in the scratch memory."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._pieces: list[tuple[int, Box, torch.dtype, int]] = []
        """Number of the region, box in it, dtype, and first byte in the scratch memory."""
        self._rows: list[tuple[int, ...]] = []
        """Rows with addresses counted from the scratch memory."""
        self._table: np.ndarray[Any, Any] | None = None

    def add(self, number: int, box: Box, place: DigestPlace) -> None:
        itemsize = place.dtype.itemsize
        whole = Box(tuple(map(sum, zip(place.start, box.start, strict=True))), box.size)
        strides = contiguous_strides(box.size)
        self._rows += rows_of(self.nbytes, itemsize, strides, whole, place.shape, place.number)
        self._pieces.append((number, box, place.dtype, self.nbytes))
        self.nbytes += -(-box.elements * itemsize // ALIGNMENT) * ALIGNMENT

    def run(self, views: Sequence[torch.Tensor], scratch: torch.Tensor, sums: Sums) -> None:
        """Convert the pieces and add their digests."""
        if self._table is None:
            self._table, self._rows = _table(self._rows), []
        sources = [box.of(views[number]) for number, box, *_ in self._pieces]
        targets = [
            scratch[at : at + box.elements * dtype.itemsize].view(dtype).view(box.size)
            for _, box, dtype, at in self._pieces
        ]
        torch._foreach_copy_(targets, sources)
        table = self._table.copy()
        table[:, 0] += np.uint64(scratch.data_ptr())
        _add(table, sums, self.nbytes)


def _pieces(box: Box, most_elements: int) -> Iterator[Box]:
    """Yield boxes of at most so many elements that are together a box."""
    if box.elements <= most_elements:
        yield box
        return
    dim = next(dim for dim, length in enumerate(box.size) if length > 1)
    length = max(1, most_elements // math.prod(box.size[dim + 1 :]))
    for first in range(0, box.size[dim], length):
        start, size = list(box.start), list(box.size)
        start[dim], size[dim] = box.start[dim] + first, min(length, box.size[dim] - first)
        yield from _pieces(Box(tuple(start), tuple(size)), most_elements)


def _table(rows: Sequence[tuple[int, ...]]) -> np.ndarray[Any, Any]:
    return np.array(rows, dtype=np.uint64).reshape(len(rows), COLUMNS)


def _add(rows: np.ndarray[Any, Any], sums: Sums, nbytes: int) -> None:
    """Add the digests of a table of rows, with as many threads as are quick at present."""
    if not len(rows):
        return
    if nbytes < THREADED_FROM_BYTES:
        native.add_digests(rows, sums, 1)
        return
    threads, began_s = _choice.threads(), time.perf_counter()
    native.add_digests(rows, sums, threads)
    _choice.copied(threads, nbytes, time.perf_counter() - began_s)

"""Layouts of weights as values: which region of each tensor a rank holds, and where it is stored. Pure.

A *box* is a region of a whole tensor: a start and a size for each dimension. The tensor of a rank holds one box, or
several where its rows are not adjacent in the whole tensor:

    whole tensor, 8 rows     0 1 2 3 4 5 6 7
    rank 0 of 2 holds        0 1     4 5            two boxes, at rows 0 and 2 of its own tensor

`divide` gives the boxes of a rank from a mesh and placements as DTensor has them. `store` decides which rank writes
each box of a version, and where: replicas hold the same boxes, and share the work. A tensor of which all boxes are on
one host is stored there as a whole, so that readers can map it. Called by `plan` and `publisher`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from raylane.errors import WeightsLayoutError

# Only for annotations: the actors import this module, and need no torch.
if TYPE_CHECKING:
    import torch

ALIGNMENT = 64
"""Boxes are stored at multiples of this many bytes: a cache line, and enough for every dtype."""
MOST_CHUNKS = 64
"""Number of chunks of a large part: what readers that need little of it fetch for nothing is less than two of them."""
LEAST_BYTES = 4 << 20
"""Size of a chunk of a small part: below it a call costs more than its bytes."""


class Box(NamedTuple):
    """Region of a tensor, in elements."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    def common(self, other: Box) -> Box | None:
        """Return the region that two boxes have in common; None if there is none."""
        start = tuple(map(max, self.start, other.start))
        stops = [min(a + size_a, b + size_b) for a, size_a, b, size_b in zip(*self, *other, strict=True)]
        size = tuple(stop - first for first, stop in zip(start, stops, strict=True))
        return Box(start, size) if all(length > 0 for length in size) else None

    def within(self, other: Box) -> Box:
        """Return the same region with its start counted from that of another one."""
        return Box(tuple(mine - its for mine, its in zip(self.start, other.start, strict=True)), self.size)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the region of a tensor, without a copy."""
        for dim, (first, length) in enumerate(zip(self.start, self.size, strict=True)):
            if length != tensor.shape[dim]:
                tensor = tensor.narrow(dim, first, length)
        return tensor


class View(NamedTuple):
    """Region of the memory of a tensor, in elements."""

    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    """First element, counted from that of the tensor."""

    def at(self, index: Sequence[int]) -> int:
        """Return the offset of the element at an index."""
        return self.offset + sum(number * stride for number, stride in zip(index, self.strides, strict=True))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the region in the memory of a tensor, without a copy."""
        return tensor.as_strided(self.size, self.strides, int(tensor.storage_offset()) + self.offset)


class HeldBox(NamedTuple):
    """Box that a rank's own tensor holds, and where it begins in that tensor."""

    box: Box
    at: tuple[int, ...]


class TensorLayout(msgspec.Struct, frozen=True):
    """One tensor of a rank: the shape of the whole tensor, and the boxes that this rank holds."""

    shape: tuple[int, ...]
    dtype: str
    """Name as torch has it, such as `bfloat16`."""
    itemsize: int
    """Bytes of an element."""
    held: tuple[HeldBox, ...]


Layout = Mapping[str, TensorLayout]
"""Tensors of one rank by name."""


class StoredBox(NamedTuple):
    """Box of a version in the part of a host: contiguous, in row-major order."""

    part: int
    """Number of the part, see `StoredLayout.parts`."""
    offset: int
    """First byte in the part."""
    box: Box
    writes: tuple[tuple[int, Box], ...]
    """Ranks that write it, each with the box of the tensor that it writes. Together they are all of it, once."""


class StoredTensor(msgspec.Struct, frozen=True):
    """One published tensor. Its stored boxes are the whole tensor, without overlap."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    boxes: tuple[StoredBox, ...]


class StoredLayout(msgspec.Struct, frozen=True):
    """All tensors of a version, and the parts in which they lie."""

    tensors: dict[str, StoredTensor]
    parts: tuple[str, ...]
    """Name of each part, see `part_name`."""
    nbytes: tuple[int, ...]
    """Size of each part."""
    same: dict[str, str] = {}
    """Further names of tied tensors, and the name under which each is stored."""
    on_device: bool = False
    """True if the parts are memory of CUDA devices (`memory.buckets`)."""

    def name_of(self, name: str) -> str:
        """Return the name under which a tensor is stored."""
        return self.same.get(name, name)

    def tensor(self, name: str) -> StoredTensor:
        """Return the stored tensor of this name, which may be a further one."""
        return self.tensors[self.name_of(name)]


def part_name(host: str, rank: int, on_device: bool) -> str:
    """Return the name of the part that a rank writes: its host, or on a device its host and its number."""
    return f"{host}/{rank}" if on_device else host


def host_of(part: str) -> str:
    """Return the host of a part."""
    return part.partition("/")[0]


def is_on_device(part: str) -> bool:
    """Return True if a part is memory of a device."""
    return "/" in part


def chunk_bytes(part_bytes: int) -> int:
    """Return the size of the chunks in which a part is copied to other hosts; the last one may be smaller."""
    size = max(LEAST_BYTES, -(-part_bytes // MOST_CHUNKS))
    return -(-size // ALIGNMENT) * ALIGNMENT


class Division(NamedTuple):
    """Division of one dimension over the ranks of a mesh axis, as `torch.chunk` divides.

    With a `split_factor` above 1 the dimension is divided into so many parts first, and the rank gets its share of each
    of them (torch's `_StridedShard`, which FSDP2 over tensor parallelism uses).
    """

    dim: int
    split_factor: int = 1


def divide(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Division | None]
) -> tuple[HeldBox, ...]:
    """Return the boxes of the rank at a coordinate of a mesh; a placement of None replicates along its axis.

    Placements apply from the first mesh axis to the last, as those of DTensor.
    """
    runs = [[(0, size)] if size else [] for size in shape]
    for axis, rank, placement in zip(mesh, coordinate, placements, strict=True):
        if placement is None:
            continue
        # An axis divides what the axes before it have left, which may be several runs.
        rows = runs[placement.dim]
        parts = _chunks(sum(stop - start for start, stop in rows), placement.split_factor)
        shares = [(lo + a, lo + b) for lo, hi in parts for a, b in _chunks(hi - lo, axis)[rank : rank + 1]]
        runs[placement.dim] = _joined([run for lo, hi in shares for run in _taken(rows, lo, hi)])
    boxes = []
    # Where each run begins in the memory of the rank, which holds its runs one after the other.
    offsets = [list(itertools.accumulate([stop - start for start, stop in rows], initial=0)) for rows in runs]
    for numbers in itertools.product(*(range(len(rows)) for rows in runs)):
        picked = [rows[number] for rows, number in zip(runs, numbers, strict=True)]
        box = Box(tuple(start for start, _ in picked), tuple(stop - start for start, stop in picked))
        boxes.append(HeldBox(box, tuple(at[number] for at, number in zip(offsets, numbers, strict=True))))
    return tuple(boxes)


def _chunks(length: int, count: int) -> list[tuple[int, int]]:
    """Return the parts into which `torch.chunk` divides a length; the last ones may be empty."""
    step = -(-length // count)
    return [(min(i * step, length), min((i + 1) * step, length)) for i in range(count)]


def _taken(rows: Iterable[tuple[int, int]], lo: int, hi: int) -> list[tuple[int, int]]:
    """Return the rows from the one with the number `lo` up to `hi`, counted through all runs."""
    taken, begin = [], 0
    for start, stop in rows:
        first, last = max(lo - begin, 0), min(hi - begin, stop - start)
        if first < last:
            taken.append((start + first, start + last))
        begin += stop - start
    return taken


def _joined(rows: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the runs with adjacent ones made one."""
    joined: list[tuple[int, int]] = []
    for start, stop in rows:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def store(
    layouts: Sequence[Layout],
    parts: Sequence[str] | None = None,
    same: Mapping[str, str] | None = None,
    *,
    on_device: bool = False,
) -> StoredLayout:
    """Return where each box of a version is stored, and who writes it.

    `layouts` and `parts` are those of all ranks, by rank (None: one part); `same` has further names of tensors that are
    stored once. Of the ranks that hold a box, the one with the fewest bytes so far writes it.

    WeightsLayoutError names tensors on which the ranks do not agree, or that are incomplete.
    """
    holders: dict[str, dict[Box, list[int]]] = {}
    first_of: dict[str, tuple[int, TensorLayout]] = {}
    # Equal boxes of several ranks are replicas; boxes that only overlap are an error, found below.
    for rank, layout in enumerate(layouts):
        for name, tensor in layout.items():
            first_rank, first = first_of.setdefault(name, (rank, tensor))
            if (first.shape, first.dtype) != (tensor.shape, tensor.dtype):
                raise WeightsLayoutError(
                    f"the ranks do not agree on {name!r}: rank {first_rank} has {first.dtype} {first.shape}, rank "
                    f"{rank} has {tensor.dtype} {tensor.shape}. All ranks must publish parts of the same tensors"
                )
            boxes = holders.setdefault(name, {})
            for held in tensor.held:
                boxes.setdefault(held.box, []).append(rank)
    rooms = _Rooms(parts if parts is not None else [""] * len(layouts))
    tensors = {}
    for name, boxes in holders.items():
        tensor = first_of[name][1]
        # As many elements as the tensor has, and no overlap: then nothing is missing either.
        count, total = sum(box.elements for box in boxes), math.prod(tensor.shape)
        if count != total or (len(boxes) > 1 and have_overlap(list(boxes))):
            cause = "no rank holds some of them" if count < total else "ranks hold different regions that overlap"
            raise WeightsLayoutError(
                f"the ranks hold {count} elements of {name!r}, whose shape {tensor.shape} has {total}: {cause}. "
                "Publish from every rank of the trainer, each with its own rank, and say with `places` what a part of "
                "a tensor is part of"
            )
        tensors[name] = rooms.place(tensor, boxes)
    return StoredLayout(tensors, tuple(rooms.parts), tuple(rooms.nbytes), dict(same or {}), on_device)


class _Rooms:
    """Parts that are filled tensor by tensor."""

    def __init__(self, parts: Sequence[str]) -> None:
        """Begin with empty parts; `parts` has that of each rank."""
        self.parts = list(dict.fromkeys(parts))
        self.nbytes = [0] * len(self.parts)
        self._part_of = [self.parts.index(part) for part in parts]
        self._written = [0] * len(parts)
        """Bytes that each rank writes."""

    def place(self, tensor: TensorLayout, holders: Mapping[Box, Sequence[int]]) -> StoredTensor:
        """Give a tensor its room; `holders` has the ranks that hold each of its boxes."""
        # Parts that can have every box of the tensor, so that it lies in one piece: readers map whole tensors only.
        parts = set(range(len(self.parts)))
        for ranks in holders.values():
            parts &= {self._part_of[rank] for rank in ranks}
        stored = []
        if parts and holders:
            # The emptiest one: parts of about equal size are copied to other hosts in about equal time.
            part = min(parts, key=lambda part: self.nbytes[part])
            writes = []
            for box, ranks in holders.items():
                writer = self._writer([rank for rank in ranks if self._part_of[rank] == part], box, tensor.itemsize)
                writes.append((writer, box))
            whole = Box((0,) * len(tensor.shape), tensor.shape)
            stored.append(self._room(part, whole, tensor.itemsize, writes))
        else:
            # No part can have all of it: each box lies in that of the rank that writes it.
            for box, ranks in holders.items():
                writer = self._writer(ranks, box, tensor.itemsize)
                stored.append(self._room(self._part_of[writer], box, tensor.itemsize, [(writer, box)]))
        return StoredTensor(tensor.shape, tensor.dtype, tensor.itemsize, tuple(stored))

    def _writer(self, ranks: Sequence[int], box: Box, itemsize: int) -> int:
        # In order of ranks where they are equal, so that all ranks find the same writer without asking each other.
        writer = min(ranks, key=lambda rank: self._written[rank])
        self._written[writer] += box.elements * itemsize
        return writer

    def _room(self, part: int, box: Box, itemsize: int, writes: Iterable[tuple[int, Box]]) -> StoredBox:
        # Aligned for every dtype, and for readers that map tensors.
        offset = self.nbytes[part]
        self.nbytes[part] += -(-box.elements * itemsize // ALIGNMENT) * ALIGNMENT
        return StoredBox(part, offset, box, tuple(writes))


def have_overlap(boxes: Sequence[Box]) -> bool:
    """Return True if two boxes, of which none is empty, have an element in common."""
    import numpy as np

    starts = np.array([box.start for box in boxes])
    stops = starts + np.array([box.size for box in boxes])
    # Along the dimension with the most distinct starts few others can overlap a box, so few pairs are compared.
    dim = max(range(starts.shape[1]), key=lambda dim: len(np.unique(starts[:, dim])))
    order = np.argsort(starts[:, dim], kind="stable")
    starts, stops = starts[order], stops[order]
    reach = np.searchsorted(starts[:, dim], stops[:, dim], side="left")
    for number, last in enumerate(reach):
        others = slice(number + 1, last)
        if bool(((starts[others] < stops[number]) & (stops[others] > starts[number])).all(axis=1).any()):
            return True
    return False

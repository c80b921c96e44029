"""Plans of a reader: which part of which stored box goes to which part of its own tensors. Pure.

Made once for a pair of layouts, and used for all later versions of the same layout.

    stored boxes of a tensor         the reader's box        pieces
    host a   rows 0 to 3             rows 2 to 5      ->     host a, rows 2 and 3 -> its rows 0 and 1
    host b   rows 4 to 7                                     host b, rows 4 and 5 -> its rows 2 and 3
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from raylane.core.listing import listed
from raylane.errors import WeightsLayoutError
from raylane.weights.layout.boxes import Box, HeldBox, Layout, StoredLayout, chunk_bytes

FLOATS = ("float", "bfloat")
"""Beginnings of the names of dtypes that are converted to each other."""
SCALED = ("float8", "float4")
"""Beginnings of the names of dtypes to which nothing is converted: their values are meant to be scaled."""

WRAPPER_PARTS = ("_orig_mod", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Parts of names that torch's wrappers of modules add."""


class TensorPieces(NamedTuple):
    """All pieces of one tensor of a reader: what a stored box and a box of the reader have in common.

    Arrays, because a plan may have millions; one row for each piece.
    """

    name: str
    boxes: np.ndarray[Any, Any]
    """[pieces] Number of the stored box in its tensor."""
    sources: np.ndarray[Any, Any]
    """[pieces, dimensions] First element in the stored box."""
    targets: np.ndarray[Any, Any]
    """[pieces, dimensions] First element in the reader's tensor."""
    sizes: np.ndarray[Any, Any]
    """[pieces, dimensions]"""
    held: np.ndarray[Any, Any]
    """[pieces] Number of the box of the reader."""

    def rows(self) -> Iterator[tuple[int, Box, Box, int]]:
        """Yield number of the stored box, box in it, box in the reader's tensor, number of the reader's box."""
        for box, source, target, size, held in zip(*(array.tolist() for array in self[1:]), strict=True):
            yield box, Box(tuple(source), tuple(size)), Box(tuple(target), tuple(size)), held


class Plan(msgspec.Struct, frozen=True, dict=True):
    """All pieces of one reader, with the layout that they are taken from."""

    stored: StoredLayout
    pieces: tuple[TensorPieces, ...]

    @functools.cached_property
    def bytes_by_part(self) -> dict[str, int]:
        """Bytes to read of each part that has something for this reader."""
        counts = np.zeros(len(self.stored.nbytes), dtype=np.int64)
        for pieces in self.pieces:
            tensor = self.stored.tensor(pieces.name)
            parts = np.array([box.part for box in tensor.boxes])[pieces.boxes]
            np.add.at(counts, parts, pieces.sizes.prod(axis=1) * tensor.itemsize)
        return {part: nbytes for part, nbytes in zip(self.stored.parts, counts.tolist(), strict=True) if nbytes}

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return sum(self.bytes_by_part.values())

    def chunks(self, part: str) -> list[int]:
        """Return the numbers of the chunks (see `chunk_bytes`) that this reader needs of a part."""
        return self._chunks_by_part[part]

    @functools.cached_property
    def _chunks_by_part(self) -> dict[str, list[int]]:
        needed: dict[str, set[int]] = {part: set() for part in self.stored.parts}
        steps = [chunk_bytes(nbytes) for nbytes in self.stored.nbytes]
        for pieces in self.pieces:
            tensor = self.stored.tensor(pieces.name)
            for number, start, size in zip(pieces.boxes.tolist(), pieces.sources, pieces.sizes, strict=True):
                part, offset, box, _ = tensor.boxes[number]
                strides = np.cumprod([1, *box.size[:0:-1]])[::-1][: len(start)]
                first = offset + int(start @ strides) * tensor.itemsize
                last = offset + int((start + size - 1) @ strides) * tensor.itemsize
                chunks = range(first // steps[part], (last + tensor.itemsize - 1) // steps[part] + 1)
                needed[self.stored.parts[part]].update(chunks)
        return {part: sorted(chunks) for part, chunks in needed.items()}

    def __str__(self) -> str:
        count = sum(len(pieces.boxes) for pieces in self.pieces)
        lines = [f"{len(self.pieces)} tensors in {count} pieces, {self.nbytes:,} bytes"]
        lines += [f"  from host {part}: {nbytes:,} bytes" for part, nbytes in self.bytes_by_part.items()]
        return "\n".join(lines)


def make_plans(stored: StoredLayout, readers: Sequence[Layout], *, subset: bool = False) -> list[Plan]:
    """Return the plan of each reader. Several at once cost little more than one.

    WeightsLayoutError names tensors that are not published, have another shape, or cannot be converted; and, unless
    `subset` is set, published tensors that a reader does not have.
    """
    for layout in readers:
        _check(stored, layout, subset=subset)
    # Readers of one tensor together, so that NumPy compares all their boxes at once.
    users: dict[str, list[tuple[int, int, HeldBox]]] = {}
    for number, layout in enumerate(readers):
        for name, tensor in layout.items():
            users.setdefault(name, []).extend((number, *held) for held in enumerate(tensor.held))
    pieces: list[list[TensorPieces]] = [[] for _ in readers]
    for name, held_boxes in users.items():
        boxes = stored.tensor(name).boxes
        if not held_boxes or not boxes:
            continue
        source_starts, source_sizes = _bounds([box.box for box in boxes])
        target_starts, target_sizes = _bounds([held.box for *_, held in held_boxes])
        ats = np.array([held.at for *_, held in held_boxes], dtype=np.int64).reshape(len(held_boxes), -1)
        # [target, source, dimension]
        lo = np.maximum(target_starts[:, None], source_starts[None])
        hi = np.minimum((target_starts + target_sizes)[:, None], (source_starts + source_sizes)[None])
        target_numbers, source_numbers = np.nonzero((hi > lo).all(axis=2))
        lo, hi = lo[target_numbers, source_numbers], hi[target_numbers, source_numbers]
        rows = (
            source_numbers,
            lo - source_starts[source_numbers],
            lo - target_starts[target_numbers] + ats[target_numbers],
            hi - lo,
            np.array([index for _, index, _ in held_boxes])[target_numbers],
        )
        # The pieces are in the order of the targets, and these in the order of the readers.
        numbers = np.array([number for number, *_ in held_boxes])[target_numbers]
        present, firsts = np.unique(numbers, return_index=True)
        for number, first, last in zip(present, firsts, [*firsts[1:], len(numbers)], strict=True):
            pieces[number].append(TensorPieces(name, *(array[first:last] for array in rows)))
    return [Plan(stored, tuple(each)) for each in pieces]


def _bounds(boxes: Sequence[Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the starts and the sizes of boxes, one row for each box, one column for each dimension."""
    if not boxes[0].start:
        return np.zeros((len(boxes), 0), dtype=np.int64), np.zeros((len(boxes), 0), dtype=np.int64)
    starts = np.array([box.start for box in boxes], dtype=np.int64)
    return starts, np.array([box.size for box in boxes], dtype=np.int64)


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPER_PARTS)


def _check(stored: StoredLayout, layout: Layout, *, subset: bool) -> None:
    """Raise WeightsLayoutError if a reader cannot take these tensors, before anything is read."""
    missing = [name for name in layout if stored.name_of(name) not in stored.tensors]
    present = {stored.name_of(name) for name in layout}
    surplus = [] if subset else [name for name in stored.tensors if name not in present]
    if missing or surplus:
        problems = []
        if missing:
            problems.append(f"{len(missing)} tensors of the reader are not published: {listed(missing)}")
        if surplus:
            problems.append(f"{len(surplus)} published tensors are not in the reader: {listed(surplus)}")
        remedy = "Use the same names at both ends; a reader that needs only some of the tensors passes subset=True"
        if {_unwrapped(name) for name in missing} & {_unwrapped(name) for name in stored.tensors}:
            remedy = (
                f"The names differ by the part of a wrapper ({', '.join(WRAPPER_PARTS)}). Pass the module itself at "
                "both ends, or rename the entries of the dict"
            )
        raise WeightsLayoutError(
            f"the reader's tensors are not those of the publisher: {'; '.join(problems)}. {remedy}"
        )
    for name, tensor in layout.items():
        published = stored.tensor(name)
        if published.shape != tensor.shape:
            raise WeightsLayoutError(
                f"{name!r} is published with the shape {published.shape}, and the reader has {tensor.shape}. If the "
                "reader holds a part of it, say which with `places`"
            )
        converted = published.dtype.startswith(FLOATS) and tensor.dtype.startswith(FLOATS)
        if published.dtype != tensor.dtype and tensor.dtype.startswith(SCALED):
            raise WeightsLayoutError(
                f"{name!r} is published as {published.dtype}, and the reader has {tensor.dtype}, which needs a scale. "
                "Publish the quantised tensors and their scales, or read in bfloat16"
            )
        if published.dtype != tensor.dtype and not converted:
            raise WeightsLayoutError(
                f"{name!r} is published as {published.dtype}, and the reader has {tensor.dtype}. Only floating-point "
                "dtypes are converted to each other"
            )

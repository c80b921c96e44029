"""Ranks laid out on named axes: the mapping between a flat rank and its coordinates.

Pure, and independent of Ray, torch and batches. Used by `dispatch` to plan calls, by `WorkerGroup`, and by a trainer
that builds its device mesh on the same axes. Terms: an *axis* is a named dimension of the layout; a *rank* is a
worker's number in the group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType

import numpy as np
import numpy.typing as npt


class NamedSharding:
    """An array of unique ranks (int, any order) with a name for each of its axes.

    The coordinates of a rank are found in constant time. Immutable: `layout` is a read-only copy. Two shardings are
    equal if their ranks and names are equal. Raises ValueError for a layout with repeated or negative ranks, for an
    empty layout, and for names that are repeated or whose number differs from the number of axes.
    """

    def __init__(self, layout: npt.ArrayLike, names: Sequence[str]) -> None:
        array = np.array(layout)
        if array.size == 0 or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"a layout must hold integer ranks, got shape {array.shape} of dtype {array.dtype}")
        if array.ndim == 0:
            raise ValueError("a layout needs at least one axis; for a single worker pass [0]")
        if isinstance(names, str) or len(names) != array.ndim:
            raise ValueError(f"the layout has {array.ndim} axes of sizes {list(array.shape)}, the names are {names!r}")
        if len(set(names)) != len(names):
            raise ValueError(f"axis names must differ from each other, got {list(names)}")
        ranks = array.ravel().tolist()
        if min(ranks) < 0:
            raise ValueError(f"ranks must not be negative, got {min(ranks)}")
        if len(set(ranks)) != len(ranks):
            repeated = sorted({rank for rank in ranks if ranks.count(rank) > 1})
            raise ValueError(f"each rank must occur once in a layout; repeated ranks: {repeated}")
        # `layout` returns this array itself, and hashing needs it constant.
        array.flags.writeable = False
        self._layout = array
        self._names = tuple(names)
        # Index tuple by rank, built once: a lookup for each worker would otherwise search the layout every time.
        self._coords: dict[int, tuple[int, ...]] = {
            int(rank): tuple(int(i) for i in index) for index, rank in np.ndenumerate(array)
        }

    @classmethod
    def of(cls, **axes: int) -> NamedSharding:
        """Return ranks 0, 1, ... in row-major order over the axes given as name=size; the last axis varies fastest."""
        for name, size in axes.items():
            if size < 1:
                raise ValueError(f"the size of axis {name!r} must be at least 1, got {size}")
        return cls(np.arange(math.prod(axes.values())).reshape(tuple(axes.values())), tuple(axes))

    @property
    def layout(self) -> npt.NDArray[np.integer]:
        """Ranks as a read-only array with one array axis per named axis."""
        return self._layout

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, in the order of the layout's axes."""
        return self._names

    @property
    def shape(self) -> Mapping[str, int]:
        """Number of coordinates by axis name."""
        return MappingProxyType(dict(zip(self._names, self._layout.shape, strict=True)))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self._layout.ndim

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._layout.size

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, ascending."""
        return tuple(sorted(self._coords))

    def get_axis_index(self, name: str) -> int:
        """Return the position of an axis in the layout. ValueError names the known axes."""
        self.check_axes([name], "axis")
        return self._names.index(name)

    def get_axis_size(self, name: str) -> int:
        """Return the number of coordinates on an axis. ValueError names the known axes."""
        return int(self._layout.shape[self.get_axis_index(name)])

    def get_worker_coords(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank by axis name. ValueError for a rank that is not in the layout."""
        return dict(zip(self._names, self.get_index(rank), strict=True))

    def get_index(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of a rank in the order of `names`."""
        try:
            return self._coords[rank]
        except KeyError:
            raise ValueError(f"rank {rank} is not in this layout; it has {_brief(self.ranks)}") from None

    def get_ranks(self, **coords: int) -> NamedSharding | int:
        """Fix some coordinates; return the sharding over the remaining axes, or a rank if every axis is fixed."""
        index = self._fix(coords)
        part = self._layout[index]
        unused = [name for name in self._names if name not in coords]
        return NamedSharding(part, unused) if unused else int(part)

    def get_ranks_by_coord(self, **coords: int) -> list[int]:
        """Return the ranks with these coordinates in layout order; all ranks if no coordinate is given."""
        return [int(rank) for rank in np.ravel(self._layout[self._fix(coords)])]

    def is_axis_zero(self, rank: int, axes: Iterable[str]) -> bool:
        """Return True if the rank has coordinate 0 on each of these axes."""
        index = self.get_index(rank)
        return all(index[self.get_axis_index(axis)] == 0 for axis in axes)

    def check_axes(self, axes: Iterable[str], argument: str) -> None:
        """Raise ValueError for an unknown or repeated axis; the message begins with `argument`."""
        seen: set[str] = set()
        for axis in axes:
            if axis not in self._names:
                close = get_close_matches(axis, self._names, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ValueError(f"{argument}: no axis {axis!r} here; the axes are {list(self._names)}{hint}")
            if axis in seen:
                raise ValueError(f"{argument}: axis {axis!r} is listed twice; the axes are {list(self._names)}")
            seen.add(axis)

    def _fix(self, coords: Mapping[str, int]) -> tuple[int | slice, ...]:
        self.check_axes(coords, "coordinates")
        for name, value in coords.items():
            if not 0 <= value < self.shape[name]:
                raise ValueError(f"axis {name!r} has coordinates 0 to {self.shape[name] - 1}, got {value}")
        return tuple(coords.get(name, slice(None)) for name in self._names)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NamedSharding):
            return NotImplemented
        return self._names == other._names and np.array_equal(self._layout, other._layout)

    def __hash__(self) -> int:
        return hash((self._names, self._layout.shape, self._layout.tobytes()))

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.shape.items())
        return f"NamedSharding({axes}; ranks {_brief(self.ranks)})"


def _brief(ranks: Sequence[int]) -> str:
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}..{ranks[-1]}"
    return str(list(ranks))

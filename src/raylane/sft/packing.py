"""Which documents share a row of fixed length: pure functions on lengths. Called by `data.RowSource`.

A plan is a list of packs, each a tuple of document indices in rising order; the packs themselves are in the order of
their first document. The same lengths always give the same plan, so every worker can make it for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

__all__ = ["PackPlan", "efficiency", "plan_packs"]

Algorithm = Literal["first_fit_decreasing", "best_fit_decreasing", "concatenate", "none"]
PackPlan = list[tuple[int, ...]]


def plan_packs(lengths: Sequence[int] | np.ndarray, capacity: int, algorithm: Algorithm) -> PackPlan:
    """Put documents of `lengths` tokens into rows of `capacity` tokens; no document is split.

    "none" gives each its own row; "concatenate" fills row after row in the order of the data. ValueError when a
    document is empty or does not fit in a row, or the algorithm is unknown.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    bad = np.flatnonzero((sizes > capacity) | (sizes < 1))
    if bad.size:
        first = int(bad[0])
        raise ValueError(f"document {first} has {int(sizes[first])} tokens, which must be 1 to {capacity}")
    try:
        plan = _ALGORITHMS[algorithm]
    except KeyError:
        raise ValueError(f"unknown packing algorithm {algorithm!r}; there is {', '.join(_ALGORITHMS)}") from None
    packs = [tuple(sorted(pack)) for pack in plan(sizes, capacity)]
    return sorted(packs)


def efficiency(lengths: Sequence[int] | np.ndarray, num_rows: int, capacity: int) -> float:
    """Part of the positions of all rows that hold a token; 0 when there are no rows."""
    return float(np.sum(np.asarray(lengths, dtype=np.int64))) / (num_rows * capacity) if num_rows else 0.0


def _one_each(sizes: np.ndarray, capacity: int) -> list[list[int]]:
    return [[index] for index in range(len(sizes))]


def _concatenate(sizes: np.ndarray, capacity: int) -> list[list[int]]:
    packs: list[list[int]] = []
    free = 0
    for index, size in enumerate(sizes.tolist()):
        if size > free:
            packs.append([])
            free = capacity
        packs[-1].append(index)
        free -= size
    return packs


def _longest_first(sizes: np.ndarray) -> list[int]:
    order: list[int] = np.argsort(-sizes, kind="stable").tolist()
    return order


def _first_fit_decreasing(sizes: np.ndarray, capacity: int) -> list[list[int]]:
    """Longest first, each into the first row with room: n log n by a tree whose nodes hold the most room below them."""
    packs: list[list[int]] = []
    leaves = 1 << max(len(sizes) - 1, 0).bit_length()
    room = [capacity] * (2 * leaves)
    for index in _longest_first(sizes):
        size = int(sizes[index])
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= size else 2 * node + 1
        row = node - leaves
        if row == len(packs):
            packs.append([])
        packs[row].append(index)
        room[node] -= size
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return packs


def _best_fit_decreasing(sizes: np.ndarray, capacity: int) -> list[list[int]]:
    """Longest first, each into the fullest row with room (the latest touched among equals).

    `rows_with[free]` lists rows by the room they have left, and bit `free` of `some` says that this list is not empty:
    the lowest set bit at or above a size is the fullest row that takes it.
    """
    packs: list[list[int]] = []
    rows_with: list[list[int]] = [[] for _ in range(capacity + 1)]
    some = 0
    for index in _longest_first(sizes):
        size = int(sizes[index])
        fitting = some >> size
        if fitting:
            free = size + (fitting & -fitting).bit_length() - 1
            row = rows_with[free].pop()
            if not rows_with[free]:
                some &= ~(1 << free)
        else:
            row, free = len(packs), capacity
            packs.append([])
        packs[row].append(index)
        rows_with[free - size].append(row)
        some |= 1 << (free - size)
    return packs


_ALGORITHMS: dict[str, Callable[[np.ndarray, int], list[list[int]]]] = {
    "first_fit_decreasing": _first_fit_decreasing,
    "best_fit_decreasing": _best_fit_decreasing,
    "concatenate": _concatenate,
    "none": _one_each,
}

"""Packing of documents into rows of fixed length: pure functions on lengths. Called by `mixing.open_rows`.

The result is a list of packs, each a tuple of document indices in rising order; the packs are ordered by their first
document. The same lengths always give the same packs, so every worker computes them independently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

Algorithm = Literal["first_fit_decreasing", "best_fit_decreasing", "concatenate", "none"]
Packs = list[tuple[int, ...]]


def pack_documents(lengths: Sequence[int] | np.ndarray, capacity: int, algorithm: Algorithm) -> Packs:
    """Assign documents of `lengths` tokens to rows of `capacity` tokens, without splitting a document.

    "none" gives each document a row of its own; "concatenate" fills rows in the order of the data. ValueError if a
    document is empty or longer than a row, or if the algorithm is unknown.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    bad = np.flatnonzero((sizes > capacity) | (sizes < 1))
    if bad.size:
        first = int(bad[0])
        raise ValueError(f"document {first} has {int(sizes[first])} tokens, which must be 1 to {capacity}")
    try:
        assign = _ALGORITHMS[algorithm]
    except KeyError:
        raise ValueError(f"algorithm must be one of {', '.join(_ALGORITHMS)}, got {algorithm!r}") from None
    packs = [tuple(sorted(pack)) for pack in assign(sizes, capacity)]
    return sorted(packs)


def efficiency(lengths: Sequence[int] | np.ndarray, num_rows: int, capacity: int) -> float:
    """Return the fraction of all positions that hold a token; 0 if there are no rows."""
    return float(np.sum(np.asarray(lengths, dtype=np.int64))) / (num_rows * capacity) if num_rows else 0.0


def concatenate(sizes: np.ndarray, capacity: int) -> list[list[int]]:
    """Fill row after row in the order of the data; a document that does not fit starts a new row."""
    packs: list[list[int]] = []
    free = 0
    for index, size in enumerate(sizes.tolist()):
        if size > free:
            packs.append([])
            free = capacity
        packs[-1].append(index)
        free -= size
    return packs


def first_fit_decreasing(sizes: np.ndarray, capacity: int) -> list[list[int]]:
    """Place the longest documents first, each into the first row with room.

    Takes O(n log n): the nodes of a binary tree over the rows hold the largest free room below them.
    """
    packs: list[list[int]] = []
    leaves = 1 << max(len(sizes) - 1, 0).bit_length()
    room = [capacity] * (2 * leaves)
    for index in np.argsort(-sizes, kind="stable").tolist():
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


def best_fit_decreasing(sizes: np.ndarray, capacity: int) -> list[list[int]]:
    """Place the longest documents first, each into the fullest row with room (the latest used among equals).

    `rows_with[free]` lists the rows with `free` tokens of room. Bit `free` of `nonempty` is set if that list has an
    entry, so the lowest set bit at or above a size is the fullest row that has room.
    """
    packs: list[list[int]] = []
    rows_with: list[list[int]] = [[] for _ in range(capacity + 1)]
    nonempty = 0
    for index in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[index])
        fitting = nonempty >> size
        if fitting:
            free = size + (fitting & -fitting).bit_length() - 1
            row = rows_with[free].pop()
            if not rows_with[free]:
                nonempty &= ~(1 << free)
        else:
            row, free = len(packs), capacity
            packs.append([])
        packs[row].append(index)
        rows_with[free - size].append(row)
        nonempty |= 1 << (free - size)
    return packs


_ALGORITHMS: dict[str, Callable[[np.ndarray, int], list[list[int]]]] = {
    # Keys are the values of policy.sequence_packing.algorithm, and "none" for enabled=false.
    "first_fit_decreasing": first_fit_decreasing,
    "best_fit_decreasing": best_fit_decreasing,
    "concatenate": concatenate,
    "none": lambda sizes, capacity: [[index] for index in range(len(sizes))],
}

"""Answer of a process to the question what it holds (`wire.HoldingsQuery`). Pure, apart from reading the clock."""

from __future__ import annotations

import heapq
import time
from typing import TYPE_CHECKING

from raylane.transport.hold.store import Entry, Store
from raylane.transport.link import wire

if TYPE_CHECKING:
    from raylane.core.memory.receive_pool import BufferPool
    from raylane.transport.hold.anchors import ActorKeeper

MOST_VALUES = 600
"""Limit of the values in one answer, so that it fits a frame of 1 MiB; a value takes at most 0.9 KB."""
_MOST_ACTORS = 100
_MOST_METHODS = 10
_MOST_CHARACTERS = 200


def holdings(
    store: Store,
    pool: BufferPool,
    keeper: ActorKeeper | None,
    most: int,
    *,
    budget: int | None,
    waiting: int,
    regions: tuple[int, int, int] = (0, 0, 0),
    mapped: tuple[int, int] = (0, 0),
) -> wire.Holdings:
    """Return what this process holds, with its `most` largest and `most` oldest values (MOST_VALUES in all).

    `budget` is the limit of the store in bytes, and `waiting` the number of publications that wait for room; `regions`
    are the bytes in memory of `raylane.empty`, all and those that other processes read; `mapped` the bytes of other
    processes that this one has mapped, in use and idle.
    """
    pool.reclaim()
    entries = store.entries()
    actors = {} if keeper is None else keeper.kept()
    return wire.Holdings(
        entries=len(entries),
        nbytes=sum(entry.nbytes for entry, _ in entries),
        budget=budget,
        waiting=waiting,
        pool_idle_bytes=pool.idle_bytes,
        pool_used_bytes=pool.used_bytes,
        shared_bytes=store.shared.nbytes,
        shared_idle_bytes=store.shared.idle_bytes,
        values=[_held(*item) for item in _chosen(entries, most)],
        kept_actors=[
            wire.Kept(actor.hex(), [(name[:64], n) for name, n in list(refs.items())[:_MOST_METHODS]], ended)
            for actor, (refs, ended) in list(actors.items())[:_MOST_ACTORS]
        ],
        region_bytes=regions[0],
        region_read_bytes=regions[1],
        region_idle_bytes=regions[2],
        mapped_bytes=mapped[0],
        mapped_idle_bytes=mapped[1],
    )


def _chosen(entries: list[tuple[Entry, int]], most: int) -> list[tuple[Entry, int]]:
    """Return the largest and the oldest entries, largest first. `entries` is in the order of publication."""
    most = max(0, min(most, MOST_VALUES // 2))
    largest = heapq.nlargest(most, entries, key=lambda item: item[0].nbytes)
    seen = {id(entry) for entry, _ in largest}
    # A leak of small values shows in the oldest ones, which the largest would hide.
    oldest = [item for item in entries[:most] if id(item[0]) not in seen]
    return sorted(largest + oldest, key=lambda item: -item[0].nbytes)


def _held(entry: Entry, reads: int) -> wire.Held:
    return wire.Held(
        nbytes=entry.nbytes,
        tensors=len(entry.layout.specs),
        age_s=time.monotonic() - entry.created_s,
        origin=entry.origin[-_MOST_CHARACTERS:],  # the end of a path tells more than its beginning
        transport=entry.transport,
        reads=reads,
        snapshot=entry.segment >= 0,
        result=entry.for_callers,
    )

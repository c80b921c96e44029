"""What this process has published and not yet been told to let go of.

The store keeps the producer's own tensor objects (no copy) under the key that the ticket carries. It knows nothing of
sockets or of Ray: `publish` fills it, Ray's reference count empties it. One lock, held only to decide; memory is
released and descriptors are closed after it.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raylane.core import vm
from raylane.core.deadline import Deadline
from raylane.core.segment import HeaderSlots, address_of, bytes_at, map_segment
from raylane.core.spans import Span

if TYPE_CHECKING:  # graphs use the listener, and need not import torch for it
    import torch

    from raylane.transport.codec import Layout


@dataclass(slots=True, eq=False)
class Entry:
    """One published value."""

    key: bytes
    leaves: list[Any]
    """The producer's own objects, in the order of the skeleton's numbers; empty for a snapshot."""
    layout: Layout
    for_callers: bool
    """Whether it is a call's result, which its caller may keep this actor alive for; not so a put of its own."""
    footprints: list[tuple[int, ...]] = field(default_factory=list)
    """Where the memory of each leaf lay at publication; empty for a snapshot."""
    copies: frozenset[int] = frozenset()
    """Numbers of the leaves of which a copy was published."""
    segment: int = -1
    """The memfd of a snapshot; -1 for a value in the producer's own memory."""
    versions: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    checksum: int | None = None
    slot: int = -1
    header_address: int = 0
    nonce: int = 0
    _mapped: list[Any] | None = None
    _spans: list[Span] | None = None

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.layout.blocks)

    def mutated(self) -> bool:
        """Return True if torch counted an in-place write to a leaf since publication (NumPy arrays keep no count)."""
        return any(tensor._version != version for tensor, version in self.versions)

    def in_place(self, *, leaves_too: bool = False) -> bool:
        """Return True if the published memory is where it was: not freed, resized or re-pointed by its owner.

        `leaves_too` asks the same of leaves of which a copy was published (CUDA tensors, sparse views).
        """
        from raylane.transport.guards import footprint

        return all(
            footprint(leaf) == then
            for i, (leaf, then) in enumerate(zip(self.leaves, self.footprints, strict=True))
            if leaves_too or i not in self.copies
        )

    def overlaps(self, spans: Sequence[Span]) -> bool:
        """Return True if the producer's own tensors (device addresses for CUDA) share memory with any of these spans.
        Memory that was given up is none: what lies at its address now is another's."""
        from raylane.transport.codec import span

        if self._spans is None:
            self._spans = [span(leaf) for leaf in self.leaves]
        touched = any(ours.start < theirs.stop and theirs.start < ours.stop for ours in self._spans for theirs in spans)
        return touched and self.in_place()

    def views(self) -> list[tuple[memoryview, Any]]:
        """Return the bytes of the blocks, each with what keeps them alive. Only system calls may touch those of a
        value in the producer's own memory: its owner can unmap them at any time."""
        if self.segment < 0:
            return [(bytes_at(block.start, block.nbytes), self) for block in self.layout.blocks]
        if self._mapped is None:
            self._mapped = map_segment(self.segment, [block.nbytes for block in self.layout.blocks])
        return [(memoryview(array).cast("B"), array) for array in self._mapped]

    def copy_to(self, buffers: Sequence[Any]) -> bool:
        """Copy the blocks into these ctypes arrays of their sizes. Returns False if their owner has meanwhile freed,
        resized or re-pointed the memory: the content of the buffers means nothing then."""
        if self.segment >= 0:
            for mine, (theirs, _) in zip(buffers, self.views(), strict=True):
                memoryview(mine).cast("B")[:] = theirs
            return True
        ranges = [(b.start, address_of(mine), b.nbytes) for b, mine in zip(self.layout.blocks, buffers, strict=True)]
        try:
            vm.read(os.getpid(), ranges)  # by the kernel: it fails where a copy by this process would crash
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise
            return False
        return self.in_place()


class Store:
    """Keys to entries, and who waits for which memory to be free. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards everything below
        self._freed = threading.Condition(self._lock)
        self._entries: dict[bytes, Entry] = {}
        self._headers = HeaderSlots()
        self.published = 0
        self.nbytes = 0

    def publish(self, entry: Entry) -> None:
        """Keep an entry, whose key is new, until `free`. Fills in where its header is."""
        with self._lock:
            entry.slot, entry.header_address, entry.nonce = self._headers.open()
            self._entries[entry.key] = entry
            self.published += 1
            self.nbytes += entry.nbytes

    def get(self, key: bytes) -> Entry | None:
        with self._lock:
            return self._entries.get(key)

    def free(self, keys: Iterable[bytes]) -> None:
        """Let go of these; keys that are not here are none."""
        with self._freed:
            dropped = [entry for key in keys if (entry := self._take_out(key)) is not None]
            if dropped:
                self._freed.notify_all()
        _release(dropped)

    def clear(self) -> None:
        with self._lock:
            keys = list(self._entries)
        self.free(keys)

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def held_for_callers(self) -> int:
        with self._lock:
            return sum(entry.for_callers for entry in self._entries.values())

    def _take_out(self, key: bytes) -> Entry | None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._headers.close(entry.slot)  # before the memory: see HeaderSlots
            self.nbytes -= entry.nbytes
        return entry

    def mark_read(self, entry: Entry, *, creator: bool) -> tuple[bool, bool]:
        """Note who received the value; returns (by its creator before, by another process before)."""
        with self._lock:
            if self._entries.get(entry.key) is not entry:
                return False, False
            _, by_creator, by_remote = self._headers.read(entry.slot)
            if not (by_creator if creator else by_remote):
                self._headers.mark(entry.slot, creator=creator)
            return by_creator, by_remote

    def wait_freed(self, spans: Sequence[Span], deadline: Deadline) -> bool:
        """Wait until no entry holds memory that overlaps these spans. False when the deadline came first."""
        with self._freed:
            return self._freed.wait_for(lambda: not self._held(spans), deadline.left_s())

    def _held(self, spans: Sequence[Span]) -> bool:
        return any(entry.overlaps(spans) for entry in self._entries.values())

    def stats(self) -> dict[str, int]:
        with self._lock:
            return {"entries": len(self._entries), "entry_bytes": self.nbytes, "published": self.published}

    def __repr__(self) -> str:
        with self._lock:
            return f"Store({len(self._entries)} entries, {self.nbytes} bytes)"


def _release(entries: list[Entry]) -> None:
    for entry in entries:
        if entry.segment >= 0:
            os.close(entry.segment)

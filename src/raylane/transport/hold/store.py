"""The values that this process has published and must keep until they are freed.

The store keeps the producer's own tensor objects (no copy) under the key in the ticket. It is independent of sockets
and of Ray: `publish` adds entries, and Ray's reference count (through `lifetime`) removes them. One lock protects the
decisions; memory is released and descriptors are closed after the lock is released.
"""

from __future__ import annotations

import collections
import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raylane.core.deadline import Deadline
from raylane.core.memory.header_slots import HeaderSlots
from raylane.core.memory.layout import address_of, blocks_in, bytes_at, segment_offsets
from raylane.core.memory.sealed import map_segment
from raylane.core.memory.shared_pool import SharedPool, SharedSegment
from raylane.core.memory.spans import Span
from raylane.core.process import vm

# Graphs import this module through the listener, and must not load torch for it: importing torch costs an actor two
# seconds. The functions below import `codec` and `guards` when a value with tensors exists, so torch is loaded already.
if TYPE_CHECKING:
    import torch

    from raylane.transport.hold.device_memory import OnDevice
    from raylane.transport.value.layout import Layout


@dataclass(slots=True, eq=False)
class Entry:
    """One published value."""

    key: bytes
    leaves: list[Any]
    """The producer's own objects, in the order of the skeleton's numbers; empty for a snapshot."""
    layout: Layout
    for_callers: bool
    """True for the result of a call, because its caller may keep this actor alive for it; False for a put."""
    footprints: list[tuple[int, ...]] = field(default_factory=list)
    """Location of each leaf's memory at publication; empty for a snapshot."""
    copies: frozenset[int] = frozenset()
    """Numbers of the leaves of which a copy was published instead of the producer's memory."""
    segment: int = -1
    """Descriptor of a snapshot's memfd; -1 for a value in the producer's own memory."""
    on_device: OnDevice | None = None
    """The blocks in the memory of CUDA devices; None if there are none."""
    versions: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """Tensors with their write counts at publication."""
    checksum: int | None = None
    shared: SharedSegment | None = None
    """Copy of the blocks for the readers of this host, guarded by the store's lock; None until two have asked."""
    slot: int = -1
    """Number of the entry's slot in `HeaderSlots`."""
    header_address: int = 0
    nonce: int = 0
    origin: str = ""
    """Method that returned the value, or the line that called `put`."""
    transport: str = ""
    """Transport that the producer asked for."""
    created_s: float = field(default_factory=time.monotonic)
    _mapped: list[Any] | None = None
    _spans: list[Span] | None = None

    @property
    def nbytes(self) -> int:
        """Size of all blocks together."""
        return sum(block.nbytes for block in self.layout.blocks)

    def is_mutated(self) -> bool:
        """Return True if torch counted an in-place write to a leaf since publication (NumPy arrays have no counter)."""
        return any(tensor._version != version for tensor, version in self.versions)

    def is_intact(self, *, include_copied: bool = False) -> bool:
        """Return True if the published memory was not freed, resized or re-pointed by its owner.

        `include_copied` also checks the leaves of which a copy was published (CUDA tensors, sparse views).
        """
        from raylane.transport.value.guards import footprint

        return all(
            footprint(leaf) == then
            for i, (leaf, then) in enumerate(zip(self.leaves, self.footprints, strict=True))
            if include_copied or i not in self.copies
        )

    def overlaps(self, spans: Sequence[Span]) -> bool:
        """Return True if the producer's own tensors (device addresses for CUDA) share memory with one of these spans.

        An entry whose owner gave up the memory overlaps nothing: its old addresses belong to other objects.
        """
        from raylane.transport.value.leaf_memory import leaf_span

        # Computed once: the memory of an intact entry does not move, and others are excluded below.
        if self._spans is None:
            self._spans = [leaf_span(leaf) for leaf in self.leaves]
        touched = any(ours.start < theirs.stop and theirs.start < ours.stop for ours in self._spans for theirs in spans)
        return touched and self.is_intact()

    def views(self, numbers: Sequence[int] | None = None) -> list[tuple[memoryview, Any]]:
        """Return the bytes of the blocks with these numbers (None: all), with the object that keeps them alive.

        Pass the bytes of a value in the producer's own memory only to system calls: the owner can unmap the memory at
        any time, and then a system call reports EFAULT where a direct access crashes this process. Blocks on devices
        are copied to the host, which the first call waits for.
        """
        selected = range(len(self.layout.blocks)) if numbers is None else numbers
        if self.segment >= 0:
            if self._mapped is None:
                self._mapped = map_segment(self.segment, [block.nbytes for block in self.layout.blocks])
            return [(memoryview(self._mapped[i]).cast("B"), self._mapped[i]) for i in selected]
        staged: dict[int, Any] = {}
        if self.on_device is not None and not self.on_device.devices.keys().isdisjoint(selected):
            staged = self.on_device.staged()
        blocks = self.layout.blocks
        return [
            (memoryview(staged[i]).cast("B"), staged[i])
            if i in staged
            else (bytes_at(blocks[i].start, blocks[i].nbytes), self)
            for i in selected
        ]

    def spans(self) -> list[Span]:
        """Return the addresses of the blocks as readers may use them: for a snapshot, those of its mapping."""
        if self.segment < 0:
            return self.layout.blocks
        starts = [address_of(array) for _, array in self.views()]
        return [Span(start, start + block.nbytes) for start, block in zip(starts, self.layout.blocks, strict=True)]

    def copy_to(self, buffers: Sequence[Any], numbers: Sequence[int] | None = None) -> bool:
        """Copy the blocks with these numbers (None: all) into ctypes arrays of the same sizes.

        Returns False if the owner has meanwhile freed, resized or re-pointed the memory; the content of the buffers is
        then invalid.
        """
        selected = range(len(self.layout.blocks)) if numbers is None else numbers
        if self.segment >= 0:
            views = self.views()
            for target, number in zip(buffers, selected, strict=True):
                memoryview(target).cast("B")[:] = views[number][0]
            return True
        pairs = list(zip(selected, buffers, strict=True))
        if self.on_device is not None:
            devices = self.on_device.devices
            self.on_device.copy_to({number: mine for number, mine in pairs if number in devices})
            pairs = [(number, mine) for number, mine in pairs if number not in devices]
        blocks = self.layout.blocks
        ranges = [(blocks[number].start, address_of(mine), blocks[number].nbytes) for number, mine in pairs]
        try:
            vm.read(os.getpid(), ranges)  # copied by the kernel: EFAULT for unmapped memory instead of a crash
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise
            return False
        # Checked after the copy: only then does an unchanged footprint cover all copied bytes.
        return self.is_intact()


class Store:
    """Published entries by key, with a way to wait until memory is free again. Thread-safe."""

    def __init__(self, shared: SharedPool | None = None) -> None:
        """Keep copies for the readers of this host in segments of `shared`."""
        self.shared = SharedPool(0) if shared is None else shared
        self.allows_copy: Callable[[int], bool] = lambda nbytes: True
        """Function that tells if there is room for this many bytes of copies; `Budget` replaces it.

        Called with the store's lock held.
        """
        self._lock = threading.Lock()  # guards everything below
        self.freed = threading.Condition(self._lock)
        """Notified after every removal of entries; its lock is the store's."""
        self._entries: dict[bytes, Entry] = {}
        self._dropped: collections.deque[bytes] = collections.deque()
        """Keys that finalizers have freed and `free` has not removed yet. Needs no lock: deques are atomic."""
        self._headers = HeaderSlots()
        self.published = 0
        self.nbytes = 0

    def publish(self, entry: Entry) -> None:
        """Keep an entry with a new key until `free`, and set the address and nonce of its header."""
        with self._lock:
            entry.slot, entry.header_address, entry.nonce = self._headers.open()
            self._entries[entry.key] = entry
            self.published += 1
            self.nbytes += entry.nbytes

    def get(self, key: bytes) -> Entry | None:
        """Return the entry with this key, or None."""
        with self._lock:
            return self._entries.get(key)

    def free(self, keys: Iterable[bytes]) -> None:
        """Remove these entries and release their memory; unknown keys are ignored."""
        removed = []
        with self.freed:
            while self._dropped:
                keys = [*keys, self._dropped.popleft()]
            for key in keys:
                entry = self._entries.pop(key, None)
                if entry is not None:
                    # Clear the header before the memory is released: a one-sided reader reads the header last, so a
                    # nonce that still matches proves that all data read before was this value's.
                    self._headers.close(entry.slot)
                    self.nbytes -= entry.nbytes
                    removed.append(entry)
                    # With the lock, so that a publication that needs room always finds a copy here or there.
                    if entry.shared is not None:
                        self.shared.give_back(entry.shared)
            if removed:
                self.freed.notify_all()
        # Outside the lock: dropping the last reference to a tensor may run arbitrary finalizers.
        for entry in removed:
            if entry.segment >= 0:
                os.close(entry.segment)

    def free_soon(self, keys: Iterable[bytes]) -> None:
        """Free entries, for finalizers: at once, or with the next call of `free` if this thread uses the store."""
        self._dropped.extend(keys)
        # A finalizer may run in a thread that holds the lock: waiting would deadlock.
        if self._lock.acquire(blocking=False):
            self._lock.release()
            self.free(())

    def share(self, entry: Entry) -> SharedSegment | None:
        """Return the copy of a value for the readers of this host; make it if there is none. Called by one thread.

        None if the budget has no room for a copy, if the value was freed, or if its owner has freed, resized or
        re-pointed the memory. OSError if there is no memory or descriptor for a copy.
        """
        sizes = [block.nbytes for block in entry.layout.blocks]
        offsets, total = segment_offsets(sizes)
        segment = entry.shared  # only this thread sets it, but another one may drop it at any moment
        if segment is not None:
            return segment
        # Readers on this host have no other way to CUDA tensors, so their copy is not optional.
        needed = entry.on_device is not None
        segment = self.take_copy(total, needed=needed)
        if segment is None:
            return None
        copied = False
        try:
            if entry.copy_to(blocks_in(segment.memory, offsets, sizes)):
                segment.release_to_readers()
                with self._lock:
                    # A publication may have taken the room meanwhile.
                    copied = entry.key in self._entries and (needed or self.allows_copy(0))
                    entry.shared = segment if copied else None
        finally:
            if not copied:
                self.shared.drop(segment)
        return segment if copied else None

    def take_copy(self, nbytes: int, *, needed: bool = False) -> SharedSegment | None:
        """Return a locked segment for a copy for several readers. OSError if there is no memory or descriptor for it.

        None if the budget has no room and the copy is not needed. The caller gives it back to `shared`, or drops it
        there.
        """
        with self._lock:
            # Asked in any case, because it drops idle segments to make room.
            allowed = self.allows_copy(nbytes)
            return self.shared.take(nbytes) if allowed or needed else None

    def drop_copies(self, nbytes: int) -> None:
        """Give up shared copies of this many bytes, idle ones first. Call with the lock of `freed` held.

        Readers keep the copies that they have mapped; further readers make their own.
        """
        before = self.shared.nbytes
        self.shared.drop_idle(nbytes)
        for entry in self._entries.values():
            if before - self.shared.nbytes >= nbytes:
                return
            if entry.shared is not None:
                self.shared.drop(entry.shared)
                entry.shared = None

    def clear(self) -> None:
        """Free all entries."""
        with self._lock:
            keys = list(self._entries)
        self.free(keys)

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def entries(self) -> list[tuple[Entry, int]]:
        """Return all entries, in the order of publication, with the number of reads of each."""
        with self._lock:
            return [(entry, self._headers.reads(entry.slot)) for entry in self._entries.values()]

    def held(self) -> list[Entry]:
        """Return all entries. Call with the lock of `freed` held."""
        return list(self._entries.values())

    def held_for_callers(self) -> int:
        """Return the number of entries that are results of calls."""
        with self._lock:
            return sum(entry.for_callers for entry in self._entries.values())

    def mark_read(self, entry: Entry, *, creator: bool) -> tuple[bool, bool]:
        """Record a read by the value's creator or by another process.

        Returns the earlier state: (read by its creator before, read by another process before).
        """
        with self._lock:
            # The slot of a freed entry may belong to another value already.
            if self._entries.get(entry.key) is not entry:
                return False, False
            _, by_creator, by_remote = self._headers.read(entry.slot)
            self._headers.mark(entry.slot, creator=creator)
            return by_creator, by_remote

    def wait_freed(self, spans: Sequence[Span], deadline: Deadline) -> bool:
        """Wait until no entry holds memory that overlaps these spans. Returns False if the deadline passed first."""
        with self.freed:
            return self.freed.wait_for(
                lambda: not any(entry.overlaps(spans) for entry in self._entries.values()), deadline.left_s()
            )

    def stats(self) -> dict[str, int]:
        """Return the number of entries, their bytes, and the number of values published so far."""
        with self._lock:
            return {"entries": len(self._entries), "entry_bytes": self.nbytes, "published": self.published}

    def __repr__(self) -> str:
        with self._lock:
            return f"Store({len(self._entries)} entries, {self.nbytes} bytes)"

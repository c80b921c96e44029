"""Host memory: a pool of warm buffers to receive into, slots that say whether a value still lives, and memfd segments.

Page faults, not copying, are what a transfer costs (100 MB: 5 ms into warm memory, 38 ms into fresh memory), so memory
that was received into once is kept and used again when its last tensor is dropped. Used by the backends and the store.
"""

from __future__ import annotations

import collections
import ctypes
import fcntl
import mmap
import os
import secrets
import struct
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from raylane.core.semaphore import map_file

HUGE_PAGE = 2 << 20
HUGE_FROM_BYTES = 4 << 20
"""From this size on a fresh region is aligned and asked to use huge pages: 64 MiB took 11.5 ms instead of 36.6."""


def address_of(buffer: Any) -> int:
    """Where a ctypes object lies. The number does not keep its owner alive."""
    return ctypes.addressof(buffer)


def bytes_at(address: int, nbytes: int) -> memoryview:
    """Memory of this process as bytes, without a copy. Does not keep it alive: whoever uses the view must."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def size_class(nbytes: int) -> int:
    """The size a request is rounded up to: pages, then four steps per power of two (at most 25% unused)."""
    if nbytes <= 1 << 16:
        return -(-nbytes // 4096) * 4096
    step = 1 << (nbytes.bit_length() - 3)
    return -(-nbytes // step) * step


class _Region:
    """One anonymous mapping; `base` is the first usable byte."""

    __slots__ = ("base", "capacity", "mapping")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        huge = capacity >= HUGE_FROM_BYTES
        self.mapping = mmap.mmap(-1, capacity + (HUGE_PAGE if huge else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.base = 0
        if huge:
            start = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))
            self.base = -start % HUGE_PAGE
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self.mapping.madvise(mmap.MADV_HUGEPAGE)


class BufferPool:
    """Warm memory, lent out as ctypes arrays and taken back when the array is garbage.

    A buffer belongs to whoever holds it or anything made from it (tensor, array, view); it returns by itself after the
    last of them. At most `max_idle_bytes` are kept while nobody uses them; what is in use is not limited. Thread-safe.
    """

    def __init__(self, max_idle_bytes: int) -> None:
        if max_idle_bytes < 0:
            raise ValueError(f"max_idle_bytes={max_idle_bytes}: a pool keeps 0 bytes or more")
        self.max_idle_bytes = max_idle_bytes
        self._lock = threading.Lock()  # guards _idle, idle_bytes and used_bytes
        self._idle: collections.OrderedDict[int, list[_Region]] = collections.OrderedDict()
        self.idle_bytes = 0
        self.used_bytes = 0
        self._returned: collections.deque[_Region] = collections.deque()

    def take(self, nbytes: int) -> Any:
        """A writable ctypes array of exactly `nbytes` (> 0) bytes; its content is whatever was there before."""
        capacity = size_class(nbytes)
        with self._lock:
            self._settle()
            regions = self._idle.get(capacity)
            region = regions.pop() if regions else None
            if region is not None:
                self.idle_bytes -= capacity
            self.used_bytes += capacity
        if region is None:
            try:
                region = _Region(capacity)
            except BaseException:
                with self._lock:
                    self.used_bytes -= capacity
                raise
        array = (ctypes.c_char * nbytes).from_buffer(region.mapping, region.base)
        weakref.finalize(array, self._give_back, region).atexit = False
        return array

    def _give_back(self, region: _Region) -> None:
        """Finalizer. It may run at any allocation, even while this very thread holds the lock: so it never waits."""
        self._returned.append(region)
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def settle(self) -> None:
        """Count what was dropped while the pool was busy; `take` does it too."""
        with self._lock:
            self._settle()

    def _settle(self) -> None:
        while self._returned:
            region = self._returned.popleft()
            self.used_bytes -= region.capacity
            self._idle.setdefault(region.capacity, []).append(region)
            self._idle.move_to_end(region.capacity)
            self.idle_bytes += region.capacity
        while self.idle_bytes > self.max_idle_bytes:
            capacity, regions = next(iter(self._idle.items()))  # the class that was returned to longest ago
            if regions:
                regions.pop()
                self.idle_bytes -= capacity
            if not regions:
                del self._idle[capacity]

    def __repr__(self) -> str:
        return f"BufferPool({self.used_bytes} bytes used, {self.idle_bytes} of {self.max_idle_bytes} idle)"


_header_pages: list[mmap.mmap] = []
"""Header pages of all stores that this process ever had. A reader may come after the session of a store has ended: it
must find that its value is gone, and its mark must not land in memory of somebody else's."""


class HeaderSlots:
    """Words that other processes read to learn whether a value is still there.

    One slot, 16 bytes, little-endian, in memory that is never unmapped:

        0   nonce         8 bytes   random per use; 0 = no value. A reader compares it with its ticket's.
        8   creator_read  4 bytes   1 once the producing process itself has received the value
        12  remote_read   4 bytes   1 once another process has (written by that process)

    Order: the nonce is cleared *before* the memory it speaks for is let go, and a reader takes it as the *last* range
    of the same read: if it still matches, everything read before it was whole. Freed memory gives no other sign (small
    blocks still read "successfully", with wrong data). Not thread-safe: its owner, the store, holds a lock.
    """

    SIZE = 16
    _PER_PAGE = mmap.PAGESIZE // SIZE

    def __init__(self) -> None:
        self._pages: list[tuple[mmap.mmap, int]] = []
        self._free: list[int] = []

    def open(self) -> tuple[int, int, int]:
        """Take a slot. Returns (slot, its address, its new nonce)."""
        if not self._free:
            page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            anchor = ctypes.c_char.from_buffer(page)
            first = len(self._pages) * self._PER_PAGE
            self._pages.append((page, ctypes.addressof(anchor)))
            _header_pages.append(page)
            self._free.extend(range(first + self._PER_PAGE - 1, first - 1, -1))
        slot = self._free.pop()
        nonce = secrets.randbits(63) | 1
        page, base = self._pages[slot // self._PER_PAGE]
        offset = slot % self._PER_PAGE * self.SIZE
        struct.pack_into("<QII", page, offset, nonce, 0, 0)
        return slot, base + offset, nonce

    def close(self, slot: int) -> None:
        page, _ = self._pages[slot // self._PER_PAGE]
        struct.pack_into("<QII", page, slot % self._PER_PAGE * self.SIZE, 0, 0, 0)
        self._free.append(slot)

    def read(self, slot: int) -> tuple[int, bool, bool]:
        """(nonce, read by its creator, read by another process)."""
        page, _ = self._pages[slot // self._PER_PAGE]
        nonce, creator, remote = struct.unpack_from("<QII", page, slot % self._PER_PAGE * self.SIZE)
        return nonce, bool(creator), bool(remote)

    def mark(self, slot: int, *, creator: bool) -> None:
        page, _ = self._pages[slot // self._PER_PAGE]
        struct.pack_into("<I", page, slot % self._PER_PAGE * self.SIZE + (8 if creator else 12), 1)


_BLOCK_ALIGNMENT = 64


def segment_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where blocks of these sizes lie in one segment, and the segment's size; all in bytes."""
    offsets, end = [], 0
    for nbytes in sizes:
        offsets.append(end)
        end += -(-nbytes // _BLOCK_ALIGNMENT) * _BLOCK_ALIGNMENT
    return offsets, end


def write_segment(blocks: Sequence[memoryview]) -> int:
    """Copy blocks into a new memfd at their `segment_offsets` and seal it against any further change.

    Returns its descriptor, which is the caller's to close; on an OSError nothing is left open. Written with pwrite(2):
    the writer never maps the file, so its pages are faulted in only once.
    """
    offsets, total = segment_offsets([block.nbytes for block in blocks])
    fd = os.memfd_create("raylane", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, total)
        for start, block in zip(offsets, blocks, strict=True):
            source = block.cast("B")
            done = 0
            while done < source.nbytes:
                done += os.pwrite(fd, source[done : done + (1 << 30)], start + done)
        fcntl.fcntl(
            fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_segment(fd: int, sizes: Sequence[int]) -> list[Any]:
    """Map a segment privately and return its blocks as ctypes arrays: writable, copy-on-write, in one mapping that ends
    with the last of them. It keeps no descriptor: `fd` may be closed afterwards."""
    offsets, total = segment_offsets(sizes)
    mapping = map_file(fd, total, private=True)
    return [(ctypes.c_char * nbytes).from_buffer(mapping, start) for start, nbytes in zip(offsets, sizes, strict=True)]

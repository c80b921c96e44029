"""Host memory: a pool of receive buffers, header slots that state whether a value is published, snapshot segments.

Page faults dominate the cost of a transfer, not copying (100 MB: 5 ms into warm memory, 38 ms into fresh memory).
Memory is therefore kept after its last tensor is dropped, and used for the next transfer. Used by the backends and the
store.
"""

from __future__ import annotations

import collections
import ctypes
import errno
import fcntl
import math
import mmap
import os
import secrets
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from raylane.core.semaphore import map_file
from raylane.core.trimmer import Trimmer

HUGE_PAGE = 2 << 20
HUGE_FROM_BYTES = 4 << 20
"""Size from which a fresh region is aligned for huge pages: receiving 64 MiB took 11.5 ms instead of 36.6."""


def address_of(buffer: Any) -> int:
    """Return the address of a ctypes object. The number does not keep the object alive."""
    return ctypes.addressof(buffer)


def bytes_at(address: int, nbytes: int) -> memoryview:
    """Return a view of this process's memory. The caller must keep the memory alive while it uses the view."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def mapping_of(array: Any) -> mmap.mmap | None:
    """Return the mapping in which a ctypes array lies that was made by the pool, or from its buffers; else None.

    Buffers come and go, and the mapping stays: it is what the cost of registering memory with a device is paid for.
    """
    while isinstance(array, ctypes.Array):
        # ctypes documents `_objects`: what the array keeps alive. `from_buffer` keeps a memoryview there.
        objects = getattr(array, "_objects", None) or {}
        array = next((owner.obj for owner in objects.values() if isinstance(owner, memoryview)), None)
    return array if isinstance(array, mmap.mmap) else None


def size_class(nbytes: int) -> int:
    """Return the size to which a request is rounded up: pages, then four steps per power of two (up to 25% unused)."""
    if nbytes <= 1 << 16:
        return -(-nbytes // 4096) * 4096
    step = 1 << (nbytes.bit_length() - 3)
    return -(-nbytes // step) * step


class _PoolRegion:
    """One anonymous mapping; `base` is the offset of the first usable byte."""

    __slots__ = ("base", "capacity", "idle_since", "mapping")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        huge = capacity >= HUGE_FROM_BYTES
        # Huge pages need aligned memory, and mmap aligns to 4 KiB only: map one huge page more and skip the start.
        self.mapping = mmap.mmap(-1, capacity + (HUGE_PAGE if huge else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.base = 0
        self.idle_since = 0.0
        """Time (monotonic clock) of the last return to the pool."""
        if huge:
            start = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))
            self.base = -start % HUGE_PAGE
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self.mapping.madvise(mmap.MADV_HUGEPAGE)


class BufferPool:
    """Memory that was touched before, lent as ctypes arrays and taken back when an array is garbage-collected.

    A buffer belongs to the holders of the array and of everything made from it (tensors, arrays, views), and returns to
    the pool after the last of them. At most `max_idle_bytes` stay in the pool; lent memory is not limited. Memory that
    was not used for `idle_s` seconds is unmapped by a thread, which runs while memory is lent or idle. Thread-safe.
    """

    def __init__(self, max_idle_bytes: int, idle_s: float = math.inf) -> None:
        if max_idle_bytes < 0:
            raise ValueError(f"max_idle_bytes must be at least 0, got {max_idle_bytes}")
        self.max_idle_bytes = max_idle_bytes
        self.idle_s = idle_s
        self._lock = threading.Lock()  # guards _idle, idle_bytes, used_bytes and _trimmer
        self._trimmer = Trimmer(self, idle_s, "raylane-pool")
        self._idle: collections.OrderedDict[int, list[_PoolRegion]] = collections.OrderedDict()
        self.idle_bytes = 0
        self.used_bytes = 0
        self._returned: collections.deque[_PoolRegion] = collections.deque()
        """Regions that finalizers gave back and `_reclaim` has not counted yet. Needs no lock: deques are atomic."""

    def take(self, nbytes: int) -> Any:
        """Return a writable ctypes array of exactly `nbytes` (> 0) bytes with undefined content."""
        capacity = size_class(nbytes)
        with self._lock:
            self._reclaim()
            regions = self._idle.get(capacity)
            region = regions.pop() if regions else None
            if region is not None:
                self.idle_bytes -= capacity
            self.used_bytes += capacity
            # Here and not when memory comes back: a finalizer must not start threads.
            self._trimmer.start()
        if region is None:
            # Map outside the lock, so that other threads can take and return buffers meanwhile.
            try:
                region = _PoolRegion(capacity)
            except BaseException:
                with self._lock:
                    self.used_bytes -= capacity
                raise
        array = (ctypes.c_char * nbytes).from_buffer(region.mapping, region.base)
        # The finalizer holds the region. Not at exit: the system frees all memory then, and the pool may be gone.
        weakref.finalize(array, self._give_back, region).atexit = False
        return array

    def _give_back(self, region: _PoolRegion) -> None:
        """Take back a region; runs as a finalizer and never waits."""
        self._returned.append(region)
        # Python may run a finalizer at any allocation, even in a thread that holds the lock: waiting would deadlock.
        if self._lock.acquire(blocking=False):
            try:
                self._reclaim()
            finally:
                self._lock.release()

    def reclaim(self) -> None:
        """Count the buffers that were returned while another thread used the pool; `take` does so too."""
        with self._lock:
            self._reclaim()

    def _reclaim(self) -> None:
        """Move returned regions to the idle ones, and unmap the surplus. Call with the lock held."""
        while self._returned:
            region = self._returned.popleft()
            self.used_bytes -= region.capacity
            region.idle_since = time.monotonic()
            self._idle.setdefault(region.capacity, []).append(region)
            self._idle.move_to_end(region.capacity)  # keep the order of last use for the loop below
            self.idle_bytes += region.capacity
        while self.idle_bytes > self.max_idle_bytes:
            capacity, regions = next(iter(self._idle.items()))  # the size class that was used longest ago
            if regions:
                regions.pop()
                self.idle_bytes -= capacity
            if not regions:
                del self._idle[capacity]

    def trim(self) -> float | None:
        """Unmap what was idle for `idle_s` seconds. Returns the seconds until the next region is due.

        Returns None, and forgets the thread, if no memory is lent or idle.
        """
        now = time.monotonic()
        next_due = now + self.idle_s
        with self._lock:
            self._reclaim()
            for capacity in list(self._idle):
                regions = self._idle[capacity]
                # `take` uses the region that came back last, so the others are in the order of their return.
                while regions and regions[0].idle_since + self.idle_s <= now:
                    del regions[0]
                    self.idle_bytes -= capacity
                if regions:
                    next_due = min(next_due, regions[0].idle_since + self.idle_s)
                else:
                    del self._idle[capacity]
            if not self.used_bytes and not self.idle_bytes:
                self._trimmer.ended()
                return None
        return next_due - now

    def close(self) -> None:
        """End the thread; waits for it. Buffers can still be taken and returned."""
        self._trimmer.close()

    def __repr__(self) -> str:
        return f"BufferPool({self.used_bytes} bytes used, {self.idle_bytes} of {self.max_idle_bytes} idle)"


_header_pages: list[mmap.mmap] = []
"""Header pages of all stores that this process ever had; they are never unmapped.

A reader may come after the Ray session of a store has ended. The reader must then find a cleared nonce, and its mark
must not hit memory that has another use by then.
"""


def next_count(count: int) -> int:
    """Return a 32-bit count plus one; the largest count stays, because 0 means "never read"."""
    return min(count + 1, 0xFFFFFFFF)


class HeaderSlots:
    """Words that other processes read to find out whether a value is still published.

    One slot, 16 bytes, little-endian, in memory that is never unmapped:

        0   nonce         8 bytes   random per use; 0 = no value. A reader compares it with its ticket's.
        8   creator_read  4 bytes   number of times that the producing process itself has received the value
        12  remote_read   4 bytes   the same for other processes (written by these; two at once may count as one)

    Order: the store clears the nonce *before* it releases the value's memory, and a reader reads the nonce *last*. A
    nonce that still matches proves that everything read before was the value. Freed memory shows no other sign: small
    blocks are still readable, with wrong data. Not thread-safe: the store that owns the slots holds a lock.
    """

    SIZE = 16
    _PER_PAGE = mmap.PAGESIZE // SIZE

    def __init__(self) -> None:
        self._pages: list[tuple[mmap.mmap, int]] = []
        self._free: list[int] = []

    def open(self) -> tuple[int, int, int]:
        """Take a slot for a new value. Returns (slot, address of the slot, new nonce)."""
        if not self._free:
            page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            anchor = ctypes.c_char.from_buffer(page)
            first = len(self._pages) * self._PER_PAGE
            self._pages.append((page, ctypes.addressof(anchor)))
            _header_pages.append(page)
            # Descending, so that `pop` hands out the slots in ascending order.
            self._free.extend(range(first + self._PER_PAGE - 1, first - 1, -1))
        slot = self._free.pop()
        nonce = secrets.randbits(63) | 1  # never 0, which means "no value"
        page, base = self._pages[slot // self._PER_PAGE]
        offset = slot % self._PER_PAGE * self.SIZE
        # Late readers of an earlier value in this slot look for their own nonce, so the write need not be atomic.
        struct.pack_into("<QII", page, offset, nonce, 0, 0)
        return slot, base + offset, nonce

    def close(self, slot: int) -> None:
        """Clear a slot and make it available for another value."""
        page, _ = self._pages[slot // self._PER_PAGE]
        struct.pack_into("<QII", page, slot % self._PER_PAGE * self.SIZE, 0, 0, 0)
        self._free.append(slot)

    def read(self, slot: int) -> tuple[int, bool, bool]:
        """Return (nonce, read by its creator, read by another process) of a slot."""
        page, _ = self._pages[slot // self._PER_PAGE]
        nonce, creator, remote = struct.unpack_from("<QII", page, slot % self._PER_PAGE * self.SIZE)
        return nonce, bool(creator), bool(remote)

    def mark(self, slot: int, *, creator: bool) -> None:
        """Count a read of the value, by its creator or by another process."""
        page, _ = self._pages[slot // self._PER_PAGE]
        # Write this one word only: the other word belongs to readers in other processes, which write it unlocked.
        offset = slot % self._PER_PAGE * self.SIZE + (8 if creator else 12)
        struct.pack_into("<I", page, offset, next_count(struct.unpack_from("<I", page, offset)[0]))

    def reads(self, slot: int) -> int:
        """Return how often the value of a slot was read, by any process."""
        page, _ = self._pages[slot // self._PER_PAGE]
        creator, remote = struct.unpack_from("<II", page, slot % self._PER_PAGE * self.SIZE + 8)
        return int(creator + remote)


BLOCK_ALIGNMENT = 64


def segment_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the offsets of blocks of these sizes in one segment, and the segment's size; all in bytes."""
    offsets, end = [], 0
    for nbytes in sizes:
        offsets.append(end)
        end += -(-nbytes // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT
    return offsets, end


def blocks_in(memory: Any, offsets: Sequence[int], sizes: Sequence[int]) -> list[Any]:
    """Return blocks at these offsets of writable memory as ctypes arrays, which keep the memory alive.

    ValueError if one reaches beyond the memory.
    """
    return [(ctypes.c_char * nbytes).from_buffer(memory, start) for start, nbytes in zip(offsets, sizes, strict=True)]


SMALL_BLOCK_BYTES = 1 << 16
"""Size below which blocks share one buffer, so that a thousand small tensors need one allocation and one message."""


def small_blocks(sizes: Sequence[int]) -> tuple[dict[int, int], int]:
    """Return the offsets of the small blocks in the buffer that they share, by number of the block, and its size."""
    small = [i for i, size in enumerate(sizes) if size < SMALL_BLOCK_BYTES]
    # Aligned to 64 bytes: every dtype is aligned there.
    offsets, total = segment_offsets([sizes[i] for i in small])
    return dict(zip(small, offsets, strict=True)), total


def write_segment(blocks: Sequence[memoryview]) -> int:
    """Copy blocks into a new memfd at their `segment_offsets` and seal the memfd against any further change.

    Returns the descriptor, which the caller closes; on an OSError nothing stays open.
    """
    offsets, total = segment_offsets([block.nbytes for block in blocks])
    fd = os.memfd_create("raylane", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, total)
        for start, block in zip(offsets, blocks, strict=True):
            source = block.cast("B")
            done = 0
            # pwrite(2) instead of a mapping: the kernel then fills each page once, without faults in this process.
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
    """Map a segment privately and return its blocks as writable, copy-on-write ctypes arrays.

    The blocks share one mapping, which ends with the last of them. The mapping keeps no descriptor, so the caller may
    close `fd` afterwards.
    """
    offsets, total = segment_offsets(sizes)
    mapping = map_file(fd, total, private=True)
    return blocks_in(mapping, offsets, sizes)


def map_sealed(path: str, nbytes: int) -> Any:
    """Map a segment of another process, which `write_segment` made, as a copy-on-write ctypes array.

    The descriptor that the path names may belong to another file by now; the caller finds out afterwards whether it was
    still the right one. OSError if it cannot be mapped, or is no sealed segment of this size.
    """
    # O_NONBLOCK: the descriptor may belong to a pipe, whose open would wait for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        # Of a file that can shrink, a page that is gone would end this process.
        if os.fstat(fd).st_size != nbytes or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError(errno.EFAULT, "the descriptor belongs to another file by now")
        return map_file(fd, nbytes, private=True)
    finally:
        os.close(fd)

"""Pool of receive buffers: anonymous memory of this process, which huge pages can back.

Page faults dominate the cost of a transfer, not copying (100 MB: 5 ms into warm memory, 38 ms into fresh memory).
Memory is therefore kept after its last tensor is dropped, and used for the next transfer. Used by the backends.
"""

from __future__ import annotations

import collections
import ctypes
import math
import mmap
import threading
import time
import weakref
from typing import Any

from raylane.core.memory.layout import size_class
from raylane.core.memory.trimmer import Trimmer

HUGE_PAGE = 2 << 20
HUGE_FROM_BYTES = 4 << 20
"""Size from which a fresh region is aligned for huge pages: receiving 64 MiB took 11.5 ms instead of 36.6."""


def mapping_of(array: Any) -> mmap.mmap | None:
    """Return the mapping in which a ctypes array lies that was made by the pool, or from its buffers; else None.

    Buffers come and go, and the mapping stays: it is what the cost of registering memory with a device is paid for.
    """
    while isinstance(array, ctypes.Array):
        # ctypes documents `_objects`: what the array keeps alive. `from_buffer` keeps a memoryview there.
        objects = getattr(array, "_objects", None) or {}
        array = next((owner.obj for owner in objects.values() if isinstance(owner, memoryview)), None)
    return array if isinstance(array, mmap.mmap) else None


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

"""Shared memory that one process fills and others read, used again when the last reader is done.

A segment is a memfd. Readers open it through /proc/PID/fd, each with an open file of its own, and hold a read lock on
it for as long as they have it mapped (open file description locks, fcntl(2)). The kernel drops the lock when a reader
dies. The filling process needs the write lock, so it never changes what somebody reads:

    source    write lock -> fill -> unlock ...   value freed -> pool -> write lock, if nobody reads -> fill again
    reader    open -> read lock -> map copy-on-write -> check that the value is still published ... -> unmap, close

Filling a new segment of 64 MiB takes 36 ms, filling one again 7 ms: page faults.
"""

from __future__ import annotations

import collections
import ctypes
import errno
import math
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from raylane.core.memory.layout import blocks_in, segment_offsets, size_class
from raylane.core.memory.locks import READ, UNLOCK, WRITE, lock
from raylane.core.memory.segment import HEAD_BYTES, Segment, has_fixed_size, open_other
from raylane.core.memory.trimmer import Trimmer

_WASTE = 2
"""A segment is not used for less than this part of its size."""


class SharedSegment:
    """One segment, mapped in the process that fills it, and locked until `release_to_readers`."""

    __slots__ = ("_segment", "capacity", "idle_since", "memory", "path")

    def __init__(self, capacity: int) -> None:
        """Create a segment. OSError if there is no descriptor or memory for it."""
        self.capacity = capacity
        self.idle_since = 0.0
        """Time (monotonic clock) of the last return to the pool."""
        self._segment = Segment.make(HEAD_BYTES + capacity)
        self.path = self._segment.path
        self.memory = (ctypes.c_char * capacity).from_buffer(self._segment.memory, HEAD_BYTES)
        self.lock_again()

    @property
    def _fd(self) -> int:
        assert self._segment.fd is not None, "the segment was closed"
        return self._segment.fd

    def release_to_readers(self) -> None:
        """Allow readers; the content must not change any more."""
        lock(self._fd, UNLOCK)

    def open_locked(self) -> int:
        """Return a further descriptor, only for reading, with a lock that keeps the content.

        The lock belongs to this descriptor and to all copies of it, also in other processes; the last close ends it.
        """
        fd = open_other(f"/proc/self/fd/{self._fd}")
        if not lock(fd, READ):
            os.close(fd)
            raise AssertionError("a segment that is being filled was opened for readers")
        return fd

    def lock_again(self) -> bool:
        """Take the segment back for filling; False if somebody still reads it."""
        return lock(self._fd, WRITE)

    def close(self) -> None:
        """Close the descriptor; readers keep their mappings."""
        self._segment.close_fd()


class SharedPool:
    """Segments of one process that are filled again. Thread-safe.

    Segments without a value that were not used for `idle_s` seconds are closed by a thread, which runs while there are
    segments.
    """

    def __init__(self, max_idle_bytes: int, idle_s: float = math.inf) -> None:
        """At most `max_idle_bytes` of segments without a value are kept."""
        self._max_idle_bytes = max_idle_bytes
        self._lock = threading.Lock()  # guards _idle, _nbytes and _trimmer
        self._idle: list[SharedSegment] = []
        """Segments without a value, in the order of their return."""
        self._returned: collections.deque[SharedSegment] = collections.deque()
        """Segments on their way into `_idle`. Deques are atomic."""
        self._nbytes = 0
        self._trimmer = Trimmer(self, idle_s, "raylane-shared")

    def take(self, nbytes: int) -> SharedSegment:
        """Return a locked segment of at least `nbytes`. OSError if there is no memory or descriptor for one."""
        with self._lock:
            self._take_back()
            for segment in self._idle:
                if nbytes <= segment.capacity <= _WASTE * size_class(nbytes) and segment.lock_again():
                    self._idle.remove(segment)
                    return segment
            segment = SharedSegment(size_class(nbytes))
            self._nbytes += segment.capacity
            self._trimmer.start()
            return segment

    def give_back(self, segment: SharedSegment) -> None:
        """Take back a segment whose value was freed; there may still be readers. For finalizers too: never waits."""
        segment.idle_since = time.monotonic()
        self._returned.append(segment)
        # A finalizer may run in a thread that holds the lock.
        if self._lock.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._lock.release()

    def _take_back(self) -> None:
        """Add the returned segments to the idle ones. Call with the lock held."""
        while self._returned:
            self._idle.append(self._returned.popleft())
            while sum(idle.capacity for idle in self._idle) > self._max_idle_bytes:
                self._close(self._idle.pop(0))  # the one that was given back first

    def drop(self, segment: SharedSegment) -> None:
        """Close a segment that was taken. Its readers keep their mappings, which belong to them from now on."""
        with self._lock:
            self._close(segment)

    def drop_idle(self, nbytes: int) -> None:
        """Close idle segments, the oldest first, until this many bytes are free or none is left."""
        with self._lock:
            self._take_back()
            while nbytes > 0 and self._idle:
                nbytes -= self._idle[0].capacity
                self._close(self._idle.pop(0))

    def _close(self, segment: SharedSegment) -> None:
        """Close a segment. Call with the lock held."""
        self._nbytes -= segment.capacity
        segment.close()

    def trim(self) -> float | None:
        """Close segments that were idle for too long. Returns the seconds until the next one is due.

        Returns None, and forgets the thread, if there are no segments.
        """
        now, idle_s = time.monotonic(), self._trimmer.idle_s
        with self._lock:
            self._take_back()
            while self._idle and self._idle[0].idle_since + idle_s <= now:
                self._close(self._idle.pop(0))
            if not self._nbytes:
                self._trimmer.ended()
                return None
            return self._idle[0].idle_since + idle_s - now if self._idle else idle_s

    @property
    def nbytes(self) -> int:
        """Size of all segments."""
        with self._lock:
            return self._nbytes

    @property
    def idle_bytes(self) -> int:
        """Size of the segments without a value."""
        with self._lock:
            self._take_back()
            return sum(idle.capacity for idle in self._idle)

    def close(self) -> None:
        """Close all idle segments and end the thread."""
        self.drop_idle(self.idle_bytes)
        self._trimmer.close()


def map_shared(path: str, sizes: Sequence[int]) -> list[Any] | None:
    """Map a segment of another process copy-on-write; return its blocks. None if the segment is being filled again.

    The blocks lie at their `segment_offsets`. The caller must check afterwards that the value is still published: the
    segment may have been filled again before the lock was taken. Keeps a descriptor until the last block is garbage.
    OSError as `Segment.open`, or if the segment is smaller.
    """
    segment = Segment.open(path, private=True, keep_fd=True)
    assert segment.fd is not None
    return _blocks_of(segment, sizes) if lock(segment.fd, READ) else None


def map_received(fd: int, sizes: Sequence[int]) -> list[Any]:
    """Map a segment copy-on-write by a descriptor of `open_locked` from another process; return its blocks.

    Takes the descriptor over, and keeps it until the last block is garbage; on an OSError it stays the caller's.
    """
    if not has_fixed_size(fd):
        raise OSError(errno.EINVAL, "the descriptor is no segment")
    segment = Segment(fd, os.fstat(fd).st_size, private=True)
    blocks = _blocks_of(segment, sizes)
    segment.fd = fd
    return blocks


def _blocks_of(segment: Segment, sizes: Sequence[int]) -> list[Any]:
    """Return blocks in a segment, which keep it open and mapped. OSError if they reach beyond it."""
    offsets, total = segment_offsets(sizes)
    if segment.nbytes < HEAD_BYTES + total:
        raise OSError(errno.EINVAL, f"the segment of {segment.nbytes} bytes is smaller than the value")
    memory = (ctypes.c_char * total).from_buffer(segment.memory, HEAD_BYTES)
    weakref.finalize(memory, segment.close_fd).atexit = False
    return blocks_in(memory, offsets, sizes)

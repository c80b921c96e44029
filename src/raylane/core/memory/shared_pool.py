"""Shared memory that one process fills and others read, used again when the last reader is done.

A segment is a memfd. Readers open it through /proc/PID/fd, each with an open file of its own, and hold a read lock on
it for as long as they have it mapped (open file description locks, fcntl(2)). The kernel drops the lock when a reader
dies. The filling process needs the write lock, so it never changes what somebody reads:

    source    write lock -> fill -> unlock ...   value freed -> pool -> write lock, if nobody reads -> fill again
    reader    open -> read lock -> map copy-on-write -> check that the value is still published ... -> unmap, close

Filling a new segment of 64 MiB takes 36 ms, filling one again 7 ms: page faults.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import weakref
from collections.abc import Sequence
from typing import Any

from raylane.core.memory.file_locks import READ, UNLOCK, WRITE, lock
from raylane.core.memory.idle_pool import IdlePool
from raylane.core.memory.layout import blocks_in, segment_offsets, size_class
from raylane.core.memory.segment import HEAD_BYTES, Segment, has_fixed_size, open_other

_WASTE = 2
"""A segment is not used for less than this part of its size."""


class SharedSegment:
    """One segment, mapped in the process that fills it, and locked until `release_to_readers`."""

    __slots__ = ("_segment", "capacity", "idle_since", "key", "memory", "path")

    def __init__(self, capacity: int) -> None:
        """Create a segment. OSError if there is no descriptor or memory for it."""
        self.key = self.capacity = capacity
        self.idle_since = 0.0
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


class SharedPool(IdlePool[SharedSegment]):
    """Segments of one process that are filled again, at most `max_idle_bytes` of them without a value. Thread-safe."""

    def __init__(self, max_idle_bytes: int, idle_s: float = math.inf) -> None:
        super().__init__(max_idle_bytes, idle_s, "raylane-shared")

    def take(self, nbytes: int) -> SharedSegment:
        """Return a locked segment of at least `nbytes`. OSError if there is no memory or descriptor for one.

        Give it back when its value was freed; there may still be readers.
        """
        capacity = size_class(nbytes)
        for key in self.idle_keys():
            if nbytes <= key <= _WASTE * capacity and (segment := self.lend_idle(key, SharedSegment.lock_again)):
                return segment
        segment = SharedSegment(capacity)
        self.lend(segment)
        return segment

    def free(self, segment: SharedSegment) -> None:
        """Close a segment. Its readers keep their mappings, which belong to them from now on."""
        segment.close()

    @property
    def nbytes(self) -> int:
        """Size of all segments."""
        self.reclaim()
        return self.used_bytes + self.idle_bytes


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

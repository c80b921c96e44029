"""Memory of other processes as its readers map it, once for many reads: regions (`regions`) and segments (`sealed`).

Page faults of a fresh mapping cost more than reading its memory (100 MB: 10 ms, and 8 ms to unmap it), so a mapping is
kept for the next value in the same region, or for the next read of the same segment:

    take a region    idle mapping, or open and map   ->   read lock   ->   drop the pages that the last user wrote to
    take a segment   idle mapping, or open and map; nobody can write to it
    last array is garbage    unlock, idle   ->   unmapped after a while

An idle mapping has no lock, so it keeps the maker from nothing. The pages of a region are the maker's, who returns them
to the system when the last array of the maker is garbage; those of a segment stay until the last mapping ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable
from typing import Any

from raylane.core.memory import regions
from raylane.core.memory.file_locks import READ, UNLOCK, lock
from raylane.core.memory.idle_pool import IdlePool
from raylane.core.memory.sealed import map_sealed
from raylane.core.memory.segment import Segment
from raylane.core.process.finalizing import finalize_here

MOST_IDLE = 8
"""Idle mappings that are kept, each with a descriptor."""
USED_BYTES, IDLE_BYTES = "mapped_bytes", "mapped_idle_bytes"
"""Names of the counters, which `raylane.stats()` has too."""


class Mappings(IdlePool["_RegionMapping | _SealedMapping"]):
    """The mappings of one reading process. Thread-safe."""

    def __init__(self, idle_s: float, max_idle_bytes: int) -> None:
        """Keep idle mappings for `idle_s` seconds, and at most so many bytes of them."""
        super().__init__(max_idle_bytes, idle_s, "raylane-mapped", MOST_IDLE)

    def take_region(self, path: str) -> Any:
        """Return the memory of a region, as `regions.make` returns it, locked until it is garbage; writes stay here.

        The caller finds out afterwards whether the value is still published: only then was it complete. OSError as
        `Segment.open`.
        """
        return self._take(path, lambda: _RegionMapping(path))

    def take_sealed(self, path: str, nbytes: int, key: Any) -> Any:
        """Return the memory of a sealed segment, which the caller only reads.

        `key` is different for each segment. Else as `sealed.map_sealed`.
        """
        return self._take(key, lambda: _SealedMapping(path, nbytes, key))

    def _take(self, key: Any, map_anew: Callable[[], _RegionMapping | _SealedMapping]) -> Any:
        mapping = self.lend_idle(key)
        # Outside of the pool's lock: both take as long as the memory is large.
        if mapping is not None and not mapping.take_again():
            self.drop(mapping)
            mapping = None
        if mapping is None:
            mapping = map_anew()
            self.lend(mapping)
        memory = (ctypes.c_char * mapping.capacity).from_buffer(mapping.memory)
        # The finalizer holds the mapping. Not at exit: the system unmaps everything then.
        finalize_here(memory, self._put_down, mapping).atexit = False
        return memory

    def _put_down(self, mapping: _RegionMapping | _SealedMapping) -> None:
        mapping.put_down()
        self.give_back(mapping)

    def stats(self) -> dict[str, int]:
        """Return the bytes that are in use (USED_BYTES), and those of idle mappings (IDLE_BYTES)."""
        self.reclaim()
        return {USED_BYTES: self.used_bytes, IDLE_BYTES: self.idle_bytes}


class _RegionMapping:
    """A private mapping of a region with a descriptor of its own, which carries the lock."""

    __slots__ = ("_segment", "capacity", "idle_since", "key", "memory")

    def __init__(self, path: str) -> None:
        """Map and lock a region. OSError as `Segment.open`."""
        self.key = path
        self._segment = Segment.open(path, private=True, keep_fd=True)
        self.memory = self._segment.memory
        self.capacity = len(self.memory)
        self.idle_since = 0.0
        self._lock_for_reading()

    def take_again(self) -> bool:
        """Lock an idle mapping, and make it show the region again; False if this kernel cannot, so map it anew."""
        self._lock_for_reading()
        written = written_ranges(self._segment.address, self._segment.nbytes)
        if written is None:
            return False
        for start, stop in written:
            self._segment.forget_writes(start - self._segment.address, stop - start)
        return True

    def _lock_for_reading(self) -> None:
        assert self._segment.fd is not None
        if not lock(self._segment.fd, READ, regions.DATA_OFFSET):
            raise AssertionError(f"{self.key} has a lock that excludes readers, which nobody takes")

    def put_down(self) -> None:
        """Let the maker write. Runs as a finalizer and never waits."""
        assert self._segment.fd is not None
        lock(self._segment.fd, UNLOCK)


class _SealedMapping:
    """A mapping of a segment to which nobody can write any more."""

    __slots__ = ("capacity", "idle_since", "key", "memory")

    def __init__(self, path: str, nbytes: int, key: Any) -> None:
        self.key = key
        self.memory = map_sealed(path, nbytes)
        self.capacity = len(self.memory)
        self.idle_since = 0.0

    def take_again(self) -> bool:
        """Nothing can have changed."""
        return True

    def put_down(self) -> None:
        """Nobody waits for a segment that cannot change."""


class _ScanArgument(ctypes.Structure):
    """struct pm_scan_arg of Linux 6.7 (include/uapi/linux/fs.h)."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            "size",
            "flags",
            "start",
            "end",
            "walk_end",
            "vec",
            "vec_len",
            "max_pages",
            "category_inverted",
            "category_mask",
            "category_anyof_mask",
            "return_mask",
        )
    )


_PAGEMAP_SCAN = 0xC0606610  # _IOWR('f', 16, struct pm_scan_arg)
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 4, 8, 16
_RANGES_AT_ONCE = 256


def written_ranges(address: int, nbytes: int) -> list[tuple[int, int]] | None:
    """Return the addresses of the pages of a private mapping of a file that this process has written to.

    None if this kernel does not tell (Linux before 6.7). 100 MB take 1.1 ms.
    """
    # A page that was written is a page of this process, and no page of the file any more.
    written: list[tuple[int, int]] = []
    ranges = (ctypes.c_uint64 * (3 * _RANGES_AT_ONCE))()  # start, end and categories of each
    at, end = address, address + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        # Of this process at this moment, which may be a fork: not kept open.
        fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        while at < end:
            argument = _ScanArgument(
                size=ctypes.sizeof(_ScanArgument),
                start=at,
                end=end,
                vec=ctypes.addressof(ranges),
                vec_len=_RANGES_AT_ONCE,
                category_inverted=_IS_FILE,
                category_mask=_IS_FILE,
                category_anyof_mask=_IS_PRESENT | _IS_SWAPPED,
                return_mask=_IS_FILE,
            )
            # Ends early when there are more ranges than have room, and says where.
            count = fcntl.ioctl(fd, _PAGEMAP_SCAN, argument)
            written += [(ranges[3 * i], ranges[3 * i + 1]) for i in range(count)]
            at = argument.walk_end
    except OSError:
        return None
    finally:
        os.close(fd)
    return written

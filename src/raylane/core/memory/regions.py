"""Memory that is handed to other processes as it is: arrays made by `raylane.empty`. Knows neither NumPy nor torch.

A region is a memfd segment of its own:

    0      semaphore: one for the maker, and one for each message that its reader has not taken yet
    32     1 if the region was published: then processes may map it that take no message
    64     semaphore of reader 1: number of its values; its row is locked as long as the reader has the region open
    96     1 if reader 1 or one after it may exist
    128    the same for reader 2 ...
    4096   the data

    maker                                      reader
    post once for each reader of a message
    send (path, offset, nbytes)       --->     open and map the region; lock the first row that is free
                                               post its own, take one, build arrays inside of the region
                                               last array of the message is garbage: take one of its own
    last array is garbage: idle
    next array of this size: again
    idle for too long: take one

The kernel drops the lock of a reader that dies, and a count without a lock counts no more: a dead reader holds nothing.
The lock is taken once for all messages; one for each would cost 1.7 us of the 18 us of a message. A reader posts its
own semaphore before it takes the message from the count, and everybody else looks at the count first: so a message is
seen in one of the two at any time.

Writing to new pages takes longer than all the rest (100 MB: 100 ms, and 11 in pages that are there). So a region that
nobody reads is used again for the next array of its size. When the maker has let go of it, whoever ends the last use
returns the pages to the system: other processes may keep the region mapped, and then hold no memory. The count belongs
to the region, so that any number of graphs may send it.

Readers of published values (`mappings`) lock the data instead. They may come without a message, so only the maker, who
knows what is published, returns the pages of a region that was published. A reader that comes late, when the region is
in use again, finds that its value is not published any more.

A region is registered by its address, so that a sender finds out whether a buffer lies in one (`find`).
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import os
import threading
import weakref
from typing import Any, NamedTuple

from raylane.core import settings
from raylane.core.memory import file_locks
from raylane.core.memory.idle_pool import IdlePool, pool_limit_bytes
from raylane.core.memory.layout import size_class
from raylane.core.memory.segment import Segment, map_file
from raylane.core.signals import semaphore
from raylane.core.signals.semaphore import SEMAPHORE_BYTES

DATA_OFFSET = 4096
"""Offset of the data in a region, in bytes: pages can be mapped alone."""
_PUBLISHED_AT = 32
_USED_AT = 32
"""Offset in the row of a reader; a semaphore takes 32 bytes."""
_ROWS = range(SEMAPHORE_BYTES, DATA_OFFSET - SEMAPHORE_BYTES, SEMAPHORE_BYTES)
"""Offsets of the rows of readers; the last bytes of the page are the segment's key."""
_MOST_IDLE = 32
"""Idle regions that are kept, each with a descriptor."""


class RegionPlace(NamedTuple):
    """Bytes within a region, as another process finds them."""

    path: str
    offset: int
    """Offset in the segment, in bytes."""
    nbytes: int


class Region:
    """A region in the process that made it. Readers can open `path` while this exists."""

    __slots__ = (
        "__weakref__",
        "_fd",
        "_header",
        "_made_by",
        "_references",
        "_segment",
        "capacity",
        "end",
        "idle_since",
        "key",
        "path",
        "start",
    )

    def __init__(self, capacity: int) -> None:
        """Make a region for `capacity` bytes of data. OSError if there are no descriptors, or no memory to map it."""
        segment = Segment.make(DATA_OFFSET + capacity)
        assert segment.fd is not None
        self.key = self.capacity = capacity
        self.idle_since = 0.0
        self.path = segment.path
        self.start = segment.address + DATA_OFFSET
        """Address of the data."""
        self.end = segment.address + segment.nbytes
        self._made_by = os.getpid()
        # A mapping of its own: the count is read after the segment is let go.
        self._header = map_file(segment.fd, DATA_OFFSET)
        self._references = ctypes.addressof(self._header)
        semaphore.init(self._references, 1)
        self._fd, segment.fd = segment.fd, None
        self._segment: Segment | None = segment

    def lend(self, nbytes: int) -> Any:
        """Return the memory with `nbytes` of data, which the caller gives back when it is garbage."""
        assert self._segment is not None
        return (ctypes.c_char * (DATA_OFFSET + nbytes)).from_buffer(self._segment.memory)

    @property
    def is_own(self) -> bool:
        """True if this process made the region, and did not get it by a fork."""
        return self._made_by == os.getpid()

    def is_unused(self) -> bool:
        """Return True if an idle region can be lent."""
        return self.is_own and not self.is_read

    def let_go(self) -> None:
        """Free the pages of an idle region, or leave that to the last of its readers."""
        segment, self._segment = self._segment, None
        if self.is_own and segment is not None:  # in a forked child the count is that of the parent
            semaphore.try_wait(self._references)
            # Nothing is published any more, so a reader that takes its lock from now on drops what it mapped.
            if not self.is_read:
                segment.discard()

    @property
    def is_under_way(self) -> bool:
        """True if a receiver of a graph has not taken a message in this region yet; it must still open the path."""
        return semaphore.value(self._references) > (self._segment is not None)

    @property
    def is_read(self) -> bool:
        """True if a graph's receiver or a process that has mapped a published value holds memory of this region."""
        return (
            self.is_under_way or self.held_count > 0 or not file_locks.is_free(self._fd, file_locks.WRITE, DATA_OFFSET)
        )

    @property
    def held_count(self) -> int:
        """Number of values in this region that receivers of graphs hold which are alive."""
        return _held_count(self._fd, memoryview(self._header).cast("B"), self._references)

    def publish(self) -> None:
        """Allow other processes to map the region. Call while an array of the region exists."""
        self._header[_PUBLISHED_AT] = b"\1"

    def offset_of(self, address: int) -> int:
        """Return the offset in the segment of an address in the data."""
        return DATA_OFFSET + address - self.start

    def hand_over(self, readers: int) -> None:
        """Count the readers of one message. Call before the message is sent, while an array of the region exists."""
        for _ in range(readers):
            semaphore.post(self._references)

    def take_back(self) -> None:
        """Count one reader of a message less."""
        semaphore.try_wait(self._references)

    # As defaults, because at the end of the interpreter the module is empty when this runs.
    def __del__(self, getpid: Any = os.getpid, close: Any = os.close) -> None:
        # In a forked child the number may belong to another file.
        if getpid() == self._made_by:
            close(self._fd)


_lock = threading.RLock()  # guards the two below; reentrant, because finalizers change them
_starts: list[int] = []
"""Addresses of the data of all regions, ascending."""
_regions: dict[int, Region] = {}
"""Regions with arrays."""


class _RegionPool(IdlePool[Region]):
    """All regions of this process; those that are lent have arrays."""

    def free(self, region: Region) -> None:
        """Let go of an idle region."""
        region.let_go()


@functools.cache
def _pool() -> _RegionPool:
    return _RegionPool(pool_limit_bytes(), settings.POOL_IDLE_S.read(), "raylane-regions", _MOST_IDLE)


def close() -> None:
    """Free idle regions, and end the thread that frees them; the next use starts anew."""
    if _pool.cache_info().currsize:  # not in a process that has made no region
        pool = _pool()
        _pool.cache_clear()
        pool.close()


def make(nbytes: int) -> Any:
    """Return the memory of a region: a ctypes array of DATA_OFFSET and `nbytes` bytes, whose data are undefined.

    OSError if there are no descriptors, or no memory for a mapping; pages take memory when they are first written.
    """
    pool, capacity = _pool(), size_class(nbytes)
    region = pool.lend_idle(capacity, Region.is_unused)
    if region is None:
        region = Region(capacity)
        pool.lend(region)
    memory = region.lend(nbytes)
    with _lock:
        bisect.insort(_starts, region.start)
        _regions[region.start] = region
    # The finalizer has the region, so that the memory stays mapped.
    weakref.finalize(memory, _forget, region, pool).atexit = False
    return memory


def _forget(region: Region, pool: _RegionPool) -> None:
    """Make a region idle whose last array in this process is garbage."""
    with _lock:
        _starts.remove(region.start)
        del _regions[region.start]
    pool.give_back(region)


def _held_count(fd: int, header: memoryview, address: int, own_row: int = 0) -> int:
    """Return the number of values that living readers hold, by an open file of a region and its mapped header."""
    count = 0
    for row in _ROWS:
        if not header[row + _USED_AT]:
            break
        held = semaphore.value(address + row)
        if held and (row == own_row or not file_locks.is_free(fd, file_locks.WRITE, row, 1)):
            count += held
    return count


class ReadRegion:
    """A region of another process, mapped and open in this one. Thread-safe."""

    __slots__ = ("__weakref__", "_row", "segment")

    def __init__(self, path: str) -> None:
        """Open and map a region. OSError as `Segment.open`."""
        self.segment = Segment.open(path, keep_fd=True)
        assert self.segment.fd is not None
        self._row = 0
        for row in _ROWS:
            # Before the row is tried: of two readers that try it, one goes on to the next.
            self.segment.view[row + _USED_AT] = 1
            if file_locks.lock(self.segment.fd, file_locks.WRITE, row, 1):
                semaphore.init(self.segment.address + row)  # a dead reader may have left its count
                self._row = row
                return

    @property
    def has_row(self) -> bool:
        """True if values can be held; False if other readers had all the rows when the region was opened."""
        return self._row > 0

    def hold(self) -> None:
        """Take a message in this region, and keep the maker from writing to it until `release`."""
        semaphore.post(self.segment.address + self._row)
        semaphore.try_wait(self.segment.address)

    def release(self) -> None:
        """End the use of a message that was held. For finalizers too: never waits."""
        semaphore.try_wait(self.segment.address + self._row)
        self._free_unused()

    def skip(self) -> None:
        """Take a message in this region without holding it: its content was copied."""
        semaphore.try_wait(self.segment.address)
        self._free_unused()

    def _free_unused(self) -> None:
        """Free the pages after the last use of all readers."""
        # Two processes may both see the end. Then nobody can send a message any more, and the second frees nothing.
        address, view = self.segment.address, self.segment.view
        if not semaphore.value(address) and not view[_PUBLISHED_AT]:
            assert self.segment.fd is not None
            if not _held_count(self.segment.fd, view, address, self._row):
                self.segment.discard()


def take_back(path: str) -> None:
    """Count a message as taken that lies in a region of this process and that its reader will not take.

    Does nothing if the last array of the region is garbage.
    """
    with _lock:
        for region in _regions.values():
            if region.path == path:
                region.take_back()


def find(buffer: Any) -> tuple[RegionPlace, Region] | None:
    """Return (place, region) of a contiguous buffer; None if it does not lie in a region of this process.

    The caller keeps the region until the readers have opened it.
    """
    if not _starts:  # saves the look at the buffer
        return None
    view = memoryview(buffer)
    start = _address_of(view)
    region = region_at(start)
    if region is None or start + view.nbytes > region.end:
        return None
    return RegionPlace(region.path, region.offset_of(start), view.nbytes), region


def region_at(address: int) -> Region | None:
    """Return the region of this process in whose data an address lies, or None."""
    if not _starts:  # nobody uses regions
        return None
    # Regions do not overlap, so only the one that begins at or before the address can hold it.
    with _lock:
        index = bisect.bisect_right(_starts, address) - 1
        region = _regions[_starts[index]] if index >= 0 else None
    return None if region is None or address >= region.end else region


def totals() -> tuple[int, int, int]:
    """Return the bytes of all regions of this process, of those that other processes read, and of those without arrays.

    Of regions without arrays it is not known who reads them.
    """
    with _lock:
        regions = list(_regions.values())  # a copy: a finalizer in this thread may change the dict
    pool = _pool()
    pool.reclaim()
    nbytes = sum(region.capacity for region in regions) + pool.idle_bytes
    return nbytes, sum(region.capacity for region in regions if region.is_read), pool.idle_bytes


class _PyBuffer(ctypes.Structure):
    """Py_buffer of CPython up to the fields that are used (Include/pybuffer.h)."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("rest", ctypes.c_byte * 128),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.c_void_p,)
_release_buffer.restype = None


def _address_of(view: memoryview) -> int:
    """Return the address of a buffer, which may be read-only (ctypes takes only writable ones)."""
    py_buffer = _PyBuffer()
    _get_buffer(view, ctypes.byref(py_buffer), 0)
    try:
        return int(py_buffer.buf or 0)
    finally:
        _release_buffer(ctypes.byref(py_buffer))

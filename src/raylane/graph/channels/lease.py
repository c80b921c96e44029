"""Leased shared memory: how large buffers travel within a host without a copy on the reader's side.

A writer copies buffers into a segment and leases it to the readers of the message. A reader's arrays lie in the segment
itself and may be kept for any time. Each reader has a semaphore at the head of the segment; a finalizer posts it when
the reader's last array of that message is garbage. After all posts the writer uses the segment again.

    0      semaphore of reader 0: posted when reader 0 has returned the lease
    64     semaphore of reader 1 ...
    16384  the message: its buffers, each at a multiple of 64 bytes, then its body

    writer                                     reader
    copy buffers into a segment
    write (path, number, sizes) into a slot
                                        --->   map the segment, build arrays inside of it
                                               last array is garbage: post own semaphore
    find all semaphores posted          <---
    use the segment for the next message

Creating and populating 10 MB costs 8 ms, copying into warm memory 0.9 ms: so segments and their mappings are kept. But
a writer without messages never looks at its segments, and readers may keep gigabytes and then drop them. So only
KEPT_BYTES are for reuse; of a segment beyond them the last reader frees the pages (`_post`). Called by `ring`.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import itertools
import struct
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from raylane.core.deadline import Deadline
from raylane.core.memory import regions
from raylane.core.memory.layout import segment_offsets, size_class
from raylane.core.memory.regions import ReadRegion, Region, RegionPlace
from raylane.core.memory.segment import Segment
from raylane.core.process import copying
from raylane.core.process.finalizing import finalize_here
from raylane.core.signals import semaphore
from raylane.core.signals.semaphore import SEMAPHORE_BYTES
from raylane.errors import GraphTimeoutError, GraphValueError
from raylane.graph.lifecycle import Lifecycle

MAX_READERS = 256
"""Maximum number of readers of one message within a host; rings and segments reserve a semaphore for each."""
DATA_OFFSET = MAX_READERS * SEMAPHORE_BYTES
MAX_IDLE = 8
"""Maximum number of idle segments in a pool; the segment that was idle for longest is discarded first."""
KEPT_BYTES = 512 << 20
"""Bytes of segments that are leased or idle and will be used again; the pages of others are freed when the last reader
has returned them."""
KEPT_SEGMENTS = 4
"""Number of segments that are used again whatever their size."""
MAX_MAPPED = 64
"""Maximum number of mappings that a reader keeps for reuse. A mapping of a discarded segment holds no memory."""
MAX_OPEN_REGIONS = 256
"""Regions of `raylane.empty` that a reader has open at once; of values in further ones it makes copies.

The lock by which the maker sees that a reader lives needs a descriptor, and `ulimit -n` is 1024 in many places.
"""
MAX_OPEN_LEASES = 64
"""Number of leased segments above which those that every reader has mapped lose their file descriptor.

Readers may keep arrays for ever, and `ulimit -n` is 1024 in many places. A segment without descriptor is not reused.
"""
POLL_INTERVAL_S = 0.01
"""Seconds between two checks for returned memory: readers post no doorbell when they return a lease."""
_FREE_AFTER_AT = 4080
"""Offset in a segment of the number of readers after whose return the last of them frees the pages; 0 for reuse. The
place is free: a semaphore takes 32 of its 64 bytes, and the segment's key the last 8 of this page."""
_FREE_AFTER = struct.Struct("<H")
RECLAIM_CHECKS = 16
"""Number of segments that each `lend` checks for their return.

Readers may keep thousands, so not all are checked each time: at most one segment in this many is returned and not yet
noticed. All segments are checked where memory is short.
"""


_Key = TypeVar("_Key")
_Kept = TypeVar("_Kept")


class Descriptor(NamedTuple):
    """Place of a message's bytes, sent in their stead. `sizes` are those of the buffers, then that of the body."""

    path: str
    number: int
    sizes: tuple[int, ...]


class Reservation(NamedTuple):
    """Leased memory that the caller has still to fill. `parts` have the requested sizes."""

    descriptor: Descriptor
    parts: list[memoryview]


class PoolFull(Exception):
    """Readers keep too much memory at the moment. Raised by a pool that does not wait; nothing was leased."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class SegmentGone(FileNotFoundError):
    """The memory of a message no longer exists: its writer has ended or has left the graph."""


class _Lease:
    __slots__ = ("capacity", "number", "outstanding", "readers", "reused", "segment", "serial")

    def __init__(self, segment: Segment, capacity: int, number: int) -> None:
        self.segment = segment
        self.capacity = capacity
        """Bytes after DATA_OFFSET."""
        self.number = number
        """Number of the segment, unique within its pool."""
        self.serial = 0
        """Number of leases granted before this one."""
        self.readers: tuple[str, ...] = ()
        self.outstanding: list[int] = []
        """Indices of the readers that have not returned the lease."""
        self.reused = True
        """False if the last reader frees the pages."""

    def grant(self, readers: tuple[str, ...], serial: int, *, reused: bool) -> None:
        """Begin a lease to these readers."""
        self.readers, self.serial, self.reused = readers, serial, reused
        self.outstanding = list(range(len(readers)))
        # Before the message is sent: a reader looks at this after its post.
        _FREE_AFTER.pack_into(self.segment.view, _FREE_AFTER_AT, 0 if reused else len(readers))

    def returned(self, dead: Collection[str] = ()) -> bool:
        """Return True if every reader has returned the lease, or is one of these dead ones."""
        address = self.segment.address
        living = [index for index in self.outstanding if self.readers[index] not in dead]
        if len(living) < len(self.outstanding):
            # A dead reader may have posted its semaphore before, which a later lease would count as its own.
            self.outstanding, self.reused = living, False
        if self.reused:
            self.outstanding = [i for i in self.outstanding if semaphore.try_wait(address + i * SEMAPHORE_BYTES)]
        else:  # the last reader counts the posts, so they stay
            self.outstanding = [i for i in self.outstanding if not semaphore.value(address + i * SEMAPHORE_BYTES)]
        return not self.outstanding


class LeasePool:
    """Segments that one process leases to the readers of one graph's edges.

    Used by one thread at a time, except `leased_bytes`.
    """

    def __init__(
        self,
        limit_bytes: int,
        timeout_s: float | None = None,
        read_within: int | None = None,
        *,
        waits: bool = True,
        lifecycle: Lifecycle | None = None,
    ) -> None:
        """Create an empty pool.

        `read_within` is the number of further leases after which every reader has certainly mapped a segment; None if
        unknown. With `waits=False`, for a thread that serves other graphs too, `lend` raises PoolFull instead of
        waiting. When `lifecycle` stops running, waits end and the limit no longer holds, so that the graph can end.
        """
        self.limit_bytes = limit_bytes
        self.waits = waits
        self.timeout_s = timeout_s
        """Seconds that `lend` waits for readers to return memory."""
        self.read_within = read_within
        # A pool of its own (in tests) is never told to end.
        self.lifecycle = lifecycle or Lifecycle()
        self._granted = 0
        self._numbers = itertools.count()
        self._leased: collections.deque[_Lease] = collections.deque()
        self._without_fd: collections.deque[_Lease] = collections.deque()
        """Leased segments whose file descriptor is closed."""
        self._leased_bytes = 0
        self._idle: collections.deque[_Lease] = collections.deque()
        self._handed: collections.OrderedDict[Region, None] = collections.OrderedDict()
        """Regions of the user's arrays that readers may still have to open."""
        self._dead: set[str] = set()
        """Readers whose process has ended and has no successor yet. Other threads may add to it."""

    def drop_reader(self, reader: str) -> None:
        """Stop waiting for memory that a dead reader holds, until `readmit_reader`. From any thread."""
        self._dead.add(reader)

    def readmit_reader(self, reader: str) -> None:
        """Take back all that a dead reader has held; from now on another process has its name."""
        self.reclaim()
        self._dead.discard(reader)

    def hand_over(self, region: Region, readers: int) -> None:
        """Count the readers of a message in a region, and keep its path until they have opened it. Does not wait.

        The memory is the user's own: it counts toward no limit.
        """
        # A few checks in each call, as in `_allocate`.
        self._reclaim_handed(RECLAIM_CHECKS)
        region.hand_over(readers)
        self._handed[region] = None

    def _reclaim_handed(self, limit: int) -> None:
        for _ in range(min(limit, len(self._handed))):
            region, _ = self._handed.popitem(last=False)
            if region.is_under_way:
                self._handed[region] = None

    def lend(self, parts: Sequence[Any], readers: tuple[str, ...]) -> Descriptor:
        """Copy buffers into a segment and lease it to `readers` (names for error messages, in order of their index).

        Waits while more than `limit_bytes` are leased. GraphTimeoutError then names the readers that hold the memory;
        GraphValueError if the message alone is above the limit. A pool that does not wait raises PoolFull instead: call
        again later.
        """
        views = [memoryview(part).cast("B") for part in parts]
        reservation = self.reserve([view.nbytes for view in views], readers)
        for target, view in zip(reservation.parts, views, strict=True):
            copying.copy(target, view)
        return reservation.descriptor

    def reserve(self, sizes: Sequence[int], readers: tuple[str, ...]) -> Reservation:
        """Lease memory that the caller fills. Waits and raises like `lend`.

        The lease begins now: send the descriptor to the readers afterwards.
        """
        offsets, total = segment_offsets(sizes)
        lease = self._allocate(size_class(max(total, 1)))
        memory = lease.segment.view[DATA_OFFSET:]
        within = self._leased_bytes + lease.capacity <= KEPT_BYTES or self.leased_count < KEPT_SEGMENTS
        lease.grant(readers, self._granted, reused=within)
        self._granted += 1
        # Counted before the caller fills the memory: a failure of the caller must not lose track of the segment.
        self._leased.append(lease)
        self._leased_bytes += lease.capacity
        parts = [memory[at : at + nbytes] for at, nbytes in zip(offsets, sizes, strict=True)]
        return Reservation(Descriptor(lease.segment.path, lease.number, tuple(sizes)), parts)

    def has_room(self, capacities: Sequence[int]) -> bool:
        """Return True if messages of these sizes can be leased now without waiting, or would be refused at once."""
        needed_bytes = sum(size_class(max(capacity, 1)) for capacity in capacities)
        if (
            not self.lifecycle.running
            or needed_bytes > self.limit_bytes
            or self._leased_bytes + needed_bytes <= self.limit_bytes
        ):
            return True
        self.reclaim()
        return self._leased_bytes + needed_bytes <= self.limit_bytes

    def leased_bytes(self) -> int:
        """Return the bytes that readers hold, as of the last check."""
        return self._leased_bytes

    @property
    def leased_count(self) -> int:
        """Number of segments that readers hold, as of the last check."""
        return len(self._leased) + len(self._without_fd)

    @property
    def idle_count(self) -> int:
        """Number of segments that are kept for the next message."""
        return len(self._idle)

    @property
    def idle_bytes(self) -> int:
        """Bytes of the segments that are kept for the next message."""
        return sum(lease.capacity for lease in self._idle)

    def _allocate(self, capacity: int) -> _Lease:
        if capacity > self.limit_bytes:
            raise GraphValueError(
                f"cannot send a message of {capacity} bytes: max_lent_bytes is {self.limit_bytes}. Send less at a "
                "time, or compile with a larger max_lent_bytes"
            )
        # A few checks in each call spread the cost: checking thousands of leases at once would take milliseconds.
        self.reclaim(RECLAIM_CHECKS)
        deadline = None
        while True:
            # Capacities are size classes, so equality finds a segment for most messages of similar size.
            idle_lease = next((lease for lease in self._idle if lease.capacity == capacity), None)
            if idle_lease is not None:
                self._idle.remove(idle_lease)
                return idle_lease
            if self._leased_bytes + capacity <= self.limit_bytes or not self.lifecycle.running:
                return self._create(capacity)
            if not self.reclaim():
                if not self.waits:
                    raise PoolFull(self._full_reason(capacity))
                deadline = deadline or Deadline(self.timeout_s)
                remaining_s = deadline.left_s()
                if remaining_s is not None and remaining_s <= 0:
                    raise GraphTimeoutError(self._full_reason(capacity))
                time.sleep(POLL_INTERVAL_S if remaining_s is None else min(remaining_s, POLL_INTERVAL_S))

    def _create(self, capacity: int) -> _Lease:
        used = self._leased_bytes + self.idle_bytes
        while self._idle and used + capacity > self.limit_bytes:
            used -= self._discard_oldest()
        try:
            segment = Segment.make(DATA_OFFSET + capacity)
        except OSError:  # out of descriptors, mappings or memory: free all idle segments, then try once more
            self.reclaim()
            while self._idle:
                self._discard_oldest()
            try:
                segment = Segment.make(DATA_OFFSET + capacity)
            except OSError as error:
                error.add_note(f"{self.leased_count} segments are leased: {self._holders() or 'to no reader'}")
                raise
        for index in range(MAX_READERS):
            semaphore.init(segment.address + index * SEMAPHORE_BYTES)
        return _Lease(segment, capacity, next(self._numbers))

    def reclaim(self, limit: int | None = None) -> bool:
        """Move returned segments to the idle ones. Return True if there were any. Does not wait.

        Checks at most `limit` segments of each kind (None: all), those first that were not checked for longest.
        """
        self._reclaim_handed(len(self._handed) if limit is None else limit)
        limit = self.leased_count if limit is None else limit
        reclaimed = False
        for _ in range(min(limit, len(self._leased))):
            lease = self._leased.popleft()
            if lease.returned(self._dead):
                self._leased_bytes -= lease.capacity
                if lease.reused:
                    self._idle.append(lease)
                else:
                    lease.segment.discard()  # again: a reader that died after its post has not done so
                reclaimed = True
            elif len(self._leased) >= MAX_OPEN_LEASES and (
                # So many later messages were read that every reader must have mapped this segment: no reader needs
                # the path any more.
                self.read_within is not None and self._granted - lease.serial > self.read_within
            ):
                lease.segment.close_fd()
                self._without_fd.append(lease)
            else:
                self._leased.append(lease)
        for _ in range(min(limit, len(self._without_fd))):
            lease = self._without_fd.popleft()
            if lease.returned(self._dead):
                self._leased_bytes -= lease.capacity
                lease.segment.discard()  # cannot be leased again: without a descriptor it has no path
                reclaimed = True
            else:
                self._without_fd.append(lease)
        # Idle memory is bounded: a burst of large messages must not keep its memory for ever.
        while len(self._idle) > MAX_IDLE or (len(self._idle) > KEPT_SEGMENTS and self.idle_bytes > KEPT_BYTES):
            self._discard_oldest()
        return reclaimed

    def close(self) -> None:
        """Free what is idle and forget what is leased, of a graph that has ended. Readers keep their arrays."""
        while self._idle:
            self._discard_oldest()
        for held in (self._leased, self._without_fd, self._handed):
            held.clear()
        self._leased_bytes = 0

    def _discard_oldest(self) -> int:
        """Discard the segment that was idle for longest and return its capacity in bytes.

        Readers may still have the segment mapped, but no message refers to it: its pages are freed at once.
        """
        lease = self._idle.popleft()
        lease.segment.discard()
        return lease.capacity

    def _holders(self) -> str:
        held: collections.Counter[str] = collections.Counter()
        for lease in (*self._leased, *self._without_fd):
            for index in lease.outstanding:
                held[lease.readers[index]] += lease.capacity
        return ", ".join(f"{name} holds {count} bytes" for name, count in held.most_common())

    def _full_reason(self, capacity: int) -> str:
        return (
            f"no memory for a message of {capacity} bytes within {self.timeout_s} s: of at most {self.limit_bytes} "
            f"bytes, {self._holders()}, in arrays that they received and still keep. Drop or copy those arrays, or "
            "compile with a larger max_lent_bytes"
        )


class LeaseReader:
    """Segments of other processes that this process has mapped for one graph. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _mapped, _regions and _open_regions
        self._mapped: collections.OrderedDict[tuple[str, int], Segment] = collections.OrderedDict()
        """Mappings, least recently used first, by path and number of the segment."""
        self._regions: collections.OrderedDict[str, ReadRegion] = collections.OrderedDict()
        """Regions of `raylane.empty` by path, least recently used first."""
        self._open_regions: weakref.WeakSet[ReadRegion] = weakref.WeakSet()
        """All regions that are open here: those above, and those in which arrays lie."""

    def borrow(self, descriptor: Descriptor, reader: int, *, writable: bool) -> list[memoryview]:
        """Return the parts of a leased message in place. The lease ends when the last view of them is garbage.

        `reader` is the index of this process among the readers. SegmentGone if the writer has ended; OSError if the
        segment is smaller than the descriptor says.
        """
        segment = self._map(descriptor.path, descriptor.number)
        total = segment.nbytes - DATA_OFFSET
        # A damaged or hostile descriptor must not make views beyond the mapping: that would be a SIGBUS.
        offsets, needed = segment_offsets(descriptor.sizes)
        if total < needed or total <= 0:
            raise OSError(errno.EINVAL, f"{descriptor.path} is smaller than the message that it should hold")
        # Post the semaphore of this reader; the segment keeps its memory mapped until then.
        address = segment.address + reader * SEMAPHORE_BYTES
        view = _watched(segment, DATA_OFFSET, total, _post, segment, address, writable=writable)
        return [view[at : at + nbytes] for at, nbytes in zip(offsets, descriptor.sizes, strict=True)]

    def borrow_place(self, place: RegionPlace, *, private: bool) -> memoryview:
        """Return bytes of a region of `core.memory.regions` in place, with the errors of `borrow`.

        Read-only; with `private` writable, and what this process writes stays in this process. A copy where
        MAX_OPEN_REGIONS are open here, or the region has no place for another reader.
        """
        region = self._region(place.path)
        segment = region.segment
        if not regions.DATA_OFFSET <= place.offset <= segment.nbytes - place.nbytes or place.nbytes <= 0:
            raise OSError(errno.EINVAL, f"{place.path} is smaller than the array that it should hold")
        if not region.has_row or len(self._open_regions) > MAX_OPEN_REGIONS:
            # The message keeps the maker from writing until it is skipped.
            copied = memoryview(bytearray(segment.view[place.offset : place.offset + place.nbytes]))
            region.skip()
            return copied if private else copied.toreadonly()
        # A mapping for each value: two values of one region must not see what the reader writes into the other.
        mapped = _opened(place.path, private=True) if private else segment
        region.hold()
        return _watched(mapped, place.offset, place.nbytes, region.release, writable=private)

    def forget_process(self, pid: int) -> None:
        """Forget the mappings of memory that a process has made, which has ended. Arrays stay valid."""
        prefix = f"/proc/{pid}/"
        with self._lock:
            for key in [key for key in self._mapped if key[0].startswith(prefix)]:
                del self._mapped[key]
            for path in [path for path in self._regions if path.startswith(prefix)]:
                del self._regions[path]

    def close(self) -> None:
        """Forget all mappings, of a graph that has ended. Arrays stay valid."""
        with self._lock:
            self._mapped.clear()
            self._regions.clear()

    @property
    def mapped_count(self) -> int:
        """Number of mappings that are kept for reuse."""
        return len(self._mapped) + len(self._regions)

    def _map(self, path: str, number: int) -> Segment:
        # The path alone does not identify a segment: the kernel reuses descriptor numbers, a pool never its own.
        return self._kept(self._mapped, (path, number), lambda: _opened(path))

    def _region(self, path: str) -> ReadRegion:
        def open_region() -> ReadRegion:
            with _translated(path):
                region = ReadRegion(path)
            self._open_regions.add(region)
            return region

        return self._kept(self._regions, path, open_region)

    def _kept(self, mappings: collections.OrderedDict[_Key, _Kept], key: _Key, map_anew: Callable[[], _Kept]) -> _Kept:
        """Return the mapping with a key, and keep it for reuse as the one that was used last."""
        # Results may be unpickled by several threads of the driver.
        with self._lock:
            mapping = mappings.get(key)
            if mapping is None:
                mapping = mappings[key] = map_anew()
                if len(mappings) > MAX_MAPPED:
                    mappings.popitem(last=False)
            else:
                mappings.move_to_end(key)
            return mapping


def _opened(path: str, *, private: bool = False) -> Segment:
    """Map a segment of another process. SegmentGone if it no longer exists."""
    with _translated(path):
        return Segment.open(path, private=private)


@contextlib.contextmanager
def _translated(path: str) -> Iterator[None]:
    """Raise SegmentGone for the errors of opening a segment that no longer exists."""
    try:
        yield
    except (FileNotFoundError, PermissionError, ProcessLookupError) as error:
        # PermissionError is what /proc reports for a zombie process.
        raise SegmentGone(f"{path} cannot be opened any more: {error}") from error


def _watched(
    segment: Segment, offset: int, nbytes: int, on_end: Callable[..., object], *args: Any, writable: bool
) -> memoryview:
    """Return bytes of a mapped segment. When the last view of them is garbage, `on_end(*args)` is called.

    `on_end` may run in any thread and must not wait. A forked child has copies of the arrays, but does not call it.
    """
    memory = (ctypes.c_char * nbytes).from_buffer(segment.memory, offset)
    # Views keep `memory` alive, so its finalizer marks the end of the use.
    end = finalize_here(memory, on_end, *args)
    end.atexit = False  # at exit the kernel unmaps the segment, and other finalizers may run in any order
    view = memoryview(memory).cast("B")
    return view if writable else view.toreadonly()


def _post(segment: Segment, address: int) -> None:
    """Post the semaphore of a reader; free the pages if the writer will not use them and this was the last reader."""
    semaphore.post(address)
    (readers,) = _FREE_AFTER.unpack_from(segment.view, _FREE_AFTER_AT)
    # The head stays: the writer reads the semaphores. Two last readers may both free the pages, once is enough.
    if readers and all(
        semaphore.value(segment.address + i * SEMAPHORE_BYTES) for i in range(min(readers, MAX_READERS))
    ):
        segment.discard(DATA_OFFSET)

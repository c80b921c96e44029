"""Large buffers within a host: segments that a writer fills, lends to its readers, and uses again when they let go.

The reader's arrays lie in the segment itself: nothing is copied, and they may be kept for as long as anybody likes. A
segment is lent until every reader has dropped the last array made from it, which its finalizer says with a semaphore:

    0      semaphore of reader 0: posted when it has let go
    64     semaphore of reader 1 ...
    16384  the message: its buffers, each at a multiple of 64 bytes, then its body

Making and populating 10 MB costs 8 ms, copying into warm memory 0.9: so segments and their mappings are kept. Used by
`ring`.
"""

from __future__ import annotations

import collections
import ctypes
import errno
import itertools
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from raylane.core import semaphore
from raylane.core.deadline import Deadline
from raylane.core.segment import size_class
from raylane.core.semaphore import SEMAPHORE_BYTES, Segment
from raylane.errors import GraphTimeoutError, GraphValueError

MAX_READERS = 256
"""Of one message within a host: so many semaphores stand before it, in a ring too."""
DATA_AT = MAX_READERS * SEMAPHORE_BYTES
ALIGNMENT = 64
MAX_IDLE = 8
"""Idle segments that a pool keeps; those idle for longest go first."""
MAX_MAPPED = 64
"""Mappings that a reader keeps for segments it may meet again. Those of retired segments hold no memory."""
KEPT_OPEN = 64
"""When more segments are lent, those that all readers have mapped go without a descriptor: arrays may be kept for ever,
and `ulimit -n` is 1024 in many places. Their segments are not lent again."""
LOOK_EVERY_S = 0.01
"""Seconds between two looks for memory that has come back: readers post no doorbell for it."""
_ASKED = 16
"""Segments that each `lend` asks whether they have come back, in turn: readers may keep thousands. So at most one
segment in this many has come back unnoticed, except where room is short: then all are asked."""


class Descriptor(NamedTuple):
    """What a message says instead of its bytes: where they are. `sizes` are the buffers', then the body's."""

    path: str
    number: int
    sizes: tuple[int, ...]


class Reserved(NamedTuple):
    """Memory that is lent before it is filled: `parts` has the sizes that were asked for."""

    descriptor: Descriptor
    parts: list[memoryview]


class NoRoom(Exception):
    """Raised by a pool that does not wait: readers keep too much memory at the moment. Nothing was lent."""

    def __init__(self, complaint: str) -> None:
        super().__init__(complaint)
        self.complaint = complaint


class SegmentGone(FileNotFoundError):
    """Raised for a message whose memory is not there any more: the process that lent it has ended or left the graph."""


class _Lent:
    __slots__ = ("at", "capacity", "number", "owed", "readers", "segment")

    def __init__(self, segment: Segment, capacity: int, number: int) -> None:
        self.segment = segment
        self.capacity = capacity
        self.number = number
        self.at = 0
        """How many had been lent before."""
        self.readers: tuple[str, ...] = ()
        self.owed: list[int] = []
        """Indices of readers that have not let go."""

    def returned(self) -> bool:
        self.owed = [i for i in self.owed if semaphore.try_wait(self.segment.address + i * SEMAPHORE_BYTES)]
        return not self.owed


class LeasePool:
    """What one process lends along the edges of one graph. One thread at a time, except `lent_bytes` and `close`."""

    def __init__(
        self,
        limit_bytes: int,
        timeout_s: float | None = None,
        read_within: int | None = None,
        *,
        waits: bool = True,
    ) -> None:
        """With `waits=False`, for a thread that has other things to do, `lend` raises NoRoom instead of waiting."""
        self.limit_bytes = limit_bytes
        self.waits = waits
        self.timeout_s = timeout_s
        """How long `lend` waits for readers to let go."""
        self.read_within = read_within
        """When that many more were lent, every reader has mapped a segment; None where nobody knows."""
        self._count = 0
        self.closed = False
        """Set (by any thread) to end a wait at once; what is lent then is not limited any more."""
        self._numbers = itertools.count()
        self._lent: collections.deque[_Lent] = collections.deque()
        self._kept: collections.deque[_Lent] = collections.deque()
        """Lent too, without a descriptor."""
        self._lent_bytes = 0
        self._idle: collections.deque[_Lent] = collections.deque()

    def lend(self, parts: Sequence[Any], readers: tuple[str, ...]) -> Descriptor:
        """Copy these buffers into a segment for that many readers (their names are for messages).

        Waits while more than `limit_bytes` are lent. GraphTimeoutError then names who holds them; GraphValueError if
        the message alone is above the limit. A pool that does not wait raises NoRoom: call again later.
        """
        views = [memoryview(part).cast("B") for part in parts]
        reserved = self.reserve([view.nbytes for view in views], readers)
        for room, view in zip(reserved.parts, views, strict=True):
            room[:] = view
        return reserved.descriptor

    def reserve(self, sizes: Sequence[int], readers: tuple[str, ...]) -> Reserved:
        """Like `lend`, but the caller fills the memory. It is lent from now on: hand its descriptor to the readers, or
        `cancel`."""
        offsets, end = [], DATA_AT
        for nbytes in sizes:
            offsets.append(end)
            end += -(-nbytes // ALIGNMENT) * ALIGNMENT
        lent = self._take(size_class(max(end - DATA_AT, 1)))
        memory = lent.segment.view
        lent.readers, lent.owed, lent.at = readers, list(range(len(readers))), self._count
        self._count += 1
        self._lent.append(lent)
        self._lent_bytes += lent.capacity
        parts = [memory[at : at + nbytes] for at, nbytes in zip(offsets, sizes, strict=True)]
        return Reserved(Descriptor(lent.segment.path, lent.number, tuple(sizes)), parts)

    def has_room(self, capacities: Sequence[int]) -> bool:
        """Return True if messages of these sizes could be lent now without a wait (or would be refused at once)."""
        wanted = sum(size_class(max(capacity, 1)) for capacity in capacities)
        if self.closed or wanted > self.limit_bytes or self._lent_bytes + wanted <= self.limit_bytes:
            return True
        self._settle(self._lent_count())
        return self._lent_bytes + wanted <= self.limit_bytes

    def cancel(self, reserved: Reserved) -> None:
        """Nobody will be told of that memory."""
        for lent in self._lent:
            if lent.number == reserved.descriptor.number:
                lent.owed = []

    def lent_bytes(self) -> int:
        """What has not come back, as far as it was noticed."""
        return self._lent_bytes

    def _lent_count(self) -> int:
        return len(self._lent) + len(self._kept)

    def _take(self, capacity: int) -> _Lent:
        if capacity > self.limit_bytes:
            raise GraphValueError(
                f"a message of {capacity} bytes is above the limit of {self.limit_bytes} for what an edge may lend; "
                "send less at a time, or compile with a larger max_lent_bytes"
            )
        self._settle(_ASKED)
        deadline = None
        while True:
            found = next((lent for lent in self._idle if lent.capacity == capacity), None)
            if found is not None:
                self._idle.remove(found)
                return found
            if self._lent_bytes + capacity <= self.limit_bytes or self.closed:
                return self._make(capacity)
            if not self._settle(self._lent_count()):
                if not self.waits:
                    raise NoRoom(self._complaint(capacity))
                deadline = deadline or Deadline(self.timeout_s)
                self._wait(capacity, deadline)

    def _wait(self, capacity: int, deadline: Deadline) -> None:
        left = deadline.left_s()
        if left is not None and left <= 0:
            raise GraphTimeoutError(self._complaint(capacity))
        time.sleep(LOOK_EVERY_S if left is None else min(left, LOOK_EVERY_S))

    def _make(self, capacity: int) -> _Lent:
        used = self._lent_bytes + sum(idle.capacity for idle in self._idle)
        while self._idle and used + capacity > self.limit_bytes:
            used -= self._retire()
        try:
            segment = Segment.make(DATA_AT + capacity)
        except OSError:  # no descriptor, mapping or memory: give back what can be, and try once more
            self._settle(self._lent_count())
            while self._idle:
                self._retire()
            try:
                segment = Segment.make(DATA_AT + capacity)
            except OSError as error:
                error.add_note(f"{self._lent_count()} segments are lent: {self._holders() or 'to nobody'}")
                raise
        for index in range(MAX_READERS):
            semaphore.init(segment.address + index * SEMAPHORE_BYTES)
        return _Lent(segment, capacity, next(self._numbers))

    def _settle(self, most: int) -> bool:
        """Ask that many segments whether they have come back, those first that were not asked for longest; and as many
        of those without a descriptor."""
        found = False
        for _ in range(min(most, len(self._lent))):
            lent = self._lent.popleft()
            if lent.returned():
                self._lent_bytes -= lent.capacity
                self._idle.append(lent)
                found = True
            elif self._has_been_read(lent) and len(self._lent) >= KEPT_OPEN:
                lent.segment.close_fd()
                self._kept.append(lent)
            else:
                self._lent.append(lent)
        for _ in range(min(most, len(self._kept))):
            lent = self._kept.popleft()
            if lent.returned():
                self._lent_bytes -= lent.capacity
                lent.segment.discard()
                found = True
            else:
                self._kept.append(lent)
        while len(self._idle) > MAX_IDLE:
            self._retire()
        return found

    def _has_been_read(self, lent: _Lent) -> bool:
        """Whether nobody can need its path any more."""
        return self.read_within is not None and self._count - lent.at > self.read_within

    def _retire(self) -> int:
        """Forget the segment that was idle for longest; how large it was. Readers may have it mapped still, but nobody
        will look there: its pages are free at once."""
        lent = self._idle.popleft()
        lent.segment.discard()
        return lent.capacity

    def _holders(self) -> str:
        held: collections.Counter[str] = collections.Counter()
        for lent in (*self._lent, *self._kept):
            for index in lent.owed:
                held[lent.readers[index]] += lent.capacity
        return ", ".join(f"{name} holds {count} bytes" for name, count in held.most_common())

    def _complaint(self, capacity: int) -> str:
        return (
            f"no memory for a message of {capacity} bytes within {self.timeout_s} s: of at most {self.limit_bytes} "
            f"bytes, {self._holders()}, in arrays that they received and still keep. Drop or copy those arrays, or "
            "compile with a larger max_lent_bytes"
        )


class LeaseReader:
    """What one process has mapped of others' segments, for one graph. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: collections.OrderedDict[tuple[str, int], Segment] = collections.OrderedDict()

    def borrow(self, descriptor: Descriptor, reader: int, *, writable: bool) -> list[memoryview]:
        """The message's parts, in place. The segment goes back when the last thing made from them is garbage."""
        segment = self._map(descriptor.path, descriptor.number)
        total = segment.nbytes - DATA_AT
        if total < sum(-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in descriptor.sizes) or total <= 0:
            raise OSError(errno.EINVAL, f"{descriptor.path} is too small for what is said to lie there")
        memory = (ctypes.c_char * total).from_buffer(segment.memory, DATA_AT)
        back = weakref.finalize(memory, _let_go, segment, segment.address + reader * SEMAPHORE_BYTES, os.getpid())
        back.atexit = False
        view = memoryview(memory).cast("B")
        if not writable:
            view = view.toreadonly()
        parts, at = [], 0
        for nbytes in descriptor.sizes:
            parts.append(view[at : at + nbytes])
            at += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return parts

    def _map(self, path: str, number: int) -> Segment:
        key = (path, number)  # descriptors are numbered anew by the kernel, segments never by their pool
        with self._lock:
            segment = self._mapped.get(key)
            if segment is None:
                try:
                    segment = self._mapped[key] = Segment.open(path)
                except (FileNotFoundError, PermissionError, ProcessLookupError) as error:  # what /proc says of a zombie
                    raise SegmentGone(f"{path} cannot be opened any more: {error}") from error
                if len(self._mapped) > MAX_MAPPED:
                    self._mapped.popitem(last=False)
            else:
                self._mapped.move_to_end(key)
            return segment


def _let_go(segment: Segment, address: int, pid: int) -> None:
    """Finalizer: runs anywhere, never waits. `segment` keeps the memory of the semaphore mapped."""
    if os.getpid() == pid:  # a forked child has a copy of the array, not the lease
        semaphore.post(address)

"""Ring of slots in shared memory, with one writer and one or more readers: one edge or control channel within a host.

    0       semaphore `full` of reader 0: number of messages that reader 0 has not read
    64      semaphore `full` of reader 1 ...
    16384   slot 0:  sequence u64 | body bytes u32 | kind u8 | flags u8 | buffers u16 | sizes u64 each | buffers | body
            slot 1:  ...

    writer                                          reader
    fill slot `sequence mod slots`
    post `full` of each reader              --->    finds `full` posted: the semaphore orders memory, so that the
    set the flag of each reader's ring              bytes of the slot are visible
    post the doorbell of each reader        --->    wakes, if the reader was asleep
    (write the eventfd of the driver)

The doorbell comes last: a reader that it wakes must find the message. An actor has one doorbell for all rings that it
reads, of all graphs; the driver has one for each graph. The flags on the doorbell's page say which rings have messages,
so that the cost of a message does not depend on the number of rings (`core.native`). A reader often finds a message
before it has consumed the message's doorbell post; `ProcessDoorbell` counts messages and consumed posts, so that
left-over posts are consumed (`absorb`) before the reader sleeps: each would end a later wait in vain.

There is no semaphore for free slots. A graph admits no more executions than its rings have slots, and an execution
ends only after every message of it was read: so the slot that comes next is always free (`plan.schedule` proves this
for each plan). A message that does not fit into a slot lies in a leased segment (`lease`), and the slot says where.
"""

from __future__ import annotations

import os
import pickle
import struct
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from raylane.core import native
from raylane.core.memory import regions
from raylane.core.memory.layout import segment_offsets
from raylane.core.memory.regions import Region, RegionPlace
from raylane.core.memory.segment import Segment
from raylane.core.signals import semaphore
from raylane.core.signals.patience import patience
from raylane.core.signals.semaphore import SEMAPHORE_BYTES
from raylane.errors import GraphPlanError
from raylane.graph.channels.lease import MAX_READERS, Descriptor, LeasePool, LeaseReader, Reservation
from raylane.graph.values.message import TENSORS, Message

HEADER_BYTES = MAX_READERS * SEMAPHORE_BYTES
SLOT_BYTES = 1 << 21
"""Size of a slot. A body of up to this size costs one copy on each side, half of what a lease costs at 70 KB to 1 MB.
Only pages that were written take memory, and an edge has `max_inflight` slots."""
LEND_FROM_BYTES = 1 << 17
"""Total size from which buffers are leased, not copied into the slot: below, two copies cost less than a lease."""

MAX_PLACES = 10
"""Maximum number of buffers of one message that are handed over: their places must fit into a slot. Others are copied.
"""
LENT_BUFFERS, LENT_BODY, WAKE, HANDED_OVER = 1, 2, native.WAKE, 8
ELSEWHERE = LENT_BUFFERS | LENT_BODY
"""Flags of a message: its buffers are leased; its body too; the driver awaits its execution in asyncio; some of its
buffers lie in memory that is handed over (`core.memory.regions`). A part of a message with a flag of ELSEWHERE is not
in its slot."""


_SLOT = struct.Struct("<QIBBHQ")
"""Beginning of a slot, with the size of the first buffer, which follows where it is the only one."""


class RingSpec(NamedTuple):
    """Everything that another process needs to open a ring. `make_rings` fills in `path` and `offset`."""

    readers: tuple[str, ...]
    """Names of the readers, in the order of their semaphores."""
    slots: int
    flags: tuple[int, ...]
    """Flag that stands for this ring on the page of each reader's doorbell."""
    writer: int = 0
    """Member that writes this ring: the sender of the messages, or the relay of this host."""
    path: str = ""
    offset: int = 0
    """Offset of the ring in its segment, in bytes."""


class Received(NamedTuple):
    """Message as read from a ring. Its memory belongs to this process or is leased to it."""

    kind: int
    flags: int
    body: Any
    buffers: Sequence[Any]
    shared: bool
    """True if other processes see the memory of `buffers` too."""

    @property
    def nbytes(self) -> int:
        """Size of body and buffers in bytes."""
        return len(self.body) + sum(len(buffer) for buffer in self.buffers)


def make_rings(rings: Sequence[RingSpec]) -> list[tuple[RingSpec, Segment]]:
    """Create rings in one segment. Returns the specs with their `path` and `offset`.

    One segment, because a graph may have more edges than a process may have descriptors. The segment keeps its file
    descriptor, through which other processes open it; call `Segment.close_fd` when all have. GraphPlanError if a ring
    has too many readers.
    """
    offsets, end = [], 0
    for readers, slots, *_ in rings:
        if len(readers) > MAX_READERS:
            raise GraphPlanError(
                f"cannot send one value to {len(readers)} processes of one host: at most {MAX_READERS} can read it. "
                "Give the others a value of their own, such as the result of a second call"
            )
        offsets.append(end)
        end += HEADER_BYTES + slots * SLOT_BYTES
    if not rings:
        return []
    # Pages are allocated when they are first written, so unused slots cost no memory.
    segment = Segment.make(end)
    segments = []
    for spec, offset in zip(rings, offsets, strict=True):
        for index in range(len(spec.readers)):
            semaphore.init(segment.address + offset + index * SEMAPHORE_BYTES)
        segments.append((spec._replace(path=segment.path, offset=offset), segment))
    return segments


def _check_size(segment: Segment, spec: RingSpec) -> None:
    if segment.nbytes < spec.offset + HEADER_BYTES + spec.slots * SLOT_BYTES:
        raise GraphPlanError(
            f"cannot open a ring: {spec.path} is too small for {spec.slots} slots. Install the same version of raylane "
            "in every process"
        )


class RingWriter(native.SlotWriter):
    """Writing end of a ring. Used by one thread at a time.

    `write` (sequence, message, flags) sends one message. It waits only for memory that readers still keep (with the
    errors of `LeasePool.lend`). After PoolFull nothing was written: write the message again later.
    """

    def __init__(self, segment: Segment, spec: RingSpec, doorbells: Sequence[Segment], pool: LeasePool) -> None:
        """Open the writing end. `doorbells` are the readers' doorbells, in the order of `spec.readers`."""
        _check_size(segment, spec)
        self._segment = segment
        self._spec = spec
        self._pool = pool
        readers = tuple(
            (spec.offset + index * SEMAPHORE_BYTES, doorbell.memory, flag)
            for index, (doorbell, flag) in enumerate(zip(doorbells, spec.flags, strict=True))
        )
        slots_at = spec.offset + HEADER_BYTES
        super().__init__(segment.memory, slots_at, spec.slots, SLOT_BYTES, LEND_FROM_BYTES - 1, readers)
        self._large_bytes = 0

    @property
    def written_bytes(self) -> int:
        """Number of bytes written in total."""
        return self.bytes + self._large_bytes

    def write_elsewhere(self, sequence: int, message: Message, flags: int) -> None:
        """Send a message that does not fit into its slot, in leased memory or in memory that is handed over."""
        kind, body, buffers, _ = message
        sizes = [memoryview(buffer).nbytes for buffer in buffers]
        lent = _lent_flags(len(body), sizes)
        handed_places = _handed_over(buffers)
        copied = [buffer for buffer, place in zip(buffers, handed_places, strict=True) if place is None]
        with_body = bool(lent & LENT_BODY)
        copied += [body] if with_body else []
        # The lease may wait or fail: nothing of the slot has been written by then.
        place: Any = tuple(self._pool.lend(copied, self._spec.readers)) if copied else None
        # Something needs no copy: the message names its place instead.
        if len(copied) < len(buffers) + with_body:
            place = place, [None if region is None else tuple(region[0]) for region in handed_places]
            flags |= HANDED_OVER
            for region in handed_places:
                if region is not None:
                    self._pool.hand_over(region[1], len(self._spec.readers))
        descriptor = pickle.dumps(place, 5)
        self._large_bytes += sum(sizes) + with_body * len(body) - len(descriptor)
        self.write_parts(sequence, kind, flags | lent, b"" if with_body else body, [descriptor])

    def leased_bytes(self, message: Message) -> int:
        """Return the bytes that must be leased to send a message; 0 if the message fits into a slot."""
        sizes = [memoryview(buffer).nbytes for buffer in message.buffers]
        lent = _lent_flags(len(message.body), sizes)
        handed_places = _handed_over(message.buffers)
        parts = [size for size, place in zip(sizes, handed_places, strict=True) if place is None]
        parts += [len(message.body)] if lent & LENT_BODY else []
        return segment_offsets(parts)[1] if lent else 0

    def wake_with(self, fd: int) -> None:
        """Write to eventfd `fd`, that of the reader's event loop, from now on for messages with the flag WAKE."""
        self.wake_fd = fd

    def own_wake_fd(self, fd: int) -> None:
        """Do the same, and close `fd` when this writer is garbage: no thread can be writing to it then."""
        weakref.finalize(self, os.close, fd)
        self.wake_with(fd)

    def take_back(self, reader: int | None = None) -> None:
        """Take the messages that their readers have not read, so that memory in them counts as free again.

        Call after the end of the graph, when nothing is written any more. A reader that is still there reads the oldest
        messages and this method takes the newest, each once; a reader that has died takes none. With `reader`, take
        those of one reader (an index of `spec.readers`), which has died in a graph that continues.
        """
        view, slots_at = self._segment.view, self._spec.offset + HEADER_BYTES
        starts = range(slots_at, slots_at + self._spec.slots * SLOT_BYTES, SLOT_BYTES)
        first = self._segment.address + self._spec.offset
        for index in range(len(self._spec.readers)) if reader is None else (reader,):
            full = first + index * SEMAPHORE_BYTES
            # Usually everything was read. Then no slot is looked at: a look gives a slot that was never used a page.
            unread = semaphore.value(full)
            newest_first = sorted(starts, key=lambda at: _SLOT.unpack_from(view, at), reverse=True) if unread else []
            for at in newest_first:
                if semaphore.try_wait(full):
                    break
                for place in _handed_places(view, at):
                    regions.take_back(place.path)

    def replace_reader(self, index: int, doorbell: Segment) -> None:
        """Write from now on for another process, which has this doorbell, in place of reader `index`, which has died.

        Takes back what that reader has not read, and what it has kept.
        """
        self.take_back(index)
        self._pool.readmit_reader(self._spec.readers[index])
        self.replace_page(index, doorbell.memory)

    def reserve(self, body_bytes: int, sizes: Sequence[int]) -> Reservation | None:
        """Lease memory for a message that is still to be received, with buffers of these sizes. Waits as `write` does.

        None if the message fits into a slot: then `write` it. If the reservation has one part more than `sizes`, the
        last part is for the body.
        """
        lent = _lent_flags(body_bytes, sizes)
        if not lent:
            return None
        return self._pool.reserve([*sizes, body_bytes] if lent & LENT_BODY else sizes, self._spec.readers)

    def write_reserved(self, sequence: int, kind: int, body: bytes, reservation: Reservation, flags: int = 0) -> None:
        """Send a message whose reserved memory is filled. `body` is empty if the body lies in that memory too."""
        place = pickle.dumps(tuple(reservation.descriptor), 5)
        self._large_bytes += sum(reservation.descriptor.sizes) - len(place)
        self.write_parts(sequence, kind, flags | (LENT_BUFFERS if body else LENT_BODY), body, [place])


def _handed_places(view: memoryview, at: int) -> list[RegionPlace]:
    """Return the places of what was handed over with the message in the slot at an offset."""
    *_, flags, _, nbytes = _SLOT.unpack_from(view, at)
    if not flags & HANDED_OVER:
        return []
    begin = at + _SLOT.size
    _, places = pickle.loads(view[begin : begin + nbytes])
    return [RegionPlace(*place) for place in places if place is not None]


def _handed_over(buffers: Sequence[Any]) -> list[tuple[RegionPlace, Region] | None]:
    """Return (place, region) for each buffer that needs no copy, at most MAX_PLACES, None for others."""
    handed_places: list[tuple[RegionPlace, Region] | None] = []
    count = 0
    for buffer in buffers:
        place = regions.find(buffer) if count < MAX_PLACES else None
        handed_places.append(place)
        count += place is not None
    return handed_places


def _lent_flags(body_bytes: int, sizes: Sequence[int]) -> int:
    """Return which parts of a message are leased: 0 for none, LENT_BUFFERS, or LENT_BODY for buffers and body.

    `native.SlotWriter.write` decides about messages with buffers in the same way.
    """
    total = sum(sizes)
    # Some bytes are kept free for the descriptor of a lease, which takes the place of the buffers.
    room = SLOT_BYTES - native.SLOT_HEADER_BYTES - 8 * len(sizes) - native.DESCRIPTOR_BYTES
    if total < LEND_FROM_BYTES and total + body_bytes <= room:
        return 0
    return LENT_BODY if body_bytes > room // 2 or not body_bytes else LENT_BUFFERS


class RingReader(native.SlotReader):
    """Reading end of a ring for one of its readers. Used by one thread at a time.

    `read` reads usual messages. `received` returns the rest of one for which it, or `poll`, has returned a tuple.
    """

    def __init__(
        self,
        segment: Segment,
        spec: RingSpec,
        index: int,
        leases: LeaseReader,
        doorbell: native.Doorbell,
        sequence: int = 0,
    ) -> None:
        """Open the reading end for reader `index` of `spec.readers`, whose doorbell is `doorbell`.

        `sequence` is the number of the next message.
        """
        _check_size(segment, spec)
        self._segment = segment
        self._index = index
        self._leases = leases
        self._shared = len(spec.readers) > 1
        full_at = spec.offset + index * SEMAPHORE_BYTES
        slots_at = spec.offset + HEADER_BYTES
        super().__init__(segment.memory, full_at, slots_at, spec.slots, SLOT_BYTES, doorbell, pickle.loads)
        self.sequence = sequence
        self.writer = spec.writer
        self.flag = spec.flags[index]
        self.full = segment.address + full_at
        """Address of the semaphore of this reader. After each successful wait for it, call `receive` once."""

    def receive(self) -> Received:
        """Read the next message. Call only after a successful wait for `full`.

        SegmentGone if the message's leased memory vanished with its writer.
        """
        return self.received(*self.take())

    def received(self, kind: int, flags: int, body: bytes | None) -> Received:
        """Return the whole message of which `poll` has just returned the beginning. Raises what `receive` raises."""
        if body is not None:
            return Received(kind, flags, body, (), False)
        whole: Any
        whole, parts = self.parts()
        if not flags & ELSEWHERE:
            return Received(kind, flags, whole, parts, False)
        records, places = pickle.loads(parts[0]), []
        if flags & HANDED_OVER:
            records, places = records
        writable = not self._shared
        borrowed = [] if records is None else self._leases.borrow(Descriptor(*records), self._index, writable=writable)
        if flags & LENT_BODY:
            whole = borrowed.pop()
        for index, place in enumerate(places):
            # The others are in `borrowed` already, in their order.
            if place is not None:
                # The sender keeps the array, so NumPy's are read-only; tensors, which cannot be, are copied on write.
                private = writable and kind == TENSORS
                borrowed.insert(index, self._leases.borrow_place(RegionPlace(*place), private=private))
        return Received(kind, flags & WAKE, whole, borrowed, self._shared)


class ProcessDoorbell(native.Doorbell):
    """Doorbell of this process. One thread waits at a time; any process posts."""

    __slots__ = ("address", "policy", "segment")

    def __init__(self) -> None:
        self.segment = Segment.make(native.PAGE_BYTES)
        self.address = self.segment.address
        semaphore.init(self.address)
        self.policy = patience()
        super().__init__(self.segment.memory, self.policy)

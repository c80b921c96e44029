"""Ring of slots in shared memory, with one writer and one or more readers: one edge or control channel within a host.

    0       semaphore `full` of reader 0: number of messages that reader 0 has not read
    64      semaphore `full` of reader 1 ...
    16384   slot 0:  sequence u64 | body bytes u32 | kind u8 | flags u8 | buffers u16 | sizes u64 each | buffers | body
            slot 1:  ...

    writer                                          reader
    fill slot `sequence mod slots`
    post `full` of each reader              --->    finds `full` posted: the semaphore orders memory, so that the
    post the doorbell of each reader                bytes of the slot are visible
    (write the eventfd of the driver)       --->    wakes, if the reader was asleep

The doorbell comes last: a reader that it wakes must find the message. A process has one doorbell for all rings that it
reads, of all graphs. It polls the semaphores of its rings without waiting, and waits for the doorbell when all rings
are empty. So it often finds a message before it has consumed the message's doorbell post; `Doorbell` counts consumed
posts, so that left-over posts are consumed (`absorb`) before the reader sleeps: each would end a later wait in vain.

There is no semaphore for free slots. A graph admits no more executions than its rings have slots, and an execution
ends only after every message of it was read: so the slot that comes next is always free (`plan.schedule` proves this
for each plan). A message that does not fit into a slot lies in a leased segment (`lease`), and the slot says where.
"""

from __future__ import annotations

import os
import pickle
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from raylane.core import semaphore
from raylane.core.segment import segment_offsets
from raylane.core.semaphore import SEMAPHORE_BYTES, Segment, try_wait
from raylane.core.waiting import Waiter
from raylane.errors import GraphPlanError
from raylane.graph.channels.lease import MAX_READERS, Descriptor, LeasePool, LeaseReader, Reservation
from raylane.graph.values.message import Message

HEADER_BYTES = MAX_READERS * SEMAPHORE_BYTES
SLOT_BYTES = 1 << 16
LEND_FROM_BYTES = 1 << 15
"""Total size from which buffers are leased, not copied into the slot: below, two copies cost less than a lease."""
_HEADER = struct.Struct("<QIBBH")
_SIZE = struct.Struct("<Q")
_SLOT_HEADER_BYTES = _HEADER.size
_ROOM_BYTES = SLOT_BYTES - _SLOT_HEADER_BYTES

LENT_BUFFERS, LENT_BODY, WAKE = 1, 2, 4
"""Flags of a message: its buffers are leased; its body too; the driver awaits its execution in asyncio."""


_received: Callable[..., Received] = tuple.__new__
"""Constructor of Received that takes half the time of `Received(...)`."""


class RingSpec(NamedTuple):
    """Everything that another process needs to open a ring."""

    path: str
    readers: tuple[str, ...]
    """Names of the readers, in the order of their semaphores."""
    slots: int
    writer: int = 0
    """Member that writes this ring: the sender of the messages, or the relay of this host."""
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


def make_ring(readers: Sequence[str], slots: int, writer: int = 0) -> tuple[RingSpec, Segment]:
    """Create a ring for these readers.

    The segment keeps its file descriptor, through which other processes open it; call `Segment.close_fd` when all have.
    """
    ((spec, segment),) = make_rings([(readers, slots, writer)])
    return spec, segment


def make_rings(rings: Sequence[tuple[Sequence[str], int, int]]) -> list[tuple[RingSpec, Segment]]:
    """Create rings, each of (readers, slots, writer), in one segment.

    One segment, because a graph may have more edges than a process may have descriptors. GraphPlanError if a ring has
    too many readers.
    """
    offsets, end = [], 0
    for readers, slots, _ in rings:
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
    made = []
    for (readers, slots, writer), offset in zip(rings, offsets, strict=True):
        for index in range(len(readers)):
            semaphore.init(segment.address + offset + index * SEMAPHORE_BYTES)
        made.append((RingSpec(segment.path, tuple(readers), slots, writer, offset), segment))
    return made


def _check_size(segment: Segment, spec: RingSpec) -> None:
    if segment.nbytes < spec.offset + HEADER_BYTES + spec.slots * SLOT_BYTES:
        raise GraphPlanError(
            f"cannot open a ring: {spec.path} is too small for {spec.slots} slots. Install the same version of raylane "
            "in every process"
        )


class RingWriter:
    """Writing end of a ring. Used by one thread at a time."""

    def __init__(self, segment: Segment, spec: RingSpec, doorbells: Sequence[Segment], pool: LeasePool) -> None:
        """Open the writing end. `doorbells` are the readers' doorbells, in the order of `spec.readers`."""
        _check_size(segment, spec)
        self._segment = segment
        self._doorbells = tuple(doorbells)  # keeps their memory mapped
        self._memory = segment.view
        self._spec = spec
        self._pool = pool
        self._slots = spec.slots
        self._slots_offset = spec.offset + HEADER_BYTES
        fulls = [segment.address + spec.offset + index * SEMAPHORE_BYTES for index in range(len(spec.readers))]
        # All `full` semaphores before the first doorbell: a reader that wakes must find its message.
        self._semaphores = (*fulls, *(doorbell.address for doorbell in doorbells))
        self.wake_fd: int | None = None
        """Eventfd of the driver's asyncio loop, if the driver reads this ring and has one."""
        self.bytes = 0
        """Number of bytes written in total."""

    def write(self, sequence: int, message: Message, flags: int = 0) -> None:
        """Send one message. Waits only for memory that readers still keep (with the errors of `LeasePool.lend`).

        After PoolFull nothing was written: write the message again later.
        """
        kind, body, buffers, _ = message
        at = self._slots_offset + sequence % self._slots * SLOT_BYTES
        size = len(body)
        if not buffers and size <= _ROOM_BYTES:
            memory = self._memory
            # No barrier is needed between these writes: the posts below publish all of them together.
            _HEADER.pack_into(memory, at, sequence, size, kind, flags, 0)
            at += _SLOT_HEADER_BYTES
            memory[at : at + size] = body
            self.bytes += size
        else:
            self._write_large(at, sequence, message, flags)
        # The same as `_notify`, inlined: a call costs 0.1 us of the 2 us that this method takes.
        post = semaphore.post
        for address in self._semaphores:
            post(address)
        # Last, and only for executions that asyncio awaits: the system call costs 1 us.
        if flags & WAKE and self.wake_fd is not None:
            os.eventfd_write(self.wake_fd, 1)

    def leased_bytes(self, message: Message) -> int:
        """Return the bytes that must be leased to send a message; 0 if the message fits into a slot."""
        sizes = [memoryview(buffer).nbytes for buffer in message.buffers]
        lent = _lent_flags(len(message.body), sizes)
        parts = [*sizes, len(message.body)] if lent & LENT_BODY else sizes
        return segment_offsets(parts)[1] if lent else 0

    def wake_with(self, fd: int) -> None:
        """Write to eventfd `fd` from now on for messages with the flag WAKE. The ring takes ownership of `fd`.

        `fd` is closed when this writer is garbage: at no earlier time can no thread be writing to it.
        """
        weakref.finalize(self, os.close, fd)
        self.wake_fd = fd

    def reserve(self, body_bytes: int, sizes: Sequence[int]) -> Reservation | None:
        """Lease memory for a message that is still to be received, with buffers of these sizes. Waits as `write` does.

        None if the message fits into a slot: then `write` it. If the reservation has one part more than `sizes`, the
        last part is for the body.
        """
        lent = _lent_flags(body_bytes, sizes)
        if not lent:
            return None
        return self._pool.reserve([*sizes, body_bytes] if lent & LENT_BODY else sizes, self._spec.readers)

    def cancel(self, reservation: Reservation) -> None:
        """Return the memory of a reservation that will not be written."""
        self._pool.cancel(reservation)

    def write_reserved(self, sequence: int, kind: int, body: bytes, reservation: Reservation, flags: int = 0) -> None:
        """Send a message whose reserved memory is filled. `body` is empty if the body lies in that memory too."""
        at = self._slots_offset + sequence % self._slots * SLOT_BYTES
        self.bytes += len(body) + sum(reservation.descriptor.sizes)
        place = pickle.dumps(tuple(reservation.descriptor), 5)
        self._fill(at, sequence, kind, [place], body, flags | (LENT_BUFFERS if body else LENT_BODY))
        self._notify(flags)

    def _write_large(self, at: int, sequence: int, message: Message, flags: int) -> None:
        kind, body, buffers, _ = message
        sizes = [memoryview(buffer).nbytes for buffer in buffers]
        nbytes = sum(sizes) + len(body)
        parts: list[Any] = [memoryview(buffer).cast("B") for buffer in buffers]
        if lent := _lent_flags(len(body), sizes):
            with_body = bool(lent & LENT_BODY)
            # The lease may wait or fail: nothing of the slot has been written by then.
            descriptor = self._pool.lend([*buffers, body] if with_body else buffers, self._spec.readers)
            parts, body = [pickle.dumps(tuple(descriptor), 5)], b"" if with_body else body
            flags |= lent
        self._fill(at, sequence, kind, parts, body, flags)
        self.bytes += nbytes

    def _fill(self, at: int, sequence: int, kind: int, parts: Sequence[Any], body: Any, flags: int) -> None:
        sizes = [len(part) for part in parts]
        _HEADER.pack_into(self._memory, at, sequence, len(body), kind, flags, len(sizes))
        at += _HEADER.size
        for size in sizes:
            _SIZE.pack_into(self._memory, at, size)
            at += _SIZE.size
        for part in [*parts, body]:
            self._memory[at : at + len(part)] = part
            at += len(part)

    def _notify(self, flags: int) -> None:
        for address in self._semaphores:
            semaphore.post(address)
        if flags & WAKE and self.wake_fd is not None:
            os.eventfd_write(self.wake_fd, 1)


def _lent_flags(body_bytes: int, sizes: Sequence[int]) -> int:
    """Return which parts of a message are leased: 0 for none, LENT_BUFFERS, or LENT_BODY for buffers and body."""
    total = sum(sizes)
    # 1024 bytes are kept free for the descriptor of a lease, which takes the place of the buffers.
    room = SLOT_BYTES - _HEADER.size - _SIZE.size * len(sizes) - 1024
    if total < LEND_FROM_BYTES and total + body_bytes <= room:
        return 0
    return LENT_BODY if body_bytes > room // 2 or not body_bytes else LENT_BUFFERS


class RingReader:
    """Reading end of a ring for one of its readers. Used by one thread at a time."""

    def __init__(self, segment: Segment, spec: RingSpec, index: int, leases: LeaseReader) -> None:
        """Open the reading end for reader `index` of `spec.readers`."""
        _check_size(segment, spec)
        self._segment = segment
        self._memory = segment.memory  # slices of it are bytes: one object less than slices of a memoryview
        self._slots = spec.slots
        self._index = index
        self._leases = leases
        self._shared = len(spec.readers) > 1
        self.writer = spec.writer
        self._slots_offset = spec.offset + HEADER_BYTES
        self.full = segment.address + spec.offset + index * SEMAPHORE_BYTES
        """Address of the semaphore of this reader. After each successful wait for it, call `take` once."""
        self.sequence = 0
        """Sequence number of the next message."""

    def take(self) -> Received:
        """Read the next message. Call only after a successful wait for `full`.

        SegmentGone if the message's leased memory vanished with its writer.
        """
        memory = self._memory
        # The semaphore that the caller has waited for makes the bytes of this slot visible.
        at = self._slots_offset + self.sequence % self._slots * SLOT_BYTES
        sequence, size, kind, flags, count = _HEADER.unpack_from(memory, at)
        # A mismatch is a defect of raylane: an execution was admitted before this slot was free.
        if sequence != self.sequence:
            raise AssertionError(f"message {sequence} in the place of message {self.sequence}: a ring was overrun")
        self.sequence = sequence + 1  # before anything can fail: the message is consumed in any case
        at += _SLOT_HEADER_BYTES
        if not count:
            return _received(Received, (kind, flags, memory[at : at + size], (), False))
        return self._take_large(at, size, kind, flags, count)

    def _take_large(self, at: int, size: int, kind: int, flags: int, count: int) -> Received:
        view = self._memory
        sizes = [_SIZE.unpack_from(view, at + index * _SIZE.size)[0] for index in range(count)]
        at += count * _SIZE.size
        parts = []
        for nbytes in [*sizes, size]:
            # Copied out of the slot, which will be written again; bytearrays, so that arrays in them are writable.
            parts.append(bytearray(view[at : at + nbytes]))
            at += nbytes
        body: Any = parts.pop()
        if not flags & (LENT_BUFFERS | LENT_BODY):
            return Received(kind, flags, body, parts, False)
        descriptor = Descriptor(*pickle.loads(parts[0]))
        borrowed = self._leases.borrow(descriptor, self._index, writable=not self._shared)
        if flags & LENT_BODY:
            body = borrowed.pop()
        return Received(kind, flags & ~(LENT_BUFFERS | LENT_BODY), body, borrowed, self._shared)


class Doorbell:
    """Doorbell of this process. One thread waits at a time; any process posts."""

    __slots__ = ("address", "consumed", "segment", "waiter")

    def __init__(self) -> None:
        self.segment = Segment.make(4096)
        self.address = self.segment.address
        semaphore.init(self.address)
        self.consumed = 0
        """Posts consumed. Lower than the number of messages read when messages were found by polling."""
        self.waiter = Waiter()

    def wait(self, timeout_s: float) -> bool:
        """Wait for one post and consume it. Return False after `timeout_s` (at most one second) or on a signal."""
        if self.waiter.wait(self.address, timeout_s):
            self.consumed += 1
            return True
        return False

    def absorb(self, messages_read: int) -> bool:
        """Consume posts of messages that were read before their posts. Return True if there were any.

        After True the rings must be polled again: the consumed post may belong to a message that nobody has seen yet.
        """
        found = False
        while self.consumed < messages_read and not try_wait(self.address):
            self.consumed += 1
            found = True
        return found

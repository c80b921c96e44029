"""A ring of slots in memory that one writer and its readers share: one edge, or one control line, within a host.

    0       semaphore `full` of reader 0: how many messages wait for it
    64      semaphore `full` of reader 1 ...
    16384   slot 0:  sequence u64 | body bytes u32 | kind u8 | flags u8 | buffers u16 | sizes u64 each | buffers | body
            slot 1:  ...

The writer fills slot `sequence mod slots`, then posts each reader's `full`, then the doorbell of each reader's process,
in that order: whoever is woken by the bell finds the message, and the semaphore makes its bytes visible.

There is no semaphore for free slots. A graph lets no more executions in flight than its rings have slots, and an
execution has ended only when every message of it was read: so the slot that a writer comes to is always free
(`schedule` proves it for a plan). What does not fit into a slot lies in a leased segment (`lease`).
"""

from __future__ import annotations

import os
import pickle
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from raylane.core import semaphore
from raylane.core.semaphore import SEMAPHORE_BYTES, Segment
from raylane.errors import GraphPlanError
from raylane.graph.channels.lease import ALIGNMENT, MAX_READERS, Descriptor, LeasePool, LeaseReader, Reserved
from raylane.graph.values.message import Message

HEADER_BYTES = MAX_READERS * SEMAPHORE_BYTES
SLOT_BYTES = 1 << 16
LEND_FROM_BYTES = 1 << 15
"""Buffers of this much together are lent, not copied out: below it two copies are quicker than a lease."""
_HEAD = struct.Struct("<QIBBH")
_SIZE = struct.Struct("<Q")
_HEAD_BYTES = _HEAD.size
_ROOM_BYTES = SLOT_BYTES - _HEAD_BYTES

LENT_BUFFERS, LENT_BODY, WAKE = 1, 2, 4
"""Flags of a message: its buffers, or also its body, are in a segment; its end in the driver is awaited by asyncio."""


_taken: Callable[..., Taken] = tuple.__new__
"""What Taken(...) does, in half the time."""


class RingSpec(NamedTuple):
    """What another process needs to open a ring."""

    path: str
    readers: tuple[str, ...]
    """Names of the readers, in the order of their semaphores."""
    slots: int
    writer: int = 0
    """Number of the member that writes here: the sender, or the relay of this host."""
    offset: int = 0
    """Offset of the ring in its segment, in bytes."""


class Taken(NamedTuple):
    """A message out of a slot, its bytes owned by this process or lent to it."""

    kind: int
    flags: int
    body: Any
    buffers: Sequence[Any]
    shared: bool

    @property
    def nbytes(self) -> int:
        return len(self.body) + sum(len(buffer) for buffer in self.buffers)


def make(readers: Sequence[str], slots: int, writer: int = 0) -> tuple[RingSpec, Segment]:
    """A new ring. The segment's descriptor stays open for others; `Segment.close_fd` when all have opened it."""
    ((spec, segment),) = make_all([(readers, slots, writer)])
    return spec, segment


def make_all(rings: Sequence[tuple[Sequence[str], int, int]]) -> list[tuple[RingSpec, Segment]]:
    """New rings, each of (readers, slots, writer), in one segment: a graph may have more edges than this process may
    have descriptors. See `make`."""
    offsets, end = [], 0
    for readers, slots, _ in rings:
        if len(readers) > MAX_READERS:
            raise GraphPlanError(
                f"{len(readers)} processes of one host read the same value, and {MAX_READERS} can: "
                "give the others a value of their own, such as a second call's"
            )
        offsets.append(end)
        end += HEADER_BYTES + slots * SLOT_BYTES
    if not rings:
        return []
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
            f"{spec.path} is too small for {spec.slots} slots: its maker is another version of raylane"
        )


class RingWriter:
    """The one writer's end. One thread at a time."""

    def __init__(self, segment: Segment, spec: RingSpec, bells: Sequence[Segment], pool: LeasePool) -> None:
        """`bells` are the readers' doorbells, in the order of `spec.readers`."""
        _check_size(segment, spec)
        self._segment = segment
        self._bells = tuple(bells)  # keeps them mapped
        self._memory = segment.view
        self._spec = spec
        self._pool = pool
        self._slots = spec.slots
        self._begin = spec.offset + HEADER_BYTES
        fulls = [segment.address + spec.offset + index * SEMAPHORE_BYTES for index in range(len(spec.readers))]
        self._posts = (*fulls, *(bell.address for bell in bells))
        self.wake_fd: int | None = None
        """The eventfd of the driver's asyncio loop, when the driver reads here and has one."""
        self.bytes = 0
        """Written in all, for statistics."""

    def write(self, sequence: int, message: Message, flags: int = 0) -> None:
        """Hand a message over. Waits only for memory that readers still keep (see `LeasePool.lend`, and its errors).
        After NoRoom nothing was written: write it again later."""
        kind, body, buffers, _ = message
        at = self._begin + sequence % self._slots * SLOT_BYTES
        size = len(body)
        if not buffers and size <= _ROOM_BYTES:
            memory = self._memory
            _HEAD.pack_into(memory, at, sequence, size, kind, flags, 0)
            at += _HEAD_BYTES
            memory[at : at + size] = body
            self.bytes += size
        else:
            self._write_large(at, sequence, message, flags)
        post = semaphore.post
        for address in self._posts:
            post(address)
        if flags & WAKE and self.wake_fd is not None:
            os.eventfd_write(self.wake_fd, 1)

    def lends(self, message: Message) -> int:
        """Bytes of a message for which memory would be lent; 0 if it goes into a slot."""
        sizes = [memoryview(buffer).nbytes for buffer in message.buffers]
        lent = _lent_flags(len(message.body), sizes)
        parts = [*sizes, len(message.body)] if lent & LENT_BODY else sizes
        return sum(-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in parts) if lent else 0

    def wake_with(self, fd: int) -> None:
        """Write to this eventfd from now on for messages that ask for it. It is the ring's to close, when the ring
        is garbage: no thread can be writing then."""
        weakref.finalize(self, os.close, fd)
        self.wake_fd = fd

    def reserve(self, body_bytes: int, sizes: Sequence[int]) -> Reserved | None:
        """Memory for a message that is still to come, with buffers of these sizes; None if it goes into a slot: then
        `write` it. Its last part is for the body if there is one part more than buffers. Waits as `write` does."""
        lent = _lent_flags(body_bytes, sizes)
        if not lent:
            return None
        return self._pool.reserve([*sizes, body_bytes] if lent & LENT_BODY else sizes, self._spec.readers)

    def cancel(self, reserved: Reserved) -> None:
        self._pool.cancel(reserved)

    def write_reserved(self, sequence: int, kind: int, body: bytes, reserved: Reserved, flags: int = 0) -> None:
        """Hand over a message whose memory was reserved and is filled; `body` is empty if it lies there too."""
        at = self._begin + sequence % self._slots * SLOT_BYTES
        self.bytes += len(body) + sum(reserved.descriptor.sizes)
        place = pickle.dumps(tuple(reserved.descriptor), 5)
        self._fill(at, sequence, kind, [place], body, flags | (LENT_BUFFERS if body else LENT_BODY))
        self._tell(flags)

    def _write_large(self, at: int, sequence: int, message: Message, flags: int) -> None:
        kind, body, buffers, _ = message
        sizes = [memoryview(buffer).nbytes for buffer in buffers]
        nbytes = sum(sizes) + len(body)
        parts: list[Any] = [memoryview(buffer).cast("B") for buffer in buffers]
        if lent := _lent_flags(len(body), sizes):
            whole = bool(lent & LENT_BODY)
            descriptor = self._pool.lend([*buffers, body] if whole else buffers, self._spec.readers)
            parts, body = [pickle.dumps(tuple(descriptor), 5)], b"" if whole else body
            flags |= lent
        self._fill(at, sequence, kind, parts, body, flags)
        self.bytes += nbytes

    def _fill(self, at: int, sequence: int, kind: int, parts: Sequence[Any], body: Any, flags: int) -> None:
        sizes = [len(part) for part in parts]
        _HEAD.pack_into(self._memory, at, sequence, len(body), kind, flags, len(sizes))
        at += _HEAD.size
        for size in sizes:
            _SIZE.pack_into(self._memory, at, size)
            at += _SIZE.size
        for part in [*parts, body]:
            self._memory[at : at + len(part)] = part
            at += len(part)

    def _tell(self, flags: int) -> None:
        for address in self._posts:
            semaphore.post(address)
        if flags & WAKE and self.wake_fd is not None:
            os.eventfd_write(self.wake_fd, 1)


def _lent_flags(body_bytes: int, sizes: Sequence[int]) -> int:
    """What of a message does not go into a slot but into a leased segment: 0, LENT_BUFFERS, or LENT_BODY for both."""
    total = sum(sizes)
    room = SLOT_BYTES - _HEAD.size - _SIZE.size * len(sizes) - 1024
    if total < LEND_FROM_BYTES and total + body_bytes <= room:
        return 0
    return LENT_BODY if body_bytes > room // 2 or not body_bytes else LENT_BUFFERS


class RingReader:
    """One reader's end. One thread at a time."""

    def __init__(self, segment: Segment, spec: RingSpec, index: int, leases: LeaseReader) -> None:
        _check_size(segment, spec)
        self._segment = segment
        self._memory = segment.memory  # its slices are bytes: one object less than slices of a view
        self._slots = spec.slots
        self._index = index
        self._leases = leases
        self._shared = len(spec.readers) > 1
        self.writer = spec.writer
        self._begin = spec.offset + HEADER_BYTES
        self.full = segment.address + spec.offset + index * SEMAPHORE_BYTES
        """Address of the semaphore: whoever takes one from it must `take` one message."""
        self.sequence = 0
        """Of the next message."""

    def take(self) -> Taken:
        """The next message; only after one was taken from `full`. SegmentGone if its memory went with its writer."""
        memory = self._memory
        at = self._begin + self.sequence % self._slots * SLOT_BYTES
        sequence, size, kind, flags, count = _HEAD.unpack_from(memory, at)
        if sequence != self.sequence:
            raise AssertionError(f"message {sequence} in the place of message {self.sequence}: a ring was overrun")
        self.sequence = sequence + 1
        at += _HEAD_BYTES
        if not count:
            return _taken(Taken, (kind, flags, memory[at : at + size], (), False))
        return self._take_large(at, size, kind, flags, count)

    def _take_large(self, at: int, size: int, kind: int, flags: int, count: int) -> Taken:
        view = self._memory
        sizes = [_SIZE.unpack_from(view, at + index * _SIZE.size)[0] for index in range(count)]
        at += count * _SIZE.size
        parts = []
        for nbytes in [*sizes, size]:
            parts.append(bytearray(view[at : at + nbytes]))
            at += nbytes
        body: Any = parts.pop()
        if not flags & (LENT_BUFFERS | LENT_BODY):
            return Taken(kind, flags, body, parts, False)
        descriptor = Descriptor(*pickle.loads(parts[0]))
        borrowed = self._leases.borrow(descriptor, self._index, writable=not self._shared)
        if flags & LENT_BODY:
            body = borrowed.pop()
        return Taken(kind, flags & ~(LENT_BUFFERS | LENT_BODY), body, borrowed, self._shared)

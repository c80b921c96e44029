"""A ring between real memories: what is written is what every reader takes, whatever its size."""

from __future__ import annotations

import os
import random
import select
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from core.processes import Child, start_code
from raylane.core.memory.segment import Segment
from raylane.core.signals.semaphore import block, try_wait, value
from raylane.errors import GraphPlanError, GraphTimeoutError, GraphValueError
from raylane.graph.channels import ring
from raylane.graph.channels.lease import LeasePool, LeaseReader
from raylane.graph.channels.ring import (
    HEADER_BYTES,
    LEND_FROM_BYTES,
    MAX_READERS,
    SLOT_BYTES,
    WAKE,
    ProcessDoorbell,
    Received,
    RingReader,
    RingSpec,
    RingWriter,
)
from raylane.graph.values.message import ERROR, NOTHING, VALUE, Message

HEAD_BYTES = 16
BODY_ROOM = SLOT_BYTES - HEAD_BYTES
"""The longest body that lies in a slot by itself."""


class Ring:
    """Both ends, in this process, over two mappings."""

    def __init__(self, readers: int = 1, slots: int = 2, limit_bytes: int = 1 << 30) -> None:
        names = tuple(f"reader {index}" for index in range(readers))
        ((self.spec, self.segment),) = ring.make_rings([RingSpec(names, slots, tuple(range(readers)))])
        self.doorbells = [ProcessDoorbell() for _ in range(readers)]
        self.bells = [doorbell.segment for doorbell in self.doorbells]
        self.pool = LeasePool(limit_bytes, timeout_s=0.05)
        self.writer = RingWriter(self.segment, self.spec, self.bells, self.pool)
        self.readers = [
            RingReader(Segment.open(self.spec.path), self.spec, index, LeaseReader(), doorbell)
            for index, doorbell in enumerate(self.doorbells)
        ]
        self.written = 0

    def write(self, body: bytes, buffers: Sequence[Any] = (), kind: int = VALUE, flags: int = 0) -> None:
        self.writer.write(self.written, Message(kind, body, buffers), flags)
        self.written += 1

    def take(self, index: int = 0) -> Received:
        reader = self.readers[index]
        assert try_wait(reader.full) == 0
        assert try_wait(self.bells[index].address) == 0
        return reader.receive()


def filled(nbytes: int, seed: int = 0) -> bytes:
    return (b"%d " % seed * (nbytes // 2 + 1))[:nbytes]


def whole(taken: Received) -> tuple[bytes, list[bytes]]:
    return bytes(taken.body), [bytes(buffer) for buffer in taken.buffers]


# Sizes


BODIES = [0, 1, LEND_FROM_BYTES, BODY_ROOM - 1100, BODY_ROOM, BODY_ROOM + 1, SLOT_BYTES, 4 * SLOT_BYTES]
FEW = [
    [],
    [0],
    [LEND_FROM_BYTES - 1],
    [LEND_FROM_BYTES],
    [BODY_ROOM],
    [1_000_000],
    [LEND_FROM_BYTES // 2] * 2,
    [LEND_FROM_BYTES // 2 - 1] * 2,
    [0, 5, 0, 70_000, 0],
    [3] * 100,
]
MANY = [[8] * 3000, [8] * 4000, [5] * 6000, [5] * 7900, [5] * 8100, [300] * 9000, [1] * 20000]
SIZES = [(body, sizes) for body in BODIES for sizes in FEW]
SIZES += [(body, sizes) for body in (0, 5000, SLOT_BYTES) for sizes in MANY]


def _name(value: Any) -> str:
    return str(value) if isinstance(value, int) else f"{len(value)}x{value[0] if value else 0}"


@pytest.mark.parametrize(("body", "sizes"), SIZES, ids=_name)
def test_ring_messages_of_every_size_stay_in_their_slot(body: int, sizes: list[int]) -> None:
    made = Ring(slots=3)
    made.write(b"before", [b"its buffer"])
    sent = filled(body, 1), [filled(size, number) for number, size in enumerate(sizes)]
    made.segment.view[HEADER_BYTES + 2 * SLOT_BYTES : HEADER_BYTES + 3 * SLOT_BYTES] = b"\xaa" * SLOT_BYTES
    made.write(*sent, kind=ERROR)
    assert made.segment.view[HEADER_BYTES + 2 * SLOT_BYTES :].tobytes() == b"\xaa" * SLOT_BYTES
    made.write(b"after")
    assert whole(made.take()) == (b"before", [b"its buffer"])
    taken = made.take()
    assert (taken.kind, taken.flags, taken.shared) == (ERROR, 0, False)
    assert whole(taken) == sent
    assert taken.nbytes == body + sum(sizes)
    assert made.writer.written_bytes == len(b"beforeits bufferafter") + taken.nbytes
    assert whole(made.take()) == (b"after", [])


def test_random_messages_through_a_ring_of_any_length() -> None:
    rng = random.Random(5)
    for slots in (1, 2, 3, 7):
        made, waiting = Ring(readers=2, slots=slots), []
        for number in range(150):
            sizes = [rng.choice([0, 1, 500, 33_000]) for _ in range(rng.choice([0, 0, 1, 3]))]
            body = filled(rng.choice([0, 10, 5000, 66_000]), number)
            buffers = [filled(size, number + 1) for size in sizes]
            made.write(body, buffers, kind=number % 3)
            waiting.append((number % 3, body, buffers))
            while len(waiting) == slots or (waiting and rng.random() < 0.4):
                kind, *sent = waiting.pop(0)
                for index in range(2):
                    taken = made.take(index)
                    assert taken.kind == kind
                    assert whole(taken) == tuple(sent)


def test_ring_message_belongs_to_the_reader_after_take() -> None:
    made = Ring(slots=1)
    kept = []
    for number in range(20):
        size = (10, 20_000, 50_000)[number % 3]
        made.write(bytes([number]) * 10, [bytes([number]) * size] if number % 2 else [])
        kept.append(made.take())
    for number, taken in enumerate(kept):
        assert set(bytes(taken.body)) == {number}
        assert all(set(bytes(buffer)) == {number} for buffer in taken.buffers)


def test_ring_buffers_are_writable_for_a_single_reader() -> None:
    for size in (1000, 100_000):
        made = Ring()
        made.write(b"", [bytes(size)])
        array = np.frombuffer(made.take().buffers[0], np.uint8)
        assert array.flags.writeable
        made = Ring(readers=2)
        made.write(b"", [bytes(size)])
        one, two = made.take(0), made.take(1)
        assert one.shared is two.shared is (size > LEND_FROM_BYTES)
        assert np.frombuffer(one.buffers[0], np.uint8).flags.writeable is (size <= LEND_FROM_BYTES)


# Flags, bells, order


def test_kinds_and_flags_travel() -> None:
    made = Ring(slots=8)
    for kind in (VALUE, ERROR, NOTHING):
        for body, buffers in ((b"", []), (b"b", [b"x" * 100]), (b"b", [b"x" * 40_000]), (b"b" * 70_000, [])):
            made.write(body, buffers, kind=kind, flags=WAKE)
            taken = made.take()
            assert (taken.kind, taken.flags & WAKE) == (kind, WAKE)


def test_flags_name_the_ring_that_has_a_message() -> None:
    made = Ring(readers=3, slots=4)
    assert [doorbell.flagged() for doorbell in made.doorbells] == [-1] * 3
    made.write(b"x")
    made.write(b"x", [bytes(40_000)])
    assert [doorbell.flagged() for doorbell in made.doorbells] == [0, 1, 2]
    assert [doorbell.flagged() for doorbell in made.doorbells] == [-1] * 3


def test_every_reader_is_told_and_rung() -> None:
    made = Ring(readers=3, slots=4)
    for count in (1, 2, 3):
        made.write(b"x" * count)
        assert [value(reader.full) for reader in made.readers] == [count] * 3
        assert [value(one.address) for one in made.bells] == [count] * 3
    made.take(1)
    assert [value(reader.full) for reader in made.readers] == [3, 2, 3]
    assert [reader.sequence for reader in made.readers] == [0, 1, 0]


def readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def test_the_eventfd_is_written_to_when_asked_for() -> None:
    made = Ring(slots=4)
    made.write(b"no eventfd yet", flags=WAKE)
    ours = os.eventfd(0, os.EFD_NONBLOCK)
    made.writer.own_wake_fd(os.dup(ours))
    made.doorbells[0].sleeping(True)
    made.write(b"not asked for")
    assert not readable(ours)
    for buffers in ([], [bytes(40_000)]):
        made.write(b"asked for", buffers, flags=WAKE)
        assert readable(ours)
        os.eventfd_read(ours)
    made.doorbells[0].sleeping(False)
    made.write(b"not asleep", flags=WAKE)
    assert not readable(ours)
    before = len(os.listdir("/proc/self/fd"))
    made.writer = None  # type: ignore[assignment]
    assert len(os.listdir("/proc/self/fd")) == before - 1  # the ring's copy is gone with it
    os.close(ours)


def test_an_overrun_is_noticed() -> None:
    made = Ring(slots=2)
    for _ in range(3):
        made.write(b"too many in flight")
    with pytest.raises(AssertionError, match="message 2 in the place of message 0: a ring was overrun"):
        made.take()


def test_a_ring_has_room_for_so_many_readers() -> None:
    made = Ring(readers=MAX_READERS)
    made.write(b"all", [bytes(LEND_FROM_BYTES)])
    assert all(whole(made.take(index))[0] == b"all" for index in range(MAX_READERS))
    assert made.pool._leased[0].returned()
    with pytest.raises(
        GraphPlanError, match="cannot send one value to 257 processes of one host: at most 256 can read it"
    ):
        Ring(readers=MAX_READERS + 1)


# Memory


def test_ring_write_failure_leaves_the_slot_writable() -> None:
    made = Ring(limit_bytes=400_000)
    with pytest.raises(GraphValueError, match="max_lent_bytes is 400000"):
        made.write(b"", [bytes(500_000)])
    made.write(b"instead")
    assert whole(made.take())[0] == b"instead"
    kept = []
    for _ in range(2):
        made.write(b"", [bytes(160_000)])
        kept.append(made.take())
    with pytest.raises(GraphTimeoutError, match="reader 0 holds 327680 bytes"):
        made.write(b"", [bytes(160_000)])
    made.write(b"instead")
    assert whole(made.take())[0] == b"instead"
    kept.clear()
    made.write(b"", [bytes(160_000)])
    assert len(made.take().buffers[0]) == 160_000


def test_reserved_memory_is_handed_over() -> None:
    made = Ring()
    assert made.writer.reserve(100, [1000]) is None  # goes into a slot
    for body, sizes in (
        (100, [LEND_FROM_BYTES]),
        (0, [LEND_FROM_BYTES]),
        (BODY_ROOM + 1, []),
        (BODY_ROOM + 1, [10, LEND_FROM_BYTES]),
    ):
        reserved = made.writer.reserve(body, sizes)
        assert reserved is not None
        inside = len(reserved.parts) > len(sizes)
        for number, part in enumerate(reserved.parts):
            part[:] = bytes([number + 1]) * len(part)
        made.writer.write_reserved(made.written, VALUE, b"" if inside else b"\x09" * body, reserved, WAKE)
        made.written += 1
        taken = made.take()
        assert (taken.kind, taken.flags, len(taken.body)) == (VALUE, WAKE, body)
        assert [len(buffer) for buffer in taken.buffers] == sizes
        expected = bytes([len(reserved.parts)]) if inside else b"\x09"
        assert bytes(taken.body) == expected * body
        assert all(set(bytes(buffer)) == {number + 1} for number, buffer in enumerate(taken.buffers))


# Processes


READER = """
# Takes `count` messages, answers each on a ring of its own, and says what it has seen.
import zlib
from raylane.core.memory.segment import Segment
from raylane.core.signals.semaphore import block, try_wait
from raylane.graph.channels.lease import LeasePool, LeaseReader
from raylane.graph.channels.ring import ProcessDoorbell, RingReader, RingSpec, RingWriter
from raylane.graph.values.message import Message, VALUE
bell = ProcessDoorbell()
pipe.send(bell.segment.path)
there, back, driver, count, keep = pipe.receive()
there, back = RingSpec(*there), RingSpec(*back)
reader = RingReader(Segment.open(there.path), there, index, LeaseReader(), bell)
writer = RingWriter(Segment.open(back.path), back, [Segment.open(driver)], LeasePool(1 << 30))
sums, kept = [], []
while reader.sequence < count:
    while try_wait(bell.address) and not block(bell.address):
        pass
    assert try_wait(reader.full) == 0  # whoever hears the bell finds the message
    taken = reader.receive()
    check = zlib.crc32(bytes(taken.body))
    for buffer in taken.buffers:
        check = zlib.crc32(buffer, check)
    sums.append(check)
    if keep and reader.sequence % 3 == 0:
        kept.append((check, taken))
    writer.write(reader.sequence - 1, Message(VALUE, b"done"))
for check, taken in kept:  # still as they were
    again = zlib.crc32(bytes(taken.body))
    for buffer in taken.buffers:
        again = zlib.crc32(buffer, again)
    assert again == check
answer = sums
"""


def checked(body: bytes, buffers: list[bytes]) -> int:
    found = zlib.crc32(body)
    for buffer in buffers:
        found = zlib.crc32(buffer, found)
    return found


class Line:
    """One writer here, `readers` processes, and a ring back from each."""

    def __init__(self, readers: int, slots: int, count: int, *, keep: bool) -> None:
        self.children: list[Child] = [start_code(READER, index=index) for index in range(readers)]
        bells = [Segment.open(child.receive()) for child in self.children]
        names = tuple(str(index) for index in range(readers))
        ((spec, segment),) = ring.make_rings([RingSpec(names, slots, (7,) * readers)])
        self.pool = LeasePool(1 << 30, timeout_s=20)
        self.writer = RingWriter(segment, spec, bells, self.pool)
        self.bell, self.slots, self.answered = ProcessDoorbell(), slots, 0
        self.back: list[RingReader] = []
        for child in self.children:
            ((back, memory),) = ring.make_rings([RingSpec(("writer",), slots, (0,))])
            self.back.append(RingReader(memory, back, 0, LeaseReader(), self.bell))
            child.send((tuple(spec), tuple(back), self.bell.segment.path, count, keep))

    def write(self, number: int, message: Message) -> None:
        """As a graph does: no more in flight than there are slots."""
        while number - min(reader.sequence for reader in self.back) >= self.slots:
            assert block(self.bell.address) or block(self.bell.address, 20)
            for reader in self.back:
                while not try_wait(reader.full):
                    assert bytes(reader.receive().body) == b"done"
        self.writer.write(number, message)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("readers", "slots", "count", "keep"), [(1, 1, 1000, False), (1, 8, 5000, False), (3, 2, 400, True)]
)
def test_processes_read_what_was_written(readers: int, slots: int, count: int, keep: bool) -> None:
    rng = random.Random(1)
    line, sums = Line(readers, slots, count, keep=keep), []
    for number in range(count):
        large = rng.random() < 0.2
        body = filled(rng.choice([0, 30, 900, 20_000]), number)
        buffers = [filled(rng.choice([10, 33_000, 90_000]), number + 1)] if large else []
        sums.append(checked(body, buffers))
        line.write(number, Message(VALUE, body, buffers))
    assert [child.result() for child in line.children] == [sums] * readers
    if not keep:
        line.pool.reclaim()
        assert line.pool.leased_bytes() == 0
        assert next(line.pool._numbers) <= 3 * (slots + 2)  # a few, used again and again


@pytest.mark.processes
def test_a_reader_that_dies_spoils_nothing_for_the_others() -> None:
    line = Line(2, 4, 50, keep=False)
    victim, other = line.children
    sums = []
    for number in range(20):
        body, buffers = filled(500, number), [filled(40_000, number)]
        sums.append(checked(body, buffers))
        line.write(number, Message(VALUE, body, buffers))
        if number == 9:
            victim.kill()
            line.back.pop(0)  # its death is noticed elsewhere
    for number in range(20, 50):
        line.write(number, Message(VALUE, b"%d" % number))
        sums.append(checked(b"%d" % number, []))
    assert other.result() == sums


def test_a_spec_says_how_to_open_a_ring() -> None:
    made = Ring(readers=2, slots=3)
    assert made.spec == RingSpec(("reader 0", "reader 1"), 3, (0, 1), path=made.segment.path)
    assert made.segment.nbytes == HEADER_BYTES + 3 * SLOT_BYTES
    made.segment.close_fd()
    with pytest.raises(FileNotFoundError):
        Segment.open(made.spec.path)
    made.write(b"the memory is still there")
    assert whole(made.take(1))[0] == b"the memory is still there"

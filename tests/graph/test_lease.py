"""Memory that is lent: when it is used again, when never, and what happens when there is none left."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from core.processes import start_code
from raylane.core.memory.layout import BLOCK_ALIGNMENT
from raylane.errors import GraphTimeoutError, GraphValueError
from raylane.graph.channels import lease
from raylane.graph.channels.lease import (
    MAX_IDLE,
    MAX_MAPPED,
    MAX_OPEN_LEASES,
    Descriptor,
    LeasePool,
    LeaseReader,
)
from raylane.graph.lifecycle import Event
from raylane.testing.leaks import descriptors

KB = 1 << 10
LIMIT = 1 << 30
ONE, TWO = ("one",), ("one", "two")


@pytest.fixture
def pool() -> LeasePool:
    return LeasePool(LIMIT, timeout_s=10)


def content(number: int, nbytes: int = 40 * KB) -> bytes:
    return bytes([number % 251]) * nbytes


def borrow(reader: LeaseReader, descriptor: Descriptor, index: int = 0, *, writable: bool = True) -> list[Any]:
    """Parts as arrays, as a message has them."""
    parts = reader.borrow(descriptor, index, writable=writable)
    return [np.frombuffer(part, np.uint8) for part in parts]


def in_use(pool: LeasePool) -> tuple[int, int]:
    """(lent, idle) after asking all."""
    pool.reclaim()
    return pool.leased_count, pool.idle_count


def test_thousands_that_are_kept_take_no_descriptors() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    pool, reader = LeasePool(LIMIT, timeout_s=10, read_within=3), LeaseReader()
    before = count()
    kept = [borrow(reader, pool.lend([content(number, 5 * KB)], ONE))[0] for number in range(3000)]
    assert count() - before < 2 * MAX_OPEN_LEASES
    assert all(array[0] == number % 251 for number, array in enumerate(kept))
    kept.clear()
    pool.reclaim(3000)
    assert (pool.leased_bytes(), pool.leased_count) == (0, 0)
    assert count() - before <= MAX_IDLE  # others' garbage may have gone meanwhile
    assert borrow(reader, pool.lend([content(7)], ONE))[0][0] == 7


def test_a_path_that_somebody_may_still_need_stays() -> None:
    for read_within in (None, 1000):
        pool, reader = LeasePool(LIMIT, timeout_s=10, read_within=read_within), LeaseReader()
        lent = [pool.lend([content(number, 5 * KB)], ONE) for number in range(900)]
        assert all(borrow(reader, one)[0][0] == number % 251 for number, one in enumerate(lent))


def test_when_the_machine_refuses_it_says_what_is_lent(pool: LeasePool, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = LeaseReader()
    kept = borrow(reader, pool.lend([content(1)], ("Worker#3",)))
    tries: list[int] = []

    def make(nbytes: int) -> Any:
        tries.append(nbytes)
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(lease.Segment, "make", make)
    with pytest.raises(OSError, match="Too many open files") as caught:
        pool.lend([content(2)], ONE)
    assert len(tries) == 2
    assert caught.value.__notes__ == ["1 segments are leased: Worker#3 holds 40960 bytes"]
    kept.clear()
    assert borrow(reader, pool.lend([content(2)], ONE))[0][0] == 2  # what has come back needs no new one


# What arrives


@pytest.mark.parametrize(
    "sizes", [[40_000], [0], [1], [63, 64, 65], [0, 5, 0], [4096, 4097], [1] * 1000, [100_000, 1, 0, 65_536]]
)
def test_parts_arrive_as_they_were(pool: LeasePool, sizes: list[int]) -> None:
    sent = [content(number, size) for number, size in enumerate(sizes)]
    descriptor = pool.lend(sent, ONE)
    assert descriptor.sizes == tuple(sizes)
    arrays = borrow(LeaseReader(), descriptor)
    assert [array.tobytes() for array in arrays] == sent
    assert all(array.ctypes.data % BLOCK_ALIGNMENT == 0 for array in arrays if array.size)


def test_lend_accepts_any_buffer(pool: LeasePool) -> None:
    grid = np.arange(12, dtype=np.float32).reshape(3, 4)
    descriptor = pool.lend([grid, memoryview(grid).cast("B"), bytearray(b"xy"), np.zeros(0)], ONE)
    first, second, third, fourth = borrow(LeaseReader(), descriptor)
    assert first.view(np.float32).tolist() == second.view(np.float32).tolist() == grid.ravel().tolist()
    assert (third.tobytes(), fourth.size) == (b"xy", 0)


def test_one_reader_may_write_and_several_may_not(pool: LeasePool) -> None:
    (array,) = borrow(LeaseReader(), pool.lend([content(1)], ONE))
    array[:] = 9
    (array,) = borrow(LeaseReader(), pool.lend([content(1)], TWO), 1, writable=False)
    with pytest.raises(ValueError, match="read-only"):
        array[:] = 9


# When it is used again


def test_dropped_memory_is_used_again(pool: LeasePool) -> None:
    reader, numbers = LeaseReader(), set()
    for number in range(50):
        descriptor = pool.lend([content(number)], ONE)
        numbers.add(descriptor.number)
        (array,) = borrow(reader, descriptor)
        assert array.tobytes() == content(number)
        del array
    assert len(numbers) == 1


@pytest.mark.parametrize(
    "keep",
    [
        lambda arrays: arrays[0],
        lambda arrays: arrays[1][5:6],
        lambda arrays: arrays[0].reshape(2, -1).T[3:],
        lambda arrays: memoryview(arrays[1]),
        lambda arrays: arrays[0].view(np.uint16),
        lambda arrays: [np.asarray(arrays[1])],
    ],
)
def test_a_part_of_it_or_a_view_keeps_it(pool: LeasePool, keep: Callable[[Any], Any]) -> None:
    reader = LeaseReader()
    kept = keep(borrow(reader, pool.lend([content(1), content(2)], ONE)))
    seen = bytes(kept[0] if isinstance(kept, list) else kept)
    gc.collect()
    for number in range(5):
        borrow(reader, pool.lend([content(number), content(number)], ONE))
    assert bytes(kept[0] if isinstance(kept, list) else kept) == seen
    assert in_use(pool)[0] == 1
    del kept
    assert in_use(pool) == (0, 2)


def test_a_tensor_keeps_it_too(pool: LeasePool) -> None:
    import torch

    (part,) = LeaseReader().borrow(pool.lend([content(3)], ONE), 0, writable=True)
    tensor = torch.frombuffer(part, dtype=torch.uint8)[10:20]
    del part
    gc.collect()
    assert in_use(pool) == (1, 0)
    assert tensor.tolist() == [3] * 10
    del tensor
    assert in_use(pool) == (0, 1)


def test_it_comes_back_when_the_last_reader_has_let_go(pool: LeasePool) -> None:
    readers = [LeaseReader() for _ in range(5)]
    descriptor = pool.lend([content(1)], tuple(f"reader {index}" for index in range(5)))
    held = [borrow(reader, descriptor, index, writable=False) for index, reader in enumerate(readers)]
    for index in (2, 0, 3, 1):
        held[index].clear()
        assert in_use(pool) == (1, 0)
        assert pool._leased[0].outstanding == [other for other in range(5) if held[other]]
    assert held[4][0].tobytes() == content(1)
    held.clear()
    assert in_use(pool) == (0, 1)


def test_the_same_memory_serves_different_numbers_of_readers(pool: LeasePool) -> None:
    reader = LeaseReader()
    for count in (1, 5, 2, 1, 64, 3):
        descriptor = pool.lend([content(count)], tuple(map(str, range(count))))
        assert descriptor.number == 0
        for index in range(count):
            borrow(reader, descriptor, index, writable=False)


def test_memory_may_be_filled_after_it_was_lent(pool: LeasePool) -> None:
    reserved = pool.reserve([3, 5], ONE)
    reserved.parts[0][:] = b"abc"
    reserved.parts[1][:] = b"defgh"
    assert [array.tobytes() for array in borrow(LeaseReader(), reserved.descriptor)] == [b"abc", b"defgh"]


# Many


def test_thousands_may_be_kept_and_lending_stays_quick(pool: LeasePool, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = LeaseReader()
    kept = [borrow(reader, pool.lend([content(number, 4 * KB)], ONE))[0] for number in range(2000)]
    asked = []
    try_wait = lease.semaphore.try_wait
    monkeypatch.setattr(lease.semaphore, "try_wait", lambda address: asked.append(address) or try_wait(address))
    for number in range(1000):
        borrow(reader, pool.lend([content(number, 4 * KB)], ONE))
    assert len(asked) <= 1000 * lease.RECLAIM_CHECKS  # not 2000 each time
    monkeypatch.undo()
    assert in_use(pool)[0] == 2000
    assert pool._numbers.__next__() <= 2000 + 1000 // lease.RECLAIM_CHECKS * 4
    assert all(array.tobytes() == content(number, 4 * KB) for number, array in enumerate(kept))
    kept.clear()
    assert in_use(pool) == (0, MAX_IDLE)


def test_kept_arrays_cost_their_reader_no_descriptor(pool: LeasePool) -> None:
    reader = LeaseReader()
    before = len(os.listdir("/proc/self/fd"))
    kept = [borrow(reader, pool.lend([content(number)], ONE)) for number in range(100)]
    assert len(os.listdir("/proc/self/fd")) - before == 100  # those of the writer, one each
    kept.clear()
    pool.reclaim(100)
    assert len(os.listdir("/proc/self/fd")) - before == MAX_IDLE


def test_a_reader_maps_again_what_it_has_forgotten(pool: LeasePool) -> None:
    reader = LeaseReader()
    lent = [pool.lend([content(number)], ONE) for number in range(3 * MAX_MAPPED)]
    kept = [borrow(reader, descriptor)[0] for descriptor in lent]
    assert reader.mapped_count == MAX_MAPPED
    assert [array[0] for array in kept] == [number % 251 for number in range(len(lent))]
    del kept[::2]
    pool.reclaim()
    again = [pool.lend([content(number)], ONE) for number in range(MAX_IDLE)]
    assert {descriptor.number for descriptor in again} <= {descriptor.number for descriptor in lent}
    assert [borrow(reader, descriptor)[0][0] for descriptor in again] == list(range(MAX_IDLE))
    assert [array[0] for array in kept] == [number % 251 for number in range(1, len(lent), 2)]


def test_discarded_segment_holds_no_memory_while_mapped(pool: LeasePool) -> None:
    reader, sizes = LeaseReader(), [(1 << 20) + number * (1 << 18) for number in range(3 * MAX_IDLE)]
    kept = [borrow(reader, pool.lend([content(1, size)], ONE))[0] for size in sizes]
    before = _shared_bytes()
    keep = kept.pop()
    kept.clear()
    assert in_use(pool) == (1, MAX_IDLE)
    assert before - _shared_bytes() >= sum(sizes[: 3 * MAX_IDLE - MAX_IDLE - 1])
    assert keep.tobytes() == content(1, sizes[-1])


def _shared_bytes() -> int:
    """Shared memory that this process sees, resident."""
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("RssShmem")).split()[1]) * KB


def test_new_segment_under_an_old_path_is_not_mistaken(pool: LeasePool) -> None:
    reader, paths = LeaseReader(), []
    for number in range(40):  # each of another size: none is used again, descriptors are
        descriptor = pool.lend([content(number, (number + 1) * 32 * KB)], ONE)
        paths.append(descriptor.path)
        assert borrow(reader, descriptor)[0][-1] == number
        if number % 4 == 3:
            pool = LeasePool(LIMIT) if number % 8 == 7 else pool
            reader = LeaseReader() if number % 8 == 7 else reader
    assert len(set(paths)) < len(paths)


# The limit


def test_a_message_above_the_limit_is_refused(pool: LeasePool) -> None:
    pool.limit_bytes = 100 * KB
    with pytest.raises(
        GraphValueError, match=r"a message of \d+ bytes: max_lent_bytes is 102400\. .* larger max_lent_bytes"
    ):
        pool.lend([content(1, 101 * KB)], ONE)
    with pytest.raises(GraphValueError, match="max_lent_bytes is 102400"):
        pool.lend([content(1, 60 * KB)] * 2, ONE)
    assert pool.leased_bytes() == 0
    pool.lend([content(1, 64 * KB)], ONE)


def test_idle_memory_counts_and_makes_room(pool: LeasePool) -> None:
    pool.limit_bytes = 1000 * KB
    reader = LeaseReader()
    for kilobytes in (40, 64, 128, 256, 512, 896, 40):
        borrow(reader, pool.lend([content(1, kilobytes * KB)], ONE))
        pool.reclaim()
        assert pool.idle_bytes <= 1000 * KB
    assert pool.leased_bytes() == 0


def test_pool_timeout_names_the_readers_that_hold_memory(pool: LeasePool) -> None:
    pool.limit_bytes, pool.timeout_s = 300 * KB, 0.05
    two, one = LeaseReader(), LeaseReader()
    kept = []
    for number in range(3):
        descriptor = pool.lend([content(number, 96 * KB)], ("Actor(A)", "the driver"))
        kept.append(borrow(one, descriptor, 1, writable=False))
        if number:
            kept.append(borrow(two, descriptor, 0, writable=False))
    del kept[1]  # of the first only the driver has anything; nobody of name A has read it
    with pytest.raises(GraphTimeoutError) as caught:
        pool.lend([content(4, 50 * KB)], ONE)
    said = str(caught.value)
    assert said.startswith("no memory for a message of 53248 bytes within 0.05 s: of at most 307200 bytes, ")
    assert "the driver holds 196608 bytes" in said
    assert "Actor(A) holds 294912 bytes" in said
    assert said.index("Actor(A)") < said.index("the driver")  # who holds most comes first
    assert "Drop or copy those arrays, or compile with a larger max_lent_bytes" in said
    kept.clear()


def test_a_wait_ends_when_a_reader_lets_go(pool: LeasePool) -> None:
    pool.limit_bytes = 100 * KB
    kept = borrow(LeaseReader(), pool.lend([content(1, 80 * KB)], ONE))
    timer = threading.Timer(0.05, kept.clear)
    timer.start()
    assert pool.lend([content(2, 96 * KB)], ONE).sizes == (96 * KB,)  # of another size: that one was retired
    timer.join()


def test_closing_ends_a_wait_and_the_limit(pool: LeasePool) -> None:
    pool.limit_bytes = 100 * KB
    pool.timeout_s = None
    kept = borrow(LeaseReader(), pool.lend([content(1, 80 * KB)], ONE))
    timer = threading.Timer(0.05, pool.lifecycle.advance, (Event.CLOSE,))
    timer.start()
    assert pool.lend([content(2, 80 * KB)], ONE).sizes == (80 * KB,)
    timer.join()
    assert kept[0][0] == 1


# Other processes


READER = """
# Borrow, say what is there, let go when told to.
from raylane.graph.channels.lease import Descriptor, LeaseReader
reader, kept = LeaseReader(), []
while (word := pipe.receive())[0] != "end":
    if word[0] == "borrow":
        kept.append(reader.borrow(Descriptor(*word[1:]), index, writable=False))
        pipe.send(bytes(kept[-1][0]))
    else:
        kept.clear()
        pipe.send("dropped")
"""


@pytest.mark.processes
def test_readers_in_other_processes(pool: LeasePool) -> None:
    children = [start_code(READER, index=index) for index in range(2)]
    numbers = set()
    for number in range(5):
        descriptor = pool.lend([content(number)], TWO)
        numbers.add(descriptor.number)
        for child in children:
            child.send(("borrow", *descriptor))
        assert [child.receive() for child in children] == [content(number)] * 2
        for child in children:
            assert in_use(pool)[0] == 1
            child.send(("drop",))
            assert child.receive() == "dropped"
        assert in_use(pool) == (0, 1)
    assert numbers == {0}
    for child in children:
        child.send(("end",))
        child.result()


@pytest.mark.processes
def test_segment_of_a_dead_reader_is_never_reused(pool: LeasePool) -> None:
    pool.limit_bytes, pool.timeout_s = 100 * KB, 0.05
    child, reader = start_code(READER, index=0), LeaseReader()
    descriptor = pool.lend([content(1)], TWO)
    child.send(("borrow", *descriptor))
    child.receive()
    mine = borrow(reader, descriptor, 1, writable=False)
    child.kill()
    other = pool.lend([content(2)], ONE)
    assert other.number != descriptor.number
    assert borrow(reader, other)[0][0] == 2
    assert mine[0].tobytes() == content(1)  # the others' are theirs
    mine.clear()
    assert in_use(pool)[0] == 1
    with pytest.raises(GraphTimeoutError, match="one holds 40960 bytes"):
        pool.lend([content(3, 64 * KB)], ONE)


WRITER = """
from raylane.graph.channels.lease import LeasePool
pool = LeasePool(1 << 30)
pipe.send(tuple(pool.lend([b"x" * 50_000], ("one",))))
pipe.receive()
"""


@pytest.mark.processes
def test_arrays_outlive_the_writer() -> None:
    child, reader = start_code(WRITER), LeaseReader()
    descriptor = Descriptor(*child.receive())
    (array,) = borrow(reader, descriptor)
    child.kill()
    assert array.tobytes() == b"x" * 50_000
    del array
    gc.collect()
    with pytest.raises(OSError, match="No such file or directory"):
        LeaseReader().borrow(descriptor, 0, writable=True)


AT_EXIT = """
import numpy as np
from raylane.graph.channels.lease import LeasePool, LeaseReader
pool, reader = LeasePool(1 << 30), LeaseReader()
kept = [np.frombuffer(reader.borrow(pool.lend([b"x" * 50_000], ("one",)), 0, writable=True)[0]) for _ in range(100)]
endless = [kept[:3]]
endless.append(endless)
"""


@pytest.mark.processes
def test_a_process_ends_quietly_with_arrays_in_hand() -> None:
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_is_left(pool: LeasePool) -> None:
    gc.collect()  # earlier tests may have left arrays in reference cycles, whose segments would close meanwhile
    before = descriptors()
    other = LeasePool(LIMIT)
    reader = LeaseReader()
    kept = [borrow(reader, other.lend([content(number)], ONE)) for number in range(10)]
    del other, reader
    assert len(descriptors()) > len(before)
    kept.clear()
    gc.collect()
    assert descriptors() == before

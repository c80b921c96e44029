from __future__ import annotations

import ctypes
import gc
import os
import threading

import numpy as np
import pytest
import torch

from raylane.core.memory.header_slots import HeaderSlots
from raylane.core.memory.layout import address_of, size_class
from raylane.core.memory.receive_pool import HUGE_FROM_BYTES, HUGE_PAGE, BufferPool
from raylane.core.memory.sealed import map_segment, write_segment
from raylane.core.process import vm


def test_size_classes_waste_at_most_a_quarter() -> None:
    for nbytes in (1, 4096, 4097, 65536, 65537, 1_000_000, 100_000_000, 3 << 30):
        rounded = size_class(nbytes)
        assert nbytes <= rounded <= max(nbytes * 1.25, nbytes + 4096)
        assert size_class(rounded) == rounded


def test_buffers_come_back_after_the_last_view_of_them() -> None:
    pool = BufferPool(1 << 30)
    array = pool.take(1_000_000)
    address = address_of(array)
    tensor = torch.frombuffer(array, dtype=torch.uint8)
    view = tensor[10:20]
    del array, tensor
    gc.collect()
    pool.reclaim()
    assert pool.idle_bytes == 0
    assert pool.used_bytes == size_class(1_000_000)
    del view
    gc.collect()
    again = pool.take(1_000_000)
    assert address_of(again) == address
    assert pool.idle_bytes == 0


def test_numpy_keeps_a_buffer_too() -> None:
    pool = BufferPool(1 << 30)
    array = np.frombuffer(pool.take(100_000), dtype=np.uint8)
    pool.reclaim()
    assert pool.used_bytes > 0
    del array
    gc.collect()
    pool.reclaim()
    assert pool.used_bytes == 0


def test_idle_memory_is_bounded() -> None:
    pool = BufferPool(3 << 20)
    held = [pool.take(1 << 20) for _ in range(8)]
    assert pool.used_bytes == 8 << 20
    held.clear()
    gc.collect()
    pool.reclaim()
    assert pool.used_bytes == 0
    assert pool.idle_bytes == 3 << 20


def test_large_buffers_are_aligned_for_huge_pages() -> None:
    assert address_of(BufferPool(0).take(HUGE_FROM_BYTES + 1)) % HUGE_PAGE == 0


def test_many_threads_never_share_a_buffer() -> None:
    pool = BufferPool(1 << 26)
    wrong = []

    def work(mark: int) -> None:
        for _ in range(200):
            array = pool.take(70_000)
            ctypes.memset(array, mark, 70_000)
            if bytes(array[:100]) != bytes([mark]) * 100 or bytes(array[-100:]) != bytes([mark]) * 100:
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(i + 1,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    pool.reclaim()
    assert pool.used_bytes == 0


def test_header_slots_change_their_nonce_with_every_use() -> None:
    slots = HeaderSlots()
    slot, address, nonce = slots.open()
    assert slots.read(slot) == (nonce, False, False)
    slots.mark(slot, creator=True)
    assert slots.read(slot) == (nonce, True, False)
    assert int.from_bytes(ctypes.string_at(address, 8), "little") == nonce
    slots.close(slot)
    assert slots.read(slot) == (0, False, False)
    reused = slots.open()
    assert reused[:2] == (slot, address)
    assert reused[2] not in (0, nonce)
    opened = [slots.open() for _ in range(1000)]
    assert len({address for _, address, _ in opened}) == 1000


def test_a_segment_is_private_to_each_reader_and_sealed() -> None:
    fd = write_segment([memoryview(bytearray(range(256)) * 100)])
    (one,), (two,) = map_segment(fd, [25600]), map_segment(fd, [25600])
    one[0] = b"\xff"
    assert two[0] == b"\x00"
    with pytest.raises(PermissionError):
        os.write(fd, b"x")
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 10)
    os.close(fd)
    assert bytes(two[1:4]) == b"\x01\x02\x03"


def test_headers_stay_readable_after_their_store_has_gone() -> None:
    slots = HeaderSlots()
    slot, address, nonce = slots.open()
    assert ctypes.c_uint64.from_address(address).value == nonce
    slots.close(slot)
    del slots
    gc.collect()
    found = ctypes.create_string_buffer(b"x" * HeaderSlots.SIZE, HeaderSlots.SIZE)
    vm.read(os.getpid(), [(address, address_of(found), HeaderSlots.SIZE)])
    assert found.raw == bytes(HeaderSlots.SIZE)


def test_failed_allocation_counts_no_bytes_as_used() -> None:
    pool = BufferPool(1 << 20)
    with pytest.raises((OSError, OverflowError)):
        pool.take(1 << 60)
    assert pool.used_bytes == 0

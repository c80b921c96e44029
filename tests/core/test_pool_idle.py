"""Idle receive memory is given back to the system after a while, by a thread that ends with it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

from raylane.core.memory.receive_pool import BufferPool


def trimmers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "raylane-pool"]


def test_pool_unmaps_idle_memory_and_ends_its_thread(eventually: Callable[..., None]) -> None:
    pool = BufferPool(1 << 30, idle_s=0.1)
    lent, other = pool.take(1 << 20), pool.take(1 << 16)
    assert len(trimmers()) == 1
    del other
    gc.collect()
    eventually(lambda: pool.idle_bytes == 0 and pool.used_bytes == 1 << 20)
    # A lent buffer can come back at any time, so the thread still runs.
    assert len(trimmers()) == 1
    del lent
    gc.collect()
    eventually(lambda: not trimmers())
    assert (pool.idle_bytes, pool.used_bytes) == (0, 0)
    again = pool.take(1 << 20)
    assert len(trimmers()) == 1
    pool.close()
    assert not trimmers()
    del again


def test_pool_keeps_memory_that_is_used_again() -> None:
    pool = BufferPool(1 << 30, idle_s=1000)
    pool.take(1 << 20)
    gc.collect()
    left_s = pool.trim()
    assert left_s is not None
    assert 0 < left_s <= 1000
    assert pool.idle_bytes == 1 << 20
    pool.close()
    assert not trimmers()


def test_dropped_pool_ends_its_thread(eventually: Callable[..., None]) -> None:
    pool = BufferPool(1 << 30, idle_s=1000)
    pool.take(1 << 20)
    assert len(trimmers()) == 1
    del pool
    gc.collect()
    eventually(lambda: not trimmers())

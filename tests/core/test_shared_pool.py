"""Shared memory that is filled again: never while somebody reads it. With readers in other processes."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from raylane.core.memory.layout import segment_offsets
from raylane.core.memory.shared_pool import SharedPool, SharedSegment, map_shared

pytestmark = pytest.mark.processes
SIZE = 5 << 20
READER = """
import sys
from raylane.core.memory.shared_pool import map_shared
blocks = map_shared(sys.argv[1], [int(sys.argv[2])])
print(blocks[0][:3], flush=True)
blocks[0][:3] = b"own"
sys.stdin.readline()
print(blocks[0][:6], flush=True)
"""


def filled(pool: SharedPool, content: bytes) -> SharedSegment:
    segment = pool.take(SIZE)
    segment.memory[: len(content)] = content
    segment.release_to_readers()
    return segment


@pytest.fixture
def descriptors() -> object:
    before = set(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.mark.usefixtures("descriptors")
@pytest.mark.parametrize("end", ["exit", "kill"])
def test_segment_is_filled_again_only_without_readers(end: str) -> None:
    pool = SharedPool(1 << 30)
    segment = filled(pool, b"abcdef")
    command = [sys.executable, "-c", READER, segment.path, str(SIZE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdin is not None
        assert reader.stdout.readline() == "b'abc'\n"
        pool.give_back(segment)
        other = filled(pool, b"uvwxyz")
        assert other is not segment
        if end == "kill":
            reader.send_signal(signal.SIGKILL)
        else:
            reader.stdin.write("\n")
            reader.stdin.flush()
            assert reader.stdout.readline() == "b'owndef'\n"  # its own write, and what was there
        reader.wait()
    pool.give_back(other)
    assert {pool.take(SIZE).path for _ in range(2)} == {segment.path, other.path}
    segment.close()
    other.close()


@pytest.mark.usefixtures("descriptors")
def test_segment_that_is_being_filled_is_not_mapped() -> None:
    pool = SharedPool(1 << 30)
    segment = pool.take(SIZE)
    assert map_shared(segment.path, [SIZE]) is None
    segment.release_to_readers()
    blocks = map_shared(segment.path, [100, 200])
    assert blocks is not None
    assert [len(block) for block in blocks] == [100, 200]
    assert segment_offsets([100, 200])[1] <= SIZE
    assert not segment.lock_again()
    del blocks
    gc.collect()
    assert segment.lock_again()
    segment.release_to_readers()
    with pytest.raises(OSError, match="smaller than the value"):
        map_shared(segment.path, [1 << 30])
    segment.close()


@pytest.mark.usefixtures("descriptors")
def test_idle_segments_are_limited_and_fit_the_request() -> None:
    pool = SharedPool(3 * SIZE)
    segments = [filled(pool, b"x") for _ in range(4)]
    for segment in segments:
        pool.give_back(segment)
    assert pool.idle_bytes <= 3 * SIZE
    small = pool.take(4096)
    assert small.capacity == 4096
    small.close()
    pool.close()
    assert pool.idle_bytes == 0


@pytest.mark.usefixtures("descriptors")
def test_idle_segments_are_closed_after_a_while(eventually: Callable[..., None]) -> None:
    pool = SharedPool(1 << 30, idle_s=0.1)
    kept, segment = filled(pool, b"x"), filled(pool, b"abc")
    blocks = map_shared(segment.path, [SIZE])
    pool.give_back(segment)
    eventually(lambda: pool.idle_bytes == 0 and pool.nbytes == kept.capacity)
    assert blocks is not None
    assert blocks[0][:3] == b"abc"
    del segment
    pool.drop(kept)
    eventually(lambda: "raylane-shared" not in [thread.name for thread in threading.enumerate()])
    assert pool.nbytes == 0


@pytest.mark.usefixtures("descriptors")
def test_descriptor_of_another_segment_is_not_mapped() -> None:
    pool = SharedPool(1 << 30)
    dropped = filled(pool, b"old")
    pool.drop(dropped)
    other = filled(pool, b"new")
    assert other.path.partition("#")[0] == dropped.path.partition("#")[0]
    with pytest.raises(FileNotFoundError, match="another file by now"):
        map_shared(dropped.path, [SIZE])
    pool.drop(other)


def test_finalizer_may_give_back_while_its_thread_uses_the_pool() -> None:
    pool = SharedPool(1 << 30)
    segment = filled(pool, b"abc")
    with pool._lock:
        pool.give_back(segment)  # would wait for ever
    pool.reclaim()
    assert pool.idle_bytes == segment.capacity
    assert pool.take(SIZE) is segment
    pool.drop(segment)
    pool.close()

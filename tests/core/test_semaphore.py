"""Semaphores and segments between real processes."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from core.processes import Pipe, start
from raylane.core.memory import segment as segment_module
from raylane.core.memory.segment import Segment
from raylane.core.signals import semaphore
from raylane.core.signals.semaphore import SEMAPHORE_BYTES, block, init, post, try_wait, value


def made(*values: int) -> Segment:
    """A segment of semaphores with these values."""
    segment = Segment.make(4096)
    for index, count in enumerate(values):
        init(segment.address + index * SEMAPHORE_BYTES, count)
    return segment


def open_memfds() -> int:
    return sum("memfd:raylane" in _target(link) for link in Path("/proc/self/fd").iterdir())


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:raylane")


# Semaphores


def test_semaphore_post_is_taken_once() -> None:
    segment = made(0, 2)
    one, two = segment.address, segment.address + SEMAPHORE_BYTES
    assert try_wait(one) == -1
    assert (post(one), value(one), try_wait(one), try_wait(one)) == (0, 1, 0, -1)
    assert (value(two), try_wait(two), try_wait(two), try_wait(two)) == (2, 0, 0, -1)
    assert (value(one), value(two)) == (0, 0)


def test_block_takes_one_or_says_that_there_was_none() -> None:
    segment = made(1)
    assert block(segment.address, 0)
    assert not block(segment.address, 0)
    assert not block(segment.address, 0.01)
    assert not block(segment.address, -1)  # a deadline that has passed
    assert value(segment.address) == 0


def test_block_sleeps_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    segment, asked = made(0), []
    monkeypatch.setattr(semaphore, "_wait_until", lambda address, at: asked.append(at) or -1)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    for timeout_s in (0.25, 1.0, 60.0, float("inf")):
        assert not block(segment.address, timeout_s)
    assert asked == [100.25, 101.0, 101.0, 101.0]  # at least once a second its caller looks up


@pytest.mark.parametrize("at", [0.0, 12.0, 3.999999999, 1e6 + 0.1, 1.5])
def test_a_time_becomes_seconds_and_nanoseconds(at: float) -> None:
    found = semaphore._timespec(at)
    assert found.seconds == int(at)
    assert 0 <= found.nanoseconds < 1_000_000_000
    assert found.seconds + found.nanoseconds / 1e9 == pytest.approx(at, abs=1e-8)


def test_block_lets_other_threads_run() -> None:
    segment = made(0)
    thread = threading.Thread(target=post, args=(segment.address,))
    thread.start()
    while not block(segment.address):  # could not be posted if the interpreter's lock were held
        pass
    thread.join()


def _answer(pipe: Pipe, path: str, count: int) -> int:
    segment = Segment.open(path)
    for _ in range(count):
        while not block(segment.address):
            pass
        post(segment.address + SEMAPHORE_BYTES)
    return value(segment.address)


@pytest.mark.processes
def test_two_processes_wake_each_other() -> None:
    segment = made(0, 0)
    child = start(_answer, segment.path, 100)
    for _ in range(100):
        post(segment.address)
        while not block(segment.address + SEMAPHORE_BYTES):
            pass
    assert child.result() == 0


def _take_all(pipe: Pipe, path: str) -> int:
    segment, taken = Segment.open(path), 0
    while not try_wait(segment.address) or block(segment.address, 0.05):
        taken += 1
    return taken


@pytest.mark.processes
def test_several_takers_share_what_is_there_and_lose_nothing() -> None:
    segment = made(5000)
    children = [start(_take_all, segment.path) for _ in range(3)]
    assert sum(child.result() for child in children) == 5000


def test_a_signal_ends_a_wait_so_that_its_handler_runs() -> None:
    segment, seen = made(0), []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append("handled"))
    main = threading.main_thread().ident
    assert main is not None
    stop = threading.Event()

    def disturb() -> None:
        while not stop.wait(0.005):
            signal.pthread_kill(main, signal.SIGUSR1)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        start_s = time.monotonic()
        assert not block(segment.address)
        assert seen
        assert time.monotonic() - start_s < 1  # it came back before its time
    finally:
        stop.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)


def _block_for_ever(segment: Segment) -> None:
    while True:
        block(segment.address)


def test_ctrl_c_ends_a_wait() -> None:
    segment, main = made(0), threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.02, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        _block_for_ever(segment)
    timer.join()


SLOTS, MESSAGES = 8, 100_000


def _consume(pipe: Pipe, path: str) -> int:
    """Reads numbers out of a ring of words and counts those that are not what they should be."""
    segment = Segment.open(path)
    words = (ctypes.c_uint64 * (2 * SLOTS)).from_buffer(segment.memory, 4096)
    full, free, wrong = segment.address, segment.address + SEMAPHORE_BYTES, 0
    for number in range(MESSAGES):
        while try_wait(full) and not block(full):
            pass
        at = number % SLOTS * 2
        wrong += words[at] != number or words[at + 1] != ~number & (1 << 64) - 1
        post(free)
    return wrong


@pytest.mark.claim("graphs", "memory that was written before a semaphore's post is seen after the wait")
@pytest.mark.processes
def test_memory_written_before_a_post_is_seen_after_the_wait() -> None:
    segment = Segment.make(8192)
    init(segment.address)
    init(segment.address + SEMAPHORE_BYTES, SLOTS)
    words = (ctypes.c_uint64 * (2 * SLOTS)).from_buffer(segment.memory, 4096)
    full, free = segment.address, segment.address + SEMAPHORE_BYTES
    child = start(_consume, segment.path)
    for number in range(MESSAGES):
        while try_wait(free) and not block(free):
            pass
        at = number % SLOTS * 2
        words[at], words[at + 1] = number, ~number & (1 << 64) - 1
        post(full)
    assert child.result() == 0


# Segments


@pytest.mark.processes
def test_a_segment_lives_until_its_last_mapping() -> None:
    before, mapped = open_memfds(), mappings()
    segment = Segment.make(4096)
    assert (segment.nbytes, bytes(segment.view[:4088])) == (4096, bytes(4088))  # its key lies in the rest
    assert open_memfds() == before + 1
    other = Segment.open(segment.path)
    assert (other.nbytes, other.fd) == (4096, None)
    assert open_memfds() == before + 1  # whoever opens it keeps no descriptor
    other.view[7] = 5
    assert segment.view[7] == 5
    segment.close_fd()
    segment.close_fd()
    assert open_memfds() == before
    with pytest.raises(FileNotFoundError):
        Segment.open(segment.path)
    view = other.view[7:8]
    del segment, other
    gc.collect()
    assert (view[0], mappings()) == (5, mapped + 1)  # a view keeps the memory
    del view
    assert (open_memfds(), mappings()) == (before, mapped)


def test_a_path_that_now_means_another_segment_is_refused() -> None:
    segment = Segment.make(4096)
    fd = segment.fd
    segment.close_fd()
    other = Segment.make(4096)
    assert other.fd == fd  # the kernel gives out the lowest free number
    with pytest.raises(FileNotFoundError, match="another file by now"):
        Segment.open(segment.path)
    assert Segment.open(other.path).nbytes == 4096


@pytest.mark.claim("security", "no process can shrink a shared segment, or offer another file in its place")
def test_segment_size_cannot_be_changed_by_a_peer() -> None:
    """A peer that shortened it would end every reader with SIGBUS."""
    segment = Segment.make(8192)
    fd = os.open(segment.path.partition("#")[0], os.O_RDWR)
    for size in (0, 4096, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)


@pytest.mark.claim("security", "no process can shrink a shared segment, or offer another file in its place")
@pytest.mark.parametrize("how", ["file", "other memfd", "unsealed"])
def test_open_refuses_what_is_no_segment(tmp_path: Path, how: str) -> None:
    if how == "file":
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    else:
        fd = os.memfd_create("raylane" if how == "unsealed" else "other", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 8192)  # all zero
    with pytest.raises(FileNotFoundError):
        Segment.open(f"/proc/{os.getpid()}/fd/{fd}#0")
    os.close(fd)


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "/proc/1/fd/3", "/proc/1/fd/3#", "/proc/1/fd/3#zz", "../x#1", "/proc/1/fd/../mem#1"]
)
def test_open_refuses_a_malformed_path(path: str) -> None:
    with pytest.raises(OSError, match="is no path of a segment"):
        Segment.open(path)


def test_a_segment_closes_its_descriptor_when_it_is_garbage() -> None:
    before = open_memfds()
    for _ in range(50):
        Segment.make(4096)
    assert open_memfds() == before


def test_a_mapping_needs_no_descriptor() -> None:
    gc.collect()  # mappings of earlier tests
    segment, mapped, descriptors = Segment.make(4096), mappings(), os.listdir("/proc/self/fd")
    kept = [Segment.open(segment.path).view for _ in range(200)]
    assert os.listdir("/proc/self/fd") == descriptors
    assert mappings() == mapped + 200
    kept.clear()
    assert mappings() == mapped


def test_discarded_pages_are_free_although_they_are_mapped() -> None:
    segment = Segment.make(1 << 20)
    other = Segment.open(segment.path)
    segment.view[:] = b"x" * segment.nbytes
    assert segment.fd is not None
    assert os.fstat(segment.fd).st_blocks * 512 == 1 << 20
    segment.discard()
    assert os.fstat(segment.fd).st_blocks == 0
    assert bytes(other.view[:3]) == b"\0\0\0"
    other.view[5000] = 1
    assert segment.view[5000] == 1  # still one memory


def _hold(pipe: Pipe, path: str) -> None:
    segment = Segment.open(path)
    segment.view[:5] = b"hello"
    pipe.send("written")
    pipe.receive()


@pytest.mark.processes
def test_memory_outlives_the_process_that_wrote_to_it() -> None:
    segment = Segment.make(4096)
    child = start(_hold, segment.path)
    assert child.receive() == "written"
    child.kill()
    assert bytes(segment.view[:5]) == b"hello"


def _lend(pipe: Pipe) -> None:
    segment = Segment.make(4096)
    segment.view[:5] = b"child"
    pipe.send(segment.path)
    pipe.receive()


@pytest.mark.processes
def test_memory_outlives_the_process_that_made_it() -> None:
    child = start(_lend)
    path = child.receive()
    segment = Segment.open(path)
    child.kill()
    assert bytes(segment.view[:5]) == b"child"
    with pytest.raises(FileNotFoundError):
        Segment.open(path)


@pytest.mark.processes
def test_a_failed_mapping_closes_its_descriptor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    close = os.close
    monkeypatch.setattr("os.close", lambda fd: (closed.append(fd), close(fd)))
    before = open_memfds()
    null = os.open("/dev/null", os.O_RDWR)
    path = f"/proc/{os.getpid()}/fd/{null}#0"
    for make in (lambda: Segment.make(0), lambda: Segment.make(1 << 60), lambda: Segment.open(path)):
        closed.clear()
        with pytest.raises((ValueError, OSError, OverflowError)):
            make()
        gc.collect()
        assert len(closed) == 1  # a second time it could be the descriptor of somebody else
    close(null)
    assert open_memfds() == before


@pytest.mark.processes
def test_segments_left_at_exit_print_nothing() -> None:
    code = """
from raylane.core.memory import segment as segment_module
from raylane.core.memory.segment import Segment
from raylane.core.signals.semaphore import init
kept = Segment.make(4096)
init(kept.address)
other = Segment.open(kept.path)
view = kept.view[:3]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_segment_at_interpreter_end_closes_its_descriptor(monkeypatch) -> None:
    """Python has emptied the modules by then: an ignored exception was printed at the end of a driver."""
    segment = Segment.make(4096)
    fd = segment.fd
    monkeypatch.setattr(segment_module, "os", None)
    segment.__del__()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    segment.__del__()

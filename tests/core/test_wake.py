"""An eventfd fetched out of another process."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator

import pytest

from core.processes import Pipe, start
from raylane.core.process.place import here
from raylane.core.signals import wake

NOBODY = 65534


def readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


@pytest.fixture
def event() -> Iterator[int]:
    fd = wake.make()
    yield fd
    os.close(fd)


def _ring(pipe: Pipe, pid: int, fd: int, times: int) -> bool:
    got = wake.fetch(pid, fd)
    inherited = os.get_inheritable(got)
    for _ in range(times):
        os.eventfd_write(got, 1)
    os.close(got)
    return inherited


@pytest.mark.processes
def test_another_process_makes_it_readable_and_drain_forgets(event: int) -> None:
    assert not readable(event)
    assert not os.get_inheritable(event)
    inherited = start(_ring, os.getpid(), event, 3).result()
    assert not inherited  # a program that the peer starts does not get it
    assert readable(event)
    wake.drain(event)
    assert not readable(event)
    wake.drain(event)  # nothing there: nothing happens, and nobody waits
    assert not readable(event)


def test_a_process_may_fetch_its_own(event: int) -> None:
    got = wake.fetch(os.getpid(), event)
    assert got != event
    os.eventfd_write(got, 1)
    os.close(got)
    assert readable(event)


@pytest.mark.processes
def test_fetch_from_a_process_that_does_not_exist_fails(event: int) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=f"pidfd_getfd of process {os.getpid()}: Bad file descriptor"):
        wake.fetch(os.getpid(), 1 << 20)
    child = start(_ring, os.getpid(), event, 0)
    child.result()
    with pytest.raises(ProcessLookupError):
        wake.fetch(child.pid, 0)
    assert os.listdir("/proc/self/fd") == before


def _as_somebody_else(pipe: Pipe, pid: int, fd: int) -> str:
    if os.getuid() == 0:
        os.setuid(NOBODY)
    else:
        pid, fd = 1, 0  # the first process belongs to root
    before = os.listdir("/proc/self/fd")
    try:
        wake.fetch(pid, fd)
    except PermissionError as error:
        assert os.listdir("/proc/self/fd") == before
        return str(error)
    return "allowed"


@pytest.mark.processes
def test_the_kernel_may_forbid_it(event: int) -> None:
    assert "Operation not permitted" in start(_as_somebody_else, os.getpid(), event).result()


@pytest.mark.processes
def test_a_descriptor_outlives_its_owner() -> None:
    child = start(_own)
    fd = child.receive()
    child.receive()
    got = wake.fetch(child.pid, fd)
    child.kill()
    os.eventfd_write(got, 1)  # nobody reads it any more, and nothing goes wrong
    assert readable(got)
    os.close(got)


@pytest.mark.processes
def test_users_share_one_borrowed_descriptor() -> None:
    child = start(_own)
    fd, owner = child.receive(), child.receive()
    got = wake.borrow(owner, fd)
    assert wake.borrow(owner, fd) == got
    wake.give_back(owner, fd)
    os.eventfd_write(got, 1)
    assert readable(got)
    wake.give_back(owner, fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(got)
    child.kill()
    with pytest.raises(ProcessLookupError):
        wake.borrow(owner, fd)
    assert not wake._borrowed


@pytest.mark.processes
def test_a_forked_child_has_an_eventfd_of_its_own() -> None:
    assert start(_forks).result() == "closed, another"


def _forks(pipe: Pipe) -> str:
    fd = wake.own()
    assert wake.own() == fd
    inode = os.readlink(f"/proc/self/fd/{fd}")
    reading, writing = os.pipe()
    if not os.fork():
        try:
            closed = not os.path.exists(f"/proc/self/fd/{fd}")
            os.eventfd_write(wake.own(), 1)
            os.write(writing, b"closed, another" if closed else b"open")
        finally:
            os._exit(0)
    os.wait()
    assert inode == os.readlink(f"/proc/self/fd/{fd}")
    return "written by the child" if readable(fd) else os.read(reading, 100).decode()


def _own(pipe: Pipe) -> None:
    pipe.send(wake.own())
    pipe.send(here())
    pipe.receive()

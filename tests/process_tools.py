"""Processes of tests: stopping one, and those that belong to this test process."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path


def stop(pid: int, within_s: float = 30.0) -> None:
    """Stop a process, and wait until all of its threads have stopped: the signal alone takes effect later."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + within_s
    while True:
        states = [
            (task / "stat").read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").iterdir()
        ]
        if set(states) == {"T"}:
            return
        assert time.monotonic() < deadline, states
        time.sleep(0.001)


def parents() -> dict[int, int]:
    """Return the pid of the parent of each process."""
    pids = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                pids[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return pids


def descendants() -> set[int]:
    """Return the pids of this process and of all processes that it has started, such as its Ray with all workers."""
    parent_of = parents()
    family, added = {os.getpid()}, True
    while added:
        more = {pid for pid, parent in parent_of.items() if parent in family} - family
        family |= more
        added = bool(more)
    return family


def sockets(pids: Iterable[int]) -> set[str]:
    """Return the inodes of the sockets that processes have open."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for descriptor in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    target = os.readlink(descriptor.path)
                    if target.startswith("socket:["):
                        inodes.add(target[8:-1])
    return inodes

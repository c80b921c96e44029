"""Where a process is: enough to tell whether two processes are the same, share a host, or may read one another.

Facts are gathered once per process by `here`; comparing them is pure. Called by the chooser and by every ticket.
"""

from __future__ import annotations

import functools
import os
import socket

import msgspec


class Place(msgspec.Struct, frozen=True, array_like=True):
    """One process, as another process needs to know it. A bare pid is never trusted: it is reused, and means nothing
    in another pid namespace; `start_ticks` (field 22 of proc_pid_stat(5)) and `boot_id` complete it."""

    boot_id: str
    """/proc/sys/kernel/random/boot_id: one value per booted kernel, the same in all its containers."""
    pid_namespace: int
    """Inode of /proc/self/ns/pid: pids can be compared only where it is the same."""
    net_namespace: int
    """Inode of /proc/self/ns/net: abstract Unix sockets and loopback are shared only where it is the same."""
    uid: int
    pid: int
    start_ticks: int
    hostname: str

    def same_process(self, other: Place) -> bool:
        return (self.boot_id, self.pid_namespace, self.pid, self.start_ticks) == (
            other.boot_id,
            other.pid_namespace,
            other.pid,
            other.start_ticks,
        )

    def same_host(self, other: Place) -> bool:
        return self.boot_id == other.boot_id

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.hostname}"


def start_ticks(pid: int) -> int | None:
    """When `pid` started, in clock ticks since boot; None when there is no such process, or only its zombie. OSError if
    that cannot be told, as without a free descriptor."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()  # the command name may hold spaces and brackets
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def alive(place: Place) -> bool:
    """Return False if that very process has ended; True if it runs, or this one cannot tell. Only for a place in this
    pid namespace."""
    try:
        return start_ticks(place.pid) == place.start_ticks
    except OSError:
        return True


def known_dead(there: Place, here: Place) -> bool:
    """Return True if a process has ended, as far as that can be seen from `here`; False if it cannot be seen."""
    return there.same_host(here) and there.pid_namespace == here.pid_namespace and not alive(there)


def here() -> Place:
    """This process. Cheap after the first call, and right again in a forked child."""
    return _here(os.getpid())


@functools.lru_cache(maxsize=1)
def _here(pid: int) -> Place:
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot_id = file.read().strip()
    ticks = start_ticks(pid)
    if ticks is None:
        raise OSError(f"cannot read /proc/{pid}/stat: raylane needs /proc mounted for this process")
    return Place(
        boot_id=boot_id,
        pid_namespace=os.stat("/proc/self/ns/pid").st_ino,
        net_namespace=os.stat("/proc/self/ns/net").st_ino,
        uid=os.geteuid(),
        pid=pid,
        start_ticks=ticks,
        hostname=socket.gethostname(),
    )

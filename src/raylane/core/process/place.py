"""Identity of a process: enough to decide whether two processes are the same, share a host, or may read one another.

`here` collects the facts once per process, and the comparisons are pure. Used by the chooser and by every ticket.
"""

from __future__ import annotations

import functools
import os
import socket
import struct

import msgspec


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Identity of one process, valid across hosts and containers.

    A pid alone identifies nothing: the kernel reuses pids, and each pid namespace has its own. Therefore
    `start_ticks` (field 22 of proc_pid_stat(5)) and `boot_id` complete it.
    """

    boot_id: str
    """Content of /proc/sys/kernel/random/boot_id: one value per booted kernel, the same in all its containers."""
    pid_namespace: int
    """Inode of /proc/self/ns/pid; pids are comparable only between processes with equal inodes."""
    net_namespace: int
    """Inode of /proc/self/ns/net; abstract Unix sockets and loopback are shared only where it is equal."""
    uid: int
    pid: int
    start_ticks: int
    hostname: str

    def same_process(self, other: Place) -> bool:
        """Return True if both places are the same process."""
        return (self.boot_id, self.pid_namespace, self.pid, self.start_ticks) == (
            other.boot_id,
            other.pid_namespace,
            other.pid,
            other.start_ticks,
        )

    def same_host(self, other: Place) -> bool:
        """Return True if both processes run on the same kernel, in whatever containers."""
        return self.boot_id == other.boot_id

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.hostname}"


_PF_EXITING = 0x4
"""Flag of a process that has begun to end (flags in proc(5)). Source: include/linux/sched.h."""


def _stat_of(pid: int) -> list[bytes] | None:
    """Return the fields of /proc/PID/stat from the state on; None if the process has ended (or is a zombie)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()  # the command name may contain spaces and brackets
    except (FileNotFoundError, ProcessLookupError):
        return None
    # A zombie has released its memory and its sockets, so it counts as ended although its entry exists.
    return None if fields[0] in (b"Z", b"X") else fields


def start_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot, or None if it has ended (or is a zombie).

    OSError if the time cannot be read, for example because this process has no free descriptor.
    """
    fields = _stat_of(pid)
    return None if fields is None else int(fields[19])


def keeps_memory(pid: int, ticks: int) -> bool:
    """Return True if the process with this start time runs: one that has begun to end may have given memory back."""
    fields = _stat_of(pid)
    return fields is not None and int(fields[19]) == ticks and not int(fields[6]) & _PF_EXITING


def alive(place: Place) -> bool:
    """Return False if a process of this pid namespace has certainly ended, True if it runs or its state is unknown."""
    try:
        return start_ticks(place.pid) == place.start_ticks
    except OSError:
        # Callers end connections and actors on False, so a lack of descriptors in this process must not look like it.
        return True


def known_dead(there: Place, this_process: Place) -> bool:
    """Return True if the process at `there` has certainly ended; False also if `this_process` cannot see it."""
    return there.same_host(this_process) and there.pid_namespace == this_process.pid_namespace and not alive(there)


def here() -> Place:
    """Return the place of this process. Cheap after the first call, and correct in a forked child."""
    return _here(os.getpid())  # the pid is the cache key, so a forked child computes its own place


@functools.lru_cache(maxsize=1)
def _here(pid: int) -> Place:
    # A host name would not do: containers of one host have different names, and hosts can share a name.
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot_id = file.read().strip()
    ticks = start_ticks(pid)
    if ticks is None:
        raise OSError(f"cannot read /proc/{pid}/stat. raylane needs /proc mounted for this process")
    return Place(
        boot_id=boot_id,
        pid_namespace=os.stat("/proc/self/ns/pid").st_ino,
        net_namespace=os.stat("/proc/self/ns/net").st_ino,
        uid=os.geteuid(),
        pid=pid,
        start_ticks=ticks,
        hostname=socket.gethostname(),
    )


def uid_of(sock: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket (SO_PEERCRED, unix(7))."""
    uid: int = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
    return uid

"""Collectives of torch.distributed in which this process waits for a rank that is gone: they are ended from outside.

gloo has no call for this: its own `abort` waits for the operation. So its connections are shut down. Each process group
of gloo has a thread that waits in `epoll_wait`; /proc says for which epoll instance, and which sockets are in it:

    thread gloo_tcp_loop    /proc/self/task/TID/syscall   epoll_wait(19, ..)
    epoll instance 19       /proc/self/fdinfo/19          tfd: 17, 20, 21     connections to all other ranks

The operation then raises "Connection closed by peer" in the thread that waits, and so do all later ones of the group.
NCCL's communicators are aborted. Both leave process groups that can be destroyed.

Tested with gloo of torch 2.13; NCCL's part was not run.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from typing import Any

LOOP_NAME = "gloo_tcp_loop"
"""Name of gloo's threads. Source: torch 2.13."""
EPOLL_WAITS = {"x86_64": ("232", "281", "441"), "aarch64": ("22", "441")}
"""Numbers of epoll_wait, epoll_pwait and epoll_pwait2 by machine. Source: Linux, asm/unistd.h."""
ATTEMPTS, PAUSE_S = 20, 0.005
"""Looks at a thread until it waits, and seconds between them: it handles an event in between."""


def end_collectives() -> int:
    """End all collectives of this process, and make later ones of its process groups raise. Return how many were cut.

    Does nothing without torch.distributed. Process groups have to be made anew afterwards.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0
    return _abort_nccl(distributed) + sum(map(_shut_down, gloo_sockets()))


def leave_process_groups() -> None:
    """Destroy all process groups of this process, if there are any, so that new ones can be made."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def gloo_sockets() -> set[int]:
    """Return the descriptors of the connections of all process groups of gloo in this process."""
    sockets = set[int]()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # a thread that has ended
            if _read(f"/proc/self/task/{task}/comm").strip() == LOOP_NAME:
                lines = _read(f"/proc/self/fdinfo/{_epoll_of(task)}").splitlines()
                sockets.update(int(line.split()[1]) for line in lines if line.startswith("tfd:"))
    return sockets


def _epoll_of(task: str) -> int:
    """Return the descriptor of the epoll instance for which a thread waits. OSError if it does not wait."""
    for _ in range(ATTEMPTS):
        number, *arguments = _read(f"/proc/self/task/{task}/syscall").split()
        if number in EPOLL_WAITS.get(os.uname().machine, ()):
            return int(arguments[0], 16)
        time.sleep(PAUSE_S)
    raise OSError(f"thread {task} does not wait for events")


def _shut_down(fd: int) -> int:
    """Shut down a connection of gloo, whose descriptor stays open; return 1 if it was one."""
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return 0  # gloo ends the process if it cannot accept connections any more
            connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # not connected any more, or another kind of file
        return 0
    return 1


def _abort_nccl(distributed: Any) -> int:
    """Abort the communicators of all process groups of NCCL; return their number."""
    if not distributed.is_nccl_available():
        return 0
    groups = [group for group in distributed.distributed_c10d._world.pg_map if _is_nccl(distributed, group)]
    for group in groups:
        group.abort()
    return len(groups)


def _is_nccl(distributed: Any, group: Any) -> bool:
    import torch

    try:
        return isinstance(group._get_backend(torch.device("cuda")), distributed.ProcessGroupNCCL)
    except RuntimeError:  # it has no backend for CUDA
        return False


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()

"""Notices that a process of this host has ended: one thread for all graphs of this process, asleep until one does.

A pidfd becomes readable when its process ends, 6-11 ms after a SIGKILL (most of it the kernel's own work).
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable

log = logging.getLogger("raylane.graph")


class Watcher:
    """Runs a thread while there is something to watch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards everything
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._thread: threading.Thread | None = None
        self._nudge: int | None = None

    def watch(self, pid: int, ended: Callable[[], None]) -> int:
        """Call `ended` once, on the watcher's thread, when process `pid` ends. Returns what `forget` takes.
        ProcessLookupError if there is no such process."""
        fd = os.pidfd_open(pid)
        with self._lock:
            self._callbacks[fd] = ended
            if self._thread is None:
                self._nudge = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                self._thread = threading.Thread(
                    target=self._run, args=(self._nudge,), name="raylane-watch", daemon=True
                )
                self._thread.start()
            elif self._nudge is not None:
                os.eventfd_write(self._nudge, 1)
        return fd

    def forget(self, fd: int) -> None:
        """Watch this no more. Nothing happens if it has been forgotten already."""
        with self._lock:
            if self._callbacks.pop(fd, None) is not None:
                os.close(fd)
            if self._nudge is not None:
                os.eventfd_write(self._nudge, 1)

    def _run(self, nudge: int) -> None:
        while True:
            poll = select.poll()
            poll.register(nudge, select.POLLIN)
            with self._lock:
                if not self._callbacks:
                    os.close(nudge)
                    self._thread = self._nudge = None
                    return
                for fd in self._callbacks:
                    poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll():
                if fd == nudge:
                    os.eventfd_read(nudge)
                    continue
                self._ended(fd)

    def _ended(self, fd: int) -> None:
        with self._lock:
            ended = self._callbacks.pop(fd, None)
            if ended is None:
                return
            os.close(fd)
        try:
            ended()
        except Exception:
            log.exception("after the end of a process")


watcher = Watcher()

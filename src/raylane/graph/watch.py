"""Notices that a process of this host has ended, or a connection to one of another: one thread for all graphs of this
process, asleep until it happens.

A pidfd becomes readable when its process ends, 6-11 ms after a SIGKILL (most of it the kernel's own work). The end of a
connection is seen without reading from it (POLLRDHUP), so that another thread may.
"""

from __future__ import annotations

import collections
import logging
import os
import select
import socket
import threading
from collections.abc import Callable

log = logging.getLogger("raylane.graph")


class Watch:
    """One process or connection that is watched. `forget` may be called from anywhere, a finalizer included; it never
    waits."""

    __slots__ = ("_watcher", "ended", "events", "fd")

    def __init__(self, watcher: Watcher, fd: int, events: int, ended: Callable[[], None]) -> None:
        self._watcher = watcher
        self.fd = fd
        self.events = events
        self.ended = ended

    def forget(self) -> None:
        """Watch it no more. Nothing happens if it has ended or was forgotten already."""
        self._watcher.forget(self)


class Watcher:
    """Runs a thread while there is something to watch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _thread and _nudge; _watched belongs to the thread
        self._arriving: collections.deque[Watch] = collections.deque()
        self._forgotten: collections.deque[Watch] = collections.deque()
        self._watched: dict[int, Watch] = {}
        self._thread: threading.Thread | None = None
        self._nudge: int | None = None
        """Wakes the thread. Made once and never closed: a finalizer may be about to write to it at any time, and would
        write into whatever had got its number."""

    def __len__(self) -> int:
        return len(self._watched) + len(self._arriving)

    def watch(self, pid: int, ended: Callable[[], None]) -> Watch:
        """Call `ended` once, on the watcher's thread, when process `pid` ends. ProcessLookupError if there is none."""
        return self._add(Watch(self, os.pidfd_open(pid), select.POLLIN, ended))

    def watch_connection(self, sock: socket.socket, broken: Callable[[], None]) -> Watch:
        """Call `broken` once, on the watcher's thread, when either side has ended the connection, or the kernel has.
        Watches a copy of the descriptor: only `shutdown` ends the connection while it is watched."""
        return self._add(Watch(self, os.dup(sock.fileno()), select.POLLRDHUP, broken))

    def _add(self, found: Watch) -> Watch:
        with self._lock:
            self._arriving.append(found)
            if self._nudge is None:
                self._nudge = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            if self._thread is None:
                thread = threading.Thread(target=self._run, args=(self._nudge,), name="raylane-watch", daemon=True)
                thread.start()
                self._thread = thread
        self._wake()
        return found

    def forget(self, watch: Watch) -> None:
        self._forgotten.append(watch)
        self._wake()

    def _wake(self) -> None:
        if self._nudge is not None:
            os.eventfd_write(self._nudge, 1)

    def _run(self, nudge: int) -> None:
        poll = select.poll()
        poll.register(nudge, select.POLLIN)
        while self._settle(poll):
            for fd, _ in poll.poll():
                if fd == nudge:
                    os.eventfd_read(nudge)
                elif fd in self._watched:
                    self._ended(poll, self._watched[fd])

    def _settle(self, poll: select.poll) -> bool:
        """Let in and let go what has come up. False, and the thread is gone for the next `watch`, if none is left."""
        with self._lock:
            while self._arriving:
                watch = self._arriving.popleft()
                self._watched[watch.fd] = watch
                poll.register(watch.fd, watch.events)
            while self._forgotten:
                self._let_go(poll, self._forgotten.popleft())
            if self._watched:
                return True
            self._thread = None
            return False

    def _let_go(self, poll: select.poll, watch: Watch) -> bool:
        if self._watched.get(watch.fd) is not watch:
            return False
        del self._watched[watch.fd]
        poll.unregister(watch.fd)
        os.close(watch.fd)
        return True

    def _ended(self, poll: select.poll, watch: Watch) -> None:
        ended, watch.ended = watch.ended, _nothing  # whoever keeps the watch does not keep what its end was told to
        if not self._let_go(poll, watch):
            return
        try:
            ended()
        except Exception:
            log.exception("after the end of a process or connection")


def _nothing() -> None:
    return


watcher = Watcher()

# A forked child has no such thread, and its copies of the pidfds are of no use to it.
os.register_at_fork(after_in_child=watcher.__init__)  # type: ignore[misc]

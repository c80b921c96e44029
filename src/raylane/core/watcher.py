"""Watcher of processes and connections on this host: one thread for all of this process, asleep until one of them ends.

    any thread:      watch() / forget()  -->  queue + eventfd  -->  watcher thread changes its poll set
    watcher thread:  poll() returns the descriptor of what has ended  -->  calls back

A pidfd becomes readable when its process ends, 6-11 ms after a SIGKILL (mostly the kernel's own work). The end of a
connection is noticed without reading from it (POLLRDHUP), so that another thread may read.
"""

from __future__ import annotations

import collections
import logging
import os
import select
import socket
import threading
from collections.abc import Callable

log = logging.getLogger("raylane.core")


class Watch:
    """One process or connection that is watched."""

    __slots__ = ("_watcher", "events", "fd", "on_end")

    def __init__(self, watcher: Watcher, fd: int, events: int, on_end: Callable[[], None]) -> None:
        self._watcher = watcher
        self.fd = fd
        self.events = events
        self.on_end = on_end

    def forget(self) -> None:
        """Stop watching. Does nothing if the end was noticed or this was called before.

        Never waits, so it may be called from anywhere, also from a finalizer.
        """
        self._watcher.forget(self)


class Watcher:
    """Watcher whose thread runs while there is something to watch. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _thread and _eventfd; _watched belongs to the thread
        self._arriving: collections.deque[Watch] = collections.deque()
        self._forgotten: collections.deque[Watch] = collections.deque()
        self._watched: dict[int, Watch] = {}
        self._thread: threading.Thread | None = None
        self._eventfd: int | None = None
        """Eventfd that wakes the thread. Created once and never closed.

        A finalizer may be about to write to it at any time, and would write into the next file with the same number.
        """

    def __len__(self) -> int:
        return len(self._watched) + len(self._arriving)

    def watch(self, pid: int, on_end: Callable[[], None]) -> Watch:
        """Call `on_end` once, on the watcher's thread, when process `pid` ends. ProcessLookupError if there is none."""
        return self._add(Watch(self, os.pidfd_open(pid), select.POLLIN, on_end))

    def watch_connection(self, sock: socket.socket, on_end: Callable[[], None]) -> Watch:
        """Call `on_end` once, on the watcher's thread, when either side or the kernel has ended the connection.

        A copy of the descriptor is watched: until it is forgotten only `shutdown` ends the connection, not `close`.
        """
        return self._add(Watch(self, os.dup(sock.fileno()), select.POLLRDHUP, on_end))

    def _add(self, watch: Watch) -> Watch:
        with self._lock:
            self._arriving.append(watch)
            if self._eventfd is None:
                self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            if self._thread is None:
                thread = threading.Thread(target=self._run, args=(self._eventfd,), name="raylane-watch", daemon=True)
                thread.start()
                self._thread = thread
        self._wake()
        return watch

    def forget(self, watch: Watch) -> None:
        """Stop watching. Only queued here: a finalizer may run while this very thread holds the lock."""
        self._forgotten.append(watch)
        self._wake()

    def _wake(self) -> None:
        if self._eventfd is not None:
            os.eventfd_write(self._eventfd, 1)

    def _run(self, eventfd: int) -> None:
        poll = select.poll()
        poll.register(eventfd, select.POLLIN)
        while self._apply_changes(poll):
            for fd, _ in poll.poll():
                if fd == eventfd:
                    os.eventfd_read(eventfd)
                elif fd in self._watched:
                    self._end(poll, self._watched[fd])

    def _apply_changes(self, poll: select.poll) -> bool:
        """Add and remove queued watches. Return False if none is left: then the next `watch` starts a new thread."""
        with self._lock:
            # Arrivals first: a watch may have been forgotten before the thread saw it.
            while self._arriving:
                watch = self._arriving.popleft()
                self._watched[watch.fd] = watch
                poll.register(watch.fd, watch.events)
            while self._forgotten:
                self._remove(poll, self._forgotten.popleft())
            if self._watched:
                return True
            self._thread = None
            return False

    def _remove(self, poll: select.poll, watch: Watch) -> bool:
        if self._watched.get(watch.fd) is not watch:  # removed before; the number may belong to another watch now
            return False
        del self._watched[watch.fd]
        poll.unregister(watch.fd)
        os.close(watch.fd)
        return True

    def _end(self, poll: select.poll, watch: Watch) -> None:
        # The owner may keep the watch; it must not keep the objects that the callback refers to.
        on_end, watch.on_end = watch.on_end, _do_nothing
        if not self._remove(poll, watch):
            return
        try:
            on_end()
        except Exception:
            log.exception("callback after the end of a process or connection")


def _do_nothing() -> None:
    return


watcher = Watcher()
"""Watcher of this process."""

# A forked child has no watcher thread, and its copies of the pidfds are of no use to it.
os.register_at_fork(after_in_child=watcher.__init__)  # type: ignore[misc]

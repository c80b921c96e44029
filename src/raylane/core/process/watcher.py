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

from raylane.core.process.place import start_ticks

log = logging.getLogger("raylane.core")


class _WatchedDescriptor:
    """Descriptor of one process or connection, shared by all its watches: an idle graph holds no descriptor."""

    __slots__ = ("events", "fd", "pid", "users", "watches")

    def __init__(self, fd: int, events: int, pid: int | None) -> None:
        self.fd = fd
        self.events = events
        self.pid = pid
        """None for a connection, which is never shared."""
        self.users = 0
        """Number of watches that were added and not removed yet. The descriptor is closed at 0. Guarded by the lock."""
        self.watches: dict[Watch, None] = {}
        """Watches that the thread has seen. Only the thread uses this."""

    def ended(self) -> bool:
        """Return True if the process has ended. Does not wait."""
        poll = select.poll()
        poll.register(self.fd, self.events)
        return bool(poll.poll(0))


class Watch:
    """One process or connection that is watched."""

    __slots__ = ("_watcher", "on_end", "source")

    def __init__(self, watcher: Watcher, source: _WatchedDescriptor, on_end: Callable[[], None]) -> None:
        self._watcher = watcher
        self.source = source
        self.on_end = on_end

    def forget(self) -> None:
        """Stop watching. Does nothing if the end was noticed or this was called before.

        Never waits, so it may be called from anywhere, also from a finalizer.
        """
        self._watcher.forget(self)


class Watcher:
    """Watcher whose thread runs while there is something to watch. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _thread, _eventfd, _by_pid and users; _watched belongs to the thread
        self._arriving: collections.deque[Watch] = collections.deque()
        self._forgotten: collections.deque[Watch] = collections.deque()
        self._by_pid: dict[int, _WatchedDescriptor] = {}
        """Descriptors of processes with a user."""
        self._watched: dict[int, _WatchedDescriptor] = {}
        """Sources that the thread polls, by descriptor."""
        self._thread: threading.Thread | None = None
        self._eventfd: int | None = None
        """Eventfd that wakes the thread. Created once and never closed.

        A finalizer may be about to write to it at any time, and would write into the next file with the same number.
        """

    def __len__(self) -> int:
        return sum(len(source.watches) for source in list(self._watched.values())) + len(self._arriving)

    def watch(self, pid: int, on_end: Callable[[], None]) -> Watch:
        """Call `on_end` once, on the watcher's thread, when process `pid` ends. ProcessLookupError if there is none."""
        with self._lock:
            source = self._by_pid.get(pid)
            # The kernel may have given the number of a process that has just ended to a new one.
            if source is None or source.ended():
                source = self._by_pid[pid] = _WatchedDescriptor(os.pidfd_open(pid), select.POLLIN, pid)
            return self._add(source, on_end)

    def watch_identified(self, pid: int, ticks: int, on_end: Callable[[], None]) -> Watch | None:
        """Do the same as `watch` for the process that was started at `ticks`; return None if it has ended."""
        try:
            watch = self.watch(pid, on_end)
        except ProcessLookupError:
            return None
        # Only now: the process that is watched cannot be replaced by another one any more.
        if start_ticks(pid) == ticks:
            return watch
        watch.forget()
        return None

    def watch_connection(self, sock: socket.socket, on_end: Callable[[], None]) -> Watch:
        """Call `on_end` once, on the watcher's thread, when either side or the kernel has ended the connection.

        A copy of the descriptor is watched: until it is forgotten only `shutdown` ends the connection, not `close`.
        """
        with self._lock:
            return self._add(_WatchedDescriptor(os.dup(sock.fileno()), select.POLLRDHUP, None), on_end)

    def _add(self, source: _WatchedDescriptor, on_end: Callable[[], None]) -> Watch:
        """Hand a new watch to the thread. Call with the lock held."""
        watch = Watch(self, source, on_end)
        source.users += 1
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
        watch.on_end = _do_nothing  # the end may come before the thread has seen this
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
                source = watch.source
                source.watches[watch] = None
                # A source whose end was noticed before this watch arrived is polled again, and ends at once.
                if source.fd not in self._watched:
                    self._watched[source.fd] = source
                    poll.register(source.fd, source.events)
            while self._forgotten:
                watch = self._forgotten.popleft()
                source = watch.source
                if watch in source.watches:  # else it has ended, or was forgotten before
                    del source.watches[watch]
                    self._release(source, 1)
                    if not source.watches:
                        self._stop_polling(poll, source)
            if self._watched:
                return True
            self._thread = None
            return False

    def _stop_polling(self, poll: select.poll, source: _WatchedDescriptor) -> None:
        """Unregister a source without watches, and close its descriptor if no watch is on its way. Holds the lock."""
        del self._watched[source.fd]
        poll.unregister(source.fd)
        if not source.users:
            os.close(source.fd)

    def _release(self, source: _WatchedDescriptor, watches: int) -> None:
        """Count these watches of a source as removed. Call with the lock held."""
        source.users -= watches
        if not source.users and source.pid is not None and self._by_pid.get(source.pid) is source:
            del self._by_pid[source.pid]

    def _end(self, poll: select.poll, source: _WatchedDescriptor) -> None:
        with self._lock:
            watches = list(source.watches)
            source.watches.clear()
            self._release(source, len(watches))
            self._stop_polling(poll, source)
        for watch in watches:
            # The owner may keep the watch; it must not keep the objects that the callback refers to.
            on_end, watch.on_end = watch.on_end, _do_nothing
            try:
                on_end()
            except Exception:
                log.exception("callback after the end of a process or connection")
            del on_end


def _do_nothing() -> None:
    return


watcher = Watcher()
"""Watcher of this process."""

# A forked child has no watcher thread, and its copies of the pidfds are of no use to it.
os.register_at_fork(after_in_child=watcher.__init__)  # type: ignore[misc]

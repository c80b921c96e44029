"""How asyncio waits for results: one eventfd that the actors write, and one timer for all results that are awaited.

    actor                                   driver
                                            waits for a moment without sleeping (`Collector.glance`)
    writes a message with the flag WAKE     marks itself as sleeping
    writes the driver's eventfd      --->   event loop wakes (add_reader), reads messages, resolves futures

Messages carry the flag WAKE only if their execution was started while an event loop was running, so a message is never
missed: its flag travels with it. An event loop wakes in 14 us this way; with a helper thread in 31-82 us. Where the
kernel forbids an actor to fetch the eventfd, and for a second event loop at the same time, results are awaited on a
thread.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

from raylane.core import wake

log = logging.getLogger("raylane.graph")

STAY_S = 1e-3
"""Seconds after which the event loop must run although awaited results come without a sleep."""


class AsyncioBridge:
    """Connection of one graph to one event loop at a time."""

    def __init__(self, on_wake: Callable[[], None], timeout_s: float | None) -> None:
        """Create the bridge. `on_wake`, a bound method, reads messages and never waits; it is held weakly."""
        # The event loop holds this object as long as it watches the eventfd; it must not keep the graph alive.
        self._on_wake = weakref.WeakMethod(on_wake)
        self._timeout_s = timeout_s
        self.active = False
        """True if executions that are started from an event loop carry the flag WAKE."""
        self._fd: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deadlines: collections.deque[tuple[float, asyncio.Future[None]]] = collections.deque()
        """(deadline, future), ordered by deadline: all futures have the same timeout."""
        self._timer: asyncio.TimerHandle | None = None
        self._stays_until = 0.0

    def start(self, fd: int, refused: str | None) -> None:
        """Use this eventfd, which the actors have fetched. The bridge owns it from now on.

        `refused` is the reason why an actor could not fetch it, if so.
        """
        self._fd = fd
        self.active = refused is None
        if refused is not None:
            log.info("results are awaited on a thread: %s", refused)

    def future(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None] | None:
        """Return a future for the waiter of a result; None if messages do not wake this event loop.

        The caller resolves the future when the result is done; the timer resolves it after `timeout_s`.
        """
        # Attached at the first await, not at compile: only then is it known which event loop waits.
        if self._loop is not loop and not self._attach(loop):
            return None
        future: asyncio.Future[None] = loop.create_future()
        if self._timeout_s is not None:
            deadlines = self._deadlines
            # Results usually arrive long before their deadline: drop them here, so that the timer finds few entries.
            while deadlines and deadlines[0][1].done():
                deadlines.popleft()
            deadlines.append((time.monotonic() + self._timeout_s, future))
            if self._timer is None:
                self._timer = loop.call_later(self._timeout_s, self._expire)
        return future

    def overstayed(self) -> bool:
        """Return True if the event loop has not run for STAY_S; it is given a turn by the caller."""
        now = time.monotonic()
        if now < self._stays_until:
            return False
        self._stays_until = now + STAY_S
        return True

    def idle(self) -> bool:
        """Return True if no callback of the running event loop is ready. False for loops that do not tell."""
        # The queue of asyncio's own loops (BaseEventLoop in CPython 3.4 to 3.14).
        ready = getattr(asyncio._get_running_loop(), "_ready", True)
        return not ready

    def _attach(self, loop: asyncio.AbstractEventLoop) -> bool:
        # A second running loop is refused: one eventfd can wake one loop only.
        if not self.active or self._fd is None or (self._loop is not None and not self._loop.is_closed()):
            return False
        loop.add_reader(self._fd, self._on_readable)
        self._loop, self._timer = loop, None
        self._deadlines.clear()
        return True

    def _on_readable(self) -> None:
        if self._fd is not None:
            wake.drain(self._fd)  # before reading messages: a later message must make the eventfd readable again
            on_wake = self._on_wake()
            if on_wake is not None:
                on_wake()

    def _expire(self) -> None:
        """Resolve the futures whose deadline has passed, and set the timer for the next one."""
        self._timer = None
        now = time.monotonic()
        while self._deadlines:
            at, future = self._deadlines[0]
            if not future.done():
                if at > now and self._loop is not None:
                    self._timer = self._loop.call_at(self._loop.time() + at - now, self._expire)
                    return
                future.set_result(None)
            self._deadlines.popleft()

    def notify(self) -> None:
        """Make the event loop read messages soon. From any thread, a finalizer included."""
        fd = self._fd
        if fd is not None:
            with contextlib.suppress(OSError):
                os.eventfd_write(fd, 1)

    def disown(self) -> None:
        """Forget the event loop in a forked child, to whose parent it belongs, and close the copy of the eventfd."""
        fd, self._fd = self._fd, None
        self._loop, self.active = None, False
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """Detach from the event loop and close the eventfd. From any thread; a second call does nothing."""
        loop, self._loop = self._loop, None
        fd, self._fd = self._fd, None
        self.active = False
        if fd is None:
            return
        if loop is not None and not loop.is_closed():
            if asyncio._get_running_loop() is loop or not loop.is_running():
                _detach(loop, fd, self._timer)
            else:
                loop.call_soon_threadsafe(_detach, loop, fd, self._timer)
                return
        else:
            os.close(fd)


def _detach(loop: asyncio.AbstractEventLoop, fd: int, timer: asyncio.TimerHandle | None) -> None:
    """Remove the reader from the loop. Runs on the loop's own thread, or while the loop does not run."""
    # Remove first: after the close another file could get the number, and the loop would watch that one.
    loop.remove_reader(fd)
    if timer is not None:
        timer.cancel()
    os.close(fd)


def resolve(waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]]) -> None:
    """Resolve futures and empty the list, each future on its own event loop."""
    running = asyncio._get_running_loop()
    while waiting:
        try:
            loop, future = waiting.pop()
        except IndexError:  # another thread has taken the last one
            return
        if loop is running:
            _set(future)
        else:
            with contextlib.suppress(RuntimeError):  # the loop has been closed: no coroutine waits there
                loop.call_soon_threadsafe(_set, future)


def _set(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_result(None)

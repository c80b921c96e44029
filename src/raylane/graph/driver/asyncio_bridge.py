"""How asyncio waits for results: one eventfd that the actors write, and one timer for all results that are awaited.

    actor                                   driver
                                            waits for a moment without sleeping (`Collector.glance`)
    writes a message with the flag WAKE     marks itself as sleeping
    writes the driver's eventfd      --->   event loop wakes (add_reader), reads messages, resolves futures

Messages carry the flag WAKE only if their execution was started while an event loop was running, so a message is never
missed: its flag travels with it. An event loop wakes in 14 us this way; with a helper thread in 31-82 us. Where the
kernel forbids an actor to fetch the eventfd, and for a second event loop of one graph, results are awaited on a thread.

All graphs of a process share its eventfd (`core.signals.wake.own`), so that a graph costs no descriptor. Each event
loop that has awaited a result watches it (`EventLoops`); the loop that resets it wakes the others.
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

from raylane.core.signals import wake

log = logging.getLogger("raylane.graph")

STAY_S = 1e-3
"""Seconds after which the event loop must run although awaited results come without a sleep."""


class EventLoops:
    """Event loops of this process that watch its eventfd, and the graphs (bridges) whose results each of them awaits.

    No lock: finalizers detach, and each step is one operation of a dict.
    """

    def __init__(self) -> None:
        self._bridges: dict[asyncio.AbstractEventLoop, dict[AsyncioBridge, None]] = {}

    def attach(self, loop: asyncio.AbstractEventLoop, bridge: AsyncioBridge) -> None:
        """Wake this bridge from now on when the eventfd is written. Call on the loop's thread."""
        for other in list(self._bridges):
            if other.is_closed():
                self._bridges.pop(other, None)
        bridges = self._bridges.setdefault(loop, {})
        bridges[bridge] = None
        # Again: until the bridge was in it, a finalizer could empty the dict.
        self._bridges[loop] = bridges
        loop.add_reader(wake.own(), self._on_readable, loop)

    def detach(self, loop: asyncio.AbstractEventLoop, bridge: AsyncioBridge) -> None:
        """Stop waking this bridge. From any thread."""
        bridges = self._bridges.get(loop, {})
        bridges.pop(bridge, None)
        # A running loop stops watching when it is woken without bridges: only its own thread may change its readers.
        if not bridges and loop.is_closed():
            self._bridges.pop(loop, None)

    def _on_readable(self, loop: asyncio.AbstractEventLoop) -> None:
        fd = wake.own()
        # Reset before reading messages: a later message must make the eventfd readable again.
        reset = wake.drain(fd)
        if len(self._bridges) > 1 and reset:
            for other in list(self._bridges):
                if other is not loop:
                    with contextlib.suppress(RuntimeError):  # the loop has been closed
                        other.call_soon_threadsafe(self._wake, other)
        if not self._bridges.get(loop):
            self._bridges.pop(loop, None)
            loop.remove_reader(fd)
            return
        self._wake(loop)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        for bridge in list(self._bridges.get(loop, ())):
            bridge.wake()


event_loops = EventLoops()
"""Event loops of this process."""

# A forked child has a new eventfd, and the loops belong to its parent.
os.register_at_fork(after_in_child=event_loops.__init__)  # type: ignore[misc]


class AsyncioBridge:
    """Connection of one graph to one event loop at a time."""

    def __init__(self, on_wake: Callable[[], None], timeout_s: float | None) -> None:
        """Create the bridge. `on_wake`, a bound method, reads messages and never waits; it is held weakly."""
        # `event_loops` holds this object as long as it is attached; it must not keep the graph alive.
        self._on_wake = weakref.WeakMethod(on_wake)
        self._timeout_s = timeout_s
        self.active = False
        """True if executions that are started from an event loop carry the flag WAKE."""
        self.waiting = False
        """True if futures may be pending: only then does a wake-up read messages. Used on the loop's thread."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deadlines: collections.deque[tuple[float, asyncio.Future[None]]] = collections.deque()
        """(deadline, future), ordered by deadline: all futures have the same timeout."""
        self._timer: asyncio.TimerHandle | None = None
        self._stays_until = 0.0

    def start(self, refused: str | None) -> None:
        """Begin: the actors have fetched the eventfd. `refused` is the reason why one of them could not, if so."""
        self.active = refused is None
        if refused is not None:
            log.info("results are awaited on a thread: %s", refused)

    def future(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None] | None:
        """Return a future for the waiter of a result; None if messages do not wake this event loop.

        The caller resolves the future when the result is done; the timer resolves it after `timeout_s`.
        """
        # Attached at the first await, not at compile: only then is it known which event loop waits.
        if self._loop is not loop:
            # A second running loop is refused: messages are read on the thread of one loop only.
            if not self.active or (self._loop is not None and not self._loop.is_closed()):
                return None
            if self._loop is not None:
                event_loops.detach(self._loop, self)
            event_loops.attach(loop, self)
            self._loop, self._timer = loop, None
            self._deadlines.clear()
        self.waiting = True
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

    def wake(self) -> None:
        """Read messages if futures are pending. Call on the loop's thread, after the eventfd was reset."""
        on_wake = self._on_wake() if self.waiting else None
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
        # A loop that attaches after this line reads messages by itself (`Collector.look`).
        if self._loop is not None:
            with contextlib.suppress(OSError):
                os.eventfd_write(wake.own(), 1)

    def disown(self) -> None:
        """Forget the event loop in a forked child, to whose parent it belongs."""
        self._loop, self.active = None, False

    def close(self) -> None:
        """Detach from the event loop. From any thread; a second call does nothing."""
        loop, self._loop = self._loop, None
        timer, self._timer = self._timer, None
        self.active = False
        if loop is None:
            return
        event_loops.detach(loop, self)
        if timer is None or loop.is_closed():
            return
        if asyncio._get_running_loop() is loop or not loop.is_running():
            timer.cancel()
        else:
            with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
                loop.call_soon_threadsafe(timer.cancel)


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

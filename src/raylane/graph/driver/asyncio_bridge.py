"""How asyncio waits for results: an eventfd that the actors write to, and one timer for all that are awaited.

The actors write to it only for executions that were started while a loop was known (flag WAKE), so a message is never
missed: its flag travels with it. An event loop is woken in 14 us this way; by a helper thread in 31-82. Where the
kernel forbids an actor to fetch the eventfd, and for a second loop at the same time, results are awaited on a thread.
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


class Awaiting:
    """The asyncio side of one graph."""

    def __init__(self, woken: Callable[[], None], timeout_s: float | None) -> None:
        """`woken`, a method of the graph, reads messages and never waits. It is not kept alive."""
        self._woken = weakref.WeakMethod(woken)
        self._timeout_s = timeout_s
        self.active = False
        """Whether executions that are started from a loop are flagged."""
        self._fd: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deadlines: collections.deque[tuple[float, asyncio.Future[None]]] = collections.deque()
        """In order, because the limit is the same for all."""
        self._timer: asyncio.TimerHandle | None = None

    def start(self, fd: int, refused: str | None) -> None:
        """Use this eventfd, which the actors have fetched, and close it in the end. `refused`: why one could not."""
        self._fd = fd
        self.active = refused is None
        if refused is not None:
            log.info("asyncio waits on a thread: %s", refused)

    def future(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None] | None:
        """What a flagged result's waiter in this loop awaits: to be resolved when the result is done, and resolved by
        itself after `timeout_s`. None if this loop is not woken."""
        if self._loop is not loop and not self._adopt(loop):
            return None
        future: asyncio.Future[None] = loop.create_future()
        if self._timeout_s is not None:
            deadlines = self._deadlines
            while deadlines and deadlines[0][1].done():
                deadlines.popleft()
            deadlines.append((time.monotonic() + self._timeout_s, future))
            if self._timer is None:
                self._timer = loop.call_later(self._timeout_s, self._expire)
        return future

    def _adopt(self, loop: asyncio.AbstractEventLoop) -> bool:
        if not self.active or self._fd is None or (self._loop is not None and not self._loop.is_closed()):
            return False
        loop.add_reader(self._fd, self._read)
        self._loop, self._timer = loop, None
        self._deadlines.clear()
        return True

    def _read(self) -> None:
        if self._fd is not None:
            wake.drain(self._fd)
            woken = self._woken()
            if woken is not None:
                woken()

    def _expire(self) -> None:
        """The timer: resolve whom it is too late for, and set it for the next."""
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

    def ring(self) -> None:
        """Have the loop read messages soon. From any thread, a finalizer included."""
        fd = self._fd
        if fd is not None:
            with contextlib.suppress(OSError):
                os.eventfd_write(fd, 1)

    def disown(self) -> None:
        """In a forked child: forget the loop, which is the parent's, and the copy of the eventfd."""
        fd, self._fd = self._fd, None
        self._loop, self.active = None, False
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """Let go of the loop and the eventfd."""
        loop, self._loop = self._loop, None
        fd, self._fd = self._fd, None
        self.active = False
        if fd is None:
            return
        if loop is not None and not loop.is_closed():
            if asyncio._get_running_loop() is loop or not loop.is_running():
                _forget(loop, fd, self._timer)
            else:
                loop.call_soon_threadsafe(_forget, loop, fd, self._timer)
                return
        else:
            os.close(fd)


def _forget(loop: asyncio.AbstractEventLoop, fd: int, timer: asyncio.TimerHandle | None) -> None:
    """On the loop's own thread, or while it does not run."""
    loop.remove_reader(fd)
    if timer is not None:
        timer.cancel()
    os.close(fd)


def resolve(waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]]) -> None:
    """Resolve futures, each on its own loop."""
    here = asyncio._get_running_loop()
    while waiting:
        try:
            loop, future = waiting.pop()
        except IndexError:  # another thread was quicker
            return
        if loop is here:
            _set(future)
        else:
            with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile: nobody waits there
                loop.call_soon_threadsafe(_set, future)


def _set(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_result(None)

"""The one resident loop of an actor: serves every compiled graph that the actor takes part in. Sleeps when none runs.

Why a thread of our own, and not a task that never ends: Ray's background group has exactly one thread, which Ray needs
itself, and a task there cannot be cancelled (docs/design/graphs.md). The thread starts with the first graph and ends
with the last. All writers that send to this process, whatever the graph, ring its one *doorbell* semaphore.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Protocol

from raylane.core.place import Place, alive, here
from raylane.core.semaphore import Segment, init, post, try_wait
from raylane.core.waiting import Waiter
from raylane.graph.channels.lease import LOOK_EVERY_S
from raylane.graph.worker import thread_state as context
from raylane.graph.worker.thread_state import ThreadContext

log = logging.getLogger("raylane.graph")

LOOK_UP_S = 1.0
"""How often a sleeping lane looks whether the owners of its graphs still live."""


LOOK_UP_EVERY = 64
"""How often, in rounds, one that never sleeps asks whether it is time to look."""


class Residence(Protocol):
    """One graph's stay here, as the lane sees it (`residence`)."""

    name: str
    who: str
    owner_who: str
    over: bool

    @property
    def taken(self) -> int:
        """Messages read so far."""

    @property
    def impatient(self) -> bool:
        """True while it waits for what rings no doorbell: `advance` is called every LOOK_EVERY_S seconds."""

    def advance(self) -> bool: ...

    def give_up(self, error: BaseException) -> None: ...

    def orphaned(self) -> bool: ...

    def run_within(self, enter: Callable[[], None]) -> None:
        """Call `enter` before any code of the actor runs for this graph."""

    def close(self) -> None: ...


class _Settings:
    """Thread settings that graphs share: those compiled under equal settings. What a method changes stays changed for
    these graphs, and for no others."""

    __slots__ = ("at_first", "now")

    def __init__(self, context: ThreadContext) -> None:
        self.at_first = context
        self.now = context
        """As of the last time that another graph's settings took their place."""


class Lane:
    """This process's lane. `adopt` may be called from any thread; everything else belongs to the lane's thread."""

    def __init__(self) -> None:
        self.bell = Segment.make(4096)
        init(self.bell.address)
        self.exclusive = threading.RLock()
        """Held around methods of graphs compiled with exclusive=True, and around ordinary calls of their actor."""
        self._lock = threading.Lock()  # guards _arriving and _thread
        self._arriving: collections.deque[Callable[[], None]] = collections.deque()
        self._thread: threading.Thread | None = None
        self._residences: tuple[Residence, ...] = ()
        self._settings: dict[Residence, _Settings] = {}
        """Settings under which each graph here was compiled; equal ones are one object."""
        self._current: _Settings | None = None
        """The settings that the lane's thread has at the moment."""
        self._waiter = Waiter()
        self._look_up_at = 0.0
        self._busy = 0
        """Rounds in which there was something to do."""
        self._rung = 0
        """Times the bell was heard, less the messages taken of graphs that have left."""

    def adopt(self, residence: Residence, settings: ThreadContext) -> None:
        """Serve this graph from now on. Starts the thread if it does not run."""
        with self._lock:
            self._arriving.append(lambda: self._admit(residence, settings))
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="raylane-lane", daemon=True)
                self._thread.start()
        self.ring()

    def ring(self) -> None:
        """Wake the lane without a message."""
        post(self.bell.address)

    def _admit(self, residence: Residence, settings: ThreadContext) -> None:
        self._rung -= 1  # the ring of `adopt`, which comes with no message
        known = next((other for other in self._settings.values() if other.at_first == settings), None)
        self._settings[residence] = mine = known or _Settings(settings)
        self._residences = (*self._residences, residence)
        if self._current is None:
            self._enter(mine)
        if any(other is not mine for other in self._settings.values()):  # from now on each graph enters its own
            for each, wanted in self._settings.items():
                each.run_within(functools.partial(self._enter, wanted))

    def _enter(self, settings: _Settings) -> None:
        """Make the thread's settings these. Nothing to do as long as graphs of the same settings run."""
        current = self._current
        if current is settings:
            return
        if current is not None:
            current.now = context.read()
        context.adopt(settings.now)
        self._current = settings

    def _serve(self) -> None:
        bell = self.bell.address
        while True:
            if (self._arriving or not self._residences) and not self._live_on():
                return
            moved = False
            for residence in self._residences:
                try:
                    moved |= residence.advance()
                except BaseException as error:  # whatever it is, it costs this graph its life, not others theirs
                    log.exception("graph %s in %s", residence.name, residence.who)
                    self._give_up(residence, error)
                if residence.over:
                    self._dismiss(residence)
                    moved = True
            if moved:
                self._busy += 1
                if self._busy % LOOK_UP_EVERY == 0 and time.monotonic() >= self._look_up_at:
                    self._look_up()
                continue
            if self._settle():
                continue
            limit_s = LOOK_EVERY_S if any(residence.impatient for residence in self._residences) else LOOK_UP_S
            if self._waiter.wait(bell, limit_s):
                self._rung += 1
            if time.monotonic() >= self._look_up_at:
                self._look_up()

    def _give_up(self, residence: Residence, error: BaseException) -> None:
        """End one graph. Whatever fails on the way: this thread serves the others."""
        try:
            residence.give_up(error)
        except BaseException:
            log.exception("graph %s in %s could not tell its driver that it ends", residence.name, residence.who)
        residence.over = True

    def _settle(self) -> bool:
        """Take the rings of messages that were found without waiting. True if there were any: then look again, for a
        ring may have been that of a message not seen yet."""
        taken = sum(residence.taken for residence in self._residences)
        found = False
        while self._rung < taken and not try_wait(self.bell.address):
            self._rung += 1
            found = True
        return found

    def _live_on(self) -> bool:
        """Let new graphs in; False, and the thread is gone for the next `adopt`, when there is none left."""
        with self._lock:
            while self._arriving:
                self._arriving.popleft()()
            if self._residences:
                return True
            self._current = None  # the next thread has the system's settings
            self._thread = None
            return False

    def _look_up(self) -> None:
        self._look_up_at = time.monotonic() + LOOK_UP_S
        for residence in self._residences:
            if residence.orphaned():
                log.warning("the owner of graph %s, %s, is gone: leaving it", residence.name, residence.owner_who)
                self._dismiss(residence)

    def _dismiss(self, residence: Residence) -> None:
        self._residences = tuple(other for other in self._residences if other is not residence)
        self._rung -= residence.taken
        del self._settings[residence]
        residence.close()


class Watched:
    """Whether another process of this host still lives: a pidfd, which cannot be mistaken for a later process."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._poll: select.poll | None = None
        self._fd: int | None = None
        mine = here()
        if place.same_host(mine) and place.pid_namespace == mine.pid_namespace and alive(place):
            with contextlib.suppress(OSError):
                self._fd = os.pidfd_open(place.pid)
                self._poll = select.poll()
                self._poll.register(self._fd, select.POLLIN)

    def gone(self) -> bool:
        """False for a process that cannot be watched from here: the link to it says when it ends."""
        if self._poll is None:
            return False
        return bool(self._poll.poll(0)) or not alive(self._place)

    def close(self) -> None:
        fd, self._fd, self._poll = self._fd, None, None
        if fd is not None:
            os.close(fd)


_lane: Lane | None = None
_making = threading.Lock()


def lane() -> Lane:
    """This process's lane."""
    global _lane
    with _making:
        if _lane is None:
            _lane = Lane()
        return _lane


def _after_fork() -> None:
    """A forked child has no lane: the thread, and the doorbell that others know, are its parent's."""
    global _lane
    _lane = None


os.register_at_fork(after_in_child=_after_fork)

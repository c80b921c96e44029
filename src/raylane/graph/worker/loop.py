"""The graph loop of an actor: one thread that serves every compiled graph in which the actor takes part.

    doorbell posted --> find the graphs whose flag is set --> advance each of them (one task each), until none has
                        anything to do --> sleep until the next post

The thread sleeps while its graphs are idle. It starts with the first graph and ends with the last. It is a thread of
its own, not a task in Ray's background concurrency group, because that group has exactly one thread, which Ray needs
itself, and a task there cannot be cancelled (docs/design/graphs.md). Every writer that sends to this process, whatever
the graph, sets the flag of the graph and posts the process's one doorbell: idle graphs cost nothing.
"""

from __future__ import annotations

import collections
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

from raylane.core.signals.semaphore import post
from raylane.graph.channels.lease import POLL_INTERVAL_S
from raylane.graph.channels.ring import ProcessDoorbell
from raylane.graph.lifecycle import Event, State
from raylane.graph.worker import thread_state
from raylane.graph.worker.session import Session
from raylane.graph.worker.thread_state import ThreadState

log = logging.getLogger("raylane.graph")

OWNER_CHECK_S = 1.0
"""Seconds between two checks whether the drivers of the graphs still run. Also the longest sleep."""
ROUNDS_PER_CHECK = 64
"""Number of busy rounds after which the loop looks for orders and at the clock although there are tasks to run.

Looking in every round would cost a tenth of a small task.
"""


class _SharedThreadState:
    """Thread settings of all graphs that were compiled under equal settings.

    A setting that a method changes stays changed for these graphs, and for no others.
    """

    __slots__ = ("initial", "latest")

    def __init__(self, state: ThreadState) -> None:
        self.initial = state
        self.latest = state
        """Settings as they were when those of other graphs last replaced them."""


class GraphLoop:
    """The graph loop of this process. `add` may be called from any thread; the loop's thread uses everything else."""

    def __init__(self) -> None:
        self.doorbell = ProcessDoorbell()
        self.exclusive = threading.RLock()
        """Held around methods of graphs compiled with exclusive=True, and around ordinary calls of their actor."""
        self._lock = threading.Lock()  # guards _arriving and _thread
        self._arriving: collections.deque[Callable[[], None]] = collections.deque()
        self._thread: threading.Thread | None = None
        self.sessions: tuple[Session, ...] = ()
        """Sessions that the loop serves at present."""
        self._thread_states: dict[Session, _SharedThreadState] = {}
        """Thread settings under which each graph was compiled; one object for equal settings."""
        self._applied: _SharedThreadState | None = None
        """Settings that the loop's thread has at present."""
        self._by_flag: dict[int, list[Session]] = {}
        self._active: list[Session] = []
        """Sessions that may have something to do although their flag is not set."""
        self._next_owner_check = 0.0
        self._busy_rounds = 0

    def add(self, session: Session, state: ThreadState) -> None:
        """Serve a graph from now on, under these thread settings. Starts the thread if it does not run."""
        with self._lock:
            self._arriving.append(lambda: self._start_session(session, state))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="raylane-graph-loop", daemon=True)
                self._thread.start()
        self.notify()

    def notify(self) -> None:
        """Wake the loop without a message."""
        post(self.doorbell.address)

    def _start_session(self, session: Session, state: ThreadState) -> None:
        self.doorbell.read += 1  # `add` posts the doorbell once, without a message
        equal = next((shared for shared in self._thread_states.values() if shared.initial == state), None)
        self._thread_states[session] = thread_state = equal or _SharedThreadState(state)
        # A new tuple each time: other threads may iterate over the old one.
        self.sessions = (*self.sessions, session)
        self._by_flag.setdefault(session.flag, []).append(session)
        self._active.append(session)  # its messages may have come before
        # The settings in effect may be those of a graph that has left meanwhile.
        if self._applied not in self._thread_states.values():
            self._apply(thread_state)
        # Hooks cost time in every task, so they are set only once there are graphs of different settings.
        if any(shared is not thread_state for shared in self._thread_states.values()):
            for each, shared in self._thread_states.items():
                each.call_before_user_code(functools.partial(self._apply, shared))

    def _apply(self, shared: _SharedThreadState) -> None:
        """Give the loop's thread these settings. Does nothing if they are in effect."""
        applied = self._applied
        if applied is shared:
            return
        if applied is not None:
            applied.latest = thread_state.capture()
        thread_state.apply(shared.latest)
        self._applied = shared

    def _run(self) -> None:
        doorbell = self.doorbell
        while True:
            # `_arriving` is read without the lock: `add` posts the doorbell afterwards, so no entry is missed for long.
            if self._arriving or not self.sessions:
                with self._lock:
                    while self._arriving:
                        self._arriving.popleft()()
                    if not self.sessions:
                        self._applied = None  # the next thread has default settings
                        # Under the lock: `add` either finds this thread still serving, or starts a new one.
                        self._thread = None
                        return
            # A single session needs no search for its flag.
            sessions: Sequence[Session] = self.sessions if len(self.sessions) == 1 else self._flagged()
            # One task of each at a time: no graph keeps the others waiting for more than a task.
            if self._advance(sessions):
                continue
            if doorbell.absorb():
                continue
            self._check_owners()  # before the wait: a message does not wait for it
            rang = doorbell.wait(POLL_INTERVAL_S if self._active else OWNER_CHECK_S)
            # Rare: polling every session costs about a microsecond each.
            # A post without a flag (`core.native`), unless it belongs to a message that was read before.
            if rang and doorbell.consumed > doorbell.read and len(self.sessions) > 1:
                self._active = self._flagged() or list(self.sessions)

    def _flagged(self) -> list[Session]:
        """Return the active sessions and those whose flag is set, each once."""
        flagged = self._active
        # Two graphs may share a flag; polling one in vain is harmless.
        while (flag := self.doorbell.flagged()) >= 0:
            flagged = [*flagged, *(session for session in self._by_flag.get(flag, ()) if session not in flagged)]
        return flagged

    def _advance(self, sessions: Sequence[Session]) -> bool:
        """Run at most one task of each session. Return False if none of them had anything to do."""
        check = self._busy_rounds % ROUNDS_PER_CHECK == ROUNDS_PER_CHECK - 1
        busy = False
        active = []
        for session in sessions:
            ran = True
            try:
                ran = session.executor.advance()
                # Orders are rare: an executor with tasks pays for them in one round of many only.
                if check or not ran:
                    ran |= session.obey()
            except BaseException as error:  # SystemExit included: any exception ends only this graph
                self._fail(session, error)
            busy |= ran
            if session.lifecycle.state is not State.RUNNING:
                self._remove(session)
            elif ran or session.executor.needs_polling:
                active.append(session)
        self._active = active
        if busy:
            self._busy_rounds += 1
            if check:
                self._check_owners()
        return busy

    def _fail(self, session: Session, error: BaseException) -> None:
        """End one graph because of an error. Never raises: this thread serves the other graphs too."""
        log.error("graph %s in %s", session.name, session.actor_name, exc_info=error)
        session.lifecycle.advance(Event.LEAVE)  # first: the report must not wait for memory
        try:
            session.fail(error)
        except BaseException:
            log.exception("graph %s in %s could not report its error", session.name, session.actor_name)

    def _check_owners(self) -> None:
        """Remove the sessions whose driver has ended. Does nothing within OWNER_CHECK_S after the last check."""
        now = time.monotonic()
        if now < self._next_owner_check:
            return
        self._next_owner_check = now + OWNER_CHECK_S
        for session in self.sessions:
            session.check_owner()
            if session.lifecycle.state is State.ORPHANED:
                self._remove(session)

    def _remove(self, session: Session) -> None:
        if session.lifecycle.state is State.ORPHANED:
            log.warning("leaving graph %s: its owner, %s, has ended", session.name, session.owner_name)
        self.sessions = tuple(other for other in self.sessions if other is not session)
        self._by_flag[session.flag].remove(session)
        self._active = [other for other in self._active if other is not session]
        del self._thread_states[session]
        session.close()


_loop: GraphLoop | None = None
_creating = threading.Lock()


def graph_loop() -> GraphLoop:
    """Return the graph loop of this process, which is created by the first call."""
    global _loop
    with _creating:
        if _loop is None:
            _loop = GraphLoop()
        return _loop


def _after_fork() -> None:
    """Forget the loop in a forked child: its thread, and the doorbell that writers know, are the parent's."""
    global _loop
    _loop = None


os.register_at_fork(after_in_child=_after_fork)

"""The graph loop with fake sessions."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from raylane.graph.lifecycle import Event, Lifecycle
from raylane.graph.worker.loop import GraphLoop
from raylane.graph.worker.thread_state import ThreadState


class Busy:
    """Session that is always busy, until its owner has ended or `advance` raises."""

    actor_name = owner_name = "somebody"
    flag = 0
    needs_polling = False

    def __init__(self, name: str, *, gone: bool = False, error: BaseException | None = None) -> None:
        self.name = name
        self.gone = gone
        self.error = error
        self.lifecycle = Lifecycle()
        self.closed = threading.Event()
        self.reason: BaseException | None = None
        self.executor = self  # the fake runs its own tasks

    def advance(self) -> bool:
        if self.error is not None:
            raise self.error
        return True

    def obey(self) -> bool:
        return False

    def fail(self, error: BaseException) -> None:
        self.reason = error
        self.lifecycle.advance(Event.LEAVE)

    def check_owner(self) -> None:
        if self.gone:
            self.lifecycle.advance(Event.OWNER_GONE)

    def close(self) -> None:
        self.closed.set()


def test_loop_that_never_sleeps_notices_end_of_an_owner() -> None:
    loop, stays, leaves = GraphLoop(), Busy("stays"), Busy("leaves")
    for session in (stays, leaves):
        loop.add(session, ThreadState())
    leaves.gone = True
    assert leaves.closed.wait(20)
    assert not stays.closed.is_set()
    stays.lifecycle.advance(Event.LEAVE)
    assert stays.closed.wait(20)


def test_loop_exception_ends_only_one_graph() -> None:
    loop, stays, fails = GraphLoop(), Busy("stays"), Busy("fails", error=SystemExit("no"))
    for session in (stays, fails):
        loop.add(session, ThreadState())
    assert fails.closed.wait(20)
    assert isinstance(fails.reason, SystemExit)
    assert not stays.closed.is_set()
    stays.lifecycle.advance(Event.LEAVE)
    assert stays.closed.wait(20)


def test_loop_session_whose_fail_raises_leaves_others_running() -> None:
    class Worse(Busy):
        def fail(self, error: BaseException) -> None:
            raise OSError("no")

    loop, stays, fails = GraphLoop(), Busy("stays"), Worse("fails", error=ValueError("no"))
    for session in (stays, fails):
        loop.add(session, ThreadState())
    assert fails.closed.wait(20)
    assert not stays.closed.is_set()
    stays.lifecycle.advance(Event.LEAVE)
    assert stays.closed.wait(20)


def test_loop_graph_joining_during_an_end_has_its_settings() -> None:
    seen: list[str] = []

    class Seen(Busy):
        hook: Callable[[], None] = staticmethod(lambda: None)

        def advance(self) -> bool:
            self.hook()
            seen.append(np.geterr()["divide"])
            self.lifecycle.advance(Event.LEAVE)
            return True

        def call_before_user_code(self, hook: Callable[[], None]) -> None:
            self.hook = hook

    loop, last = GraphLoop(), Seen("last")

    class Joined(Seen):
        def close(self) -> None:
            loop.add(last, ThreadState(errstate={"divide": "ignore"}))
            super().close()

    loop.add(Joined("first"), ThreadState(errstate={"divide": "raise"}))
    assert last.closed.wait(20)
    assert seen == ["raise", "ignore"]

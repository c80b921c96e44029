"""The lane alone, with graphs that only look like some."""

from __future__ import annotations

import threading

from raylane.graph.worker.loop import Lane
from raylane.graph.worker.thread_state import ThreadContext


class Busy:
    """Always has something to do, until its owner is found to be gone, or an advance fails."""

    who = owner_who = "somebody"
    taken = 0

    def __init__(self, name: str, *, gone: bool = False, error: BaseException | None = None) -> None:
        self.name = name
        self.gone = gone
        self.error = error
        self.over = False
        self.closed = threading.Event()
        self.reason: BaseException | None = None

    def advance(self) -> bool:
        if self.error is not None:
            raise self.error
        return True

    def give_up(self, error: BaseException) -> None:
        self.reason = error
        self.over = True

    def orphaned(self) -> bool:
        return self.gone

    def close(self) -> None:
        self.closed.set()


def test_one_that_never_sleeps_still_notices_that_an_owner_is_gone() -> None:
    lane, stays, leaves = Lane(), Busy("stays"), Busy("leaves")
    for residence in (stays, leaves):
        lane.adopt(residence, ThreadContext())
    leaves.gone = True
    assert leaves.closed.wait(20)
    assert not stays.closed.is_set()
    stays.over = True
    assert stays.closed.wait(20)


def test_whatever_is_raised_costs_one_graph_alone() -> None:
    lane, stays, fails = Lane(), Busy("stays"), Busy("fails", error=SystemExit("no"))
    for residence in (stays, fails):
        lane.adopt(residence, ThreadContext())
    assert fails.closed.wait(20)
    assert isinstance(fails.reason, SystemExit)
    assert not stays.closed.is_set()
    stays.over = True
    assert stays.closed.wait(20)


def test_graph_that_cannot_even_give_up_leaves_others_running() -> None:
    class Worse(Busy):
        def give_up(self, error: BaseException) -> None:
            raise OSError("no")

    lane, stays, fails = Lane(), Busy("stays"), Worse("fails", error=ValueError("no"))
    for residence in (stays, fails):
        lane.adopt(residence, ThreadContext())
    assert fails.closed.wait(20)
    assert not stays.closed.is_set()
    stays.over = True
    assert stays.closed.wait(20)

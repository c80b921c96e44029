"""When a waiter yields and when it sleeps, as a table over times; and that a real one takes what it waits for."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from core.processes import Pipe, start
from raylane.core import semaphore, waiting
from raylane.core.semaphore import SEMAPHORE_BYTES, Segment, post, value
from raylane.core.waiting import (
    BUDGET_S,
    FORGIVE_S,
    FORGIVE_WAITS,
    GATE_S,
    MAX_LEVEL,
    MAX_LOSS_S,
    PENALTY,
    SLOW_YIELD_S,
    Patience,
    Waiter,
)

SHORT, LONG, ENDLESS = BUDGET_S / 2, 4 * GATE_S, 3600.0
LOSS_S = 4e-3  # a time slice


def after(*waits: float) -> Patience:
    patience = Patience()
    for length_s in waits:
        patience.waited(length_s)
    return patience


@pytest.mark.parametrize(
    ("waits", "yields"),
    [
        ([], True),  # the benefit of the doubt
        ([SHORT] * 20, True),
        ([LONG], True),  # one is no habit
        ([LONG] * 3, True),
        ([LONG] * 6, False),
        ([ENDLESS], True),  # however long it was
        ([LONG] * 1000, False),
        ([LONG] * 1000 + [SHORT] * 3, False),
        ([LONG] * 1000 + [SHORT] * 7, True),  # opens as quickly as it closes
        ([ENDLESS] * 6 + [SHORT] * 7, True),
        ([LONG, LONG, SHORT] * 100, False),
        ([LONG] + [SHORT] * 3, True),
        (([LONG] + [SHORT] * 3) * 100, True),
        ([GATE_S * 0.99] * 1000, True),
        ([GATE_S * 1.01] * 1000, False),
    ],
)
def test_the_gate_follows_the_lengths_of_late(waits: list[float], yields: bool) -> None:
    assert after(*waits).may_yield(now=1.0) is yields


def test_slow_yield_penalty_is_proportional_to_the_loss() -> None:
    for lost_s in (SLOW_YIELD_S, 1e-3, LOSS_S, MAX_LOSS_S):
        patience = Patience()
        patience.slow_yield(100.0, lost_s)
        penalty_s = PENALTY * lost_s
        assert patience.level == 1
        assert patience.slow_until == pytest.approx(100.0 + penalty_s)
        assert not patience.may_yield(100.0)
        assert not patience.may_yield(100.0 + 0.99 * penalty_s)
        assert patience.may_yield(100.0 + 1.01 * penalty_s)


def test_repeated_slow_yields_double_the_penalty_to_a_limit() -> None:
    patience, now, penalties = Patience(), 50.0, []
    for _ in range(11):
        patience.slow_yield(now, 1e-3)
        penalties.append(round((patience.slow_until - now) / (PENALTY * 1e-3)))
        now = patience.slow_until
    assert penalties == [1, 2, 4, 8, 16, 32, 64, 128, 256, 256, 256]
    assert 1 / (penalties[4] * PENALTY) < 0.01  # what the module says: soon less than 1% of the time
    assert patience.level == MAX_LEVEL


@pytest.mark.parametrize(
    ("quiet_s", "level"),
    [
        (0.0, 4),
        (0.99 * FORGIVE_S, 4),
        (1.01 * FORGIVE_S, 3),
        (2.5 * FORGIVE_S, 2),
        (3.5 * FORGIVE_S, 1),
        (1000.0, 1),
    ],
)
def test_quiet_seconds_after_a_penalty_are_forgiven(quiet_s: float, level: int) -> None:
    patience, now = Patience(), 10.0
    for _ in range(3):
        patience.slow_yield(now, LOSS_S)
        now = patience.slow_until
    assert patience.level == 3
    patience.slow_yield(now + quiet_s, LOSS_S)
    assert patience.level == level


def test_waits_that_yielding_has_ended_are_forgiven_too() -> None:
    """A daemon that wakes now and then is no neighbour that computes."""
    patience = Patience()
    for _ in range(3):
        patience.slow_yield(10.0, LOSS_S)
    for _ in range(FORGIVE_WAITS - 1):
        patience.yielded()
    assert patience.level == 3
    patience.slow_yield(10.0, LOSS_S)  # not in a row
    for _ in range(FORGIVE_WAITS - 1):
        patience.yielded()
    assert patience.level == 4
    patience.yielded()
    assert patience.level == 3
    for _ in range(10 * FORGIVE_WAITS):
        patience.yielded()
    assert patience.level == 0


def test_a_loss_during_a_penalty_is_not_forgiven() -> None:
    patience = Patience()
    patience.slow_yield(10.0, LOSS_S)
    patience.slow_yield(10.1, LOSS_S)  # by another thread, which began before
    assert patience.level == 2


@pytest.mark.parametrize("lost_s", [MAX_LOSS_S, 0.5, 60.0, 1e6])
def test_a_process_that_was_stopped_soon_yields_again(lost_s: float) -> None:
    patience = Patience()
    patience.slow_yield(10.0, lost_s)
    assert patience.slow_until == pytest.approx(10.0 + PENALTY * MAX_LOSS_S)
    for _ in range(100):
        patience.slow_yield(patience.slow_until, lost_s)
    last = patience.slow_until
    patience.slow_yield(last, lost_s)
    assert patience.slow_until - last <= 65  # at the very most


def test_the_state_can_be_read() -> None:
    patience = after(80e-6)
    patience.slow_yield(1.0, 1e-3)
    assert repr(patience) == "Patience(mean wait 10 us, level 1)"


# Waiter


class Clock:
    """A machine without luck: each yield takes what the table says, each sleep too."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, yields: list[float], sleeps: list[tuple[float, bool]]
    ) -> None:
        self.now = 1000.0
        self.yields = list(yields)
        self.sleeps = list(sleeps)
        self.there_at = float("inf")
        self.asked: list[float] = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(os, "sched_yield", self.do_yield)
        monkeypatch.setattr(semaphore, "try_wait", lambda _: 0 if self.now >= self.there_at else -1)
        monkeypatch.setattr(semaphore, "block", self.sleep)

    def do_yield(self) -> None:
        self.now += self.yields.pop(0)

    def sleep(self, _: int, timeout_s: float) -> bool:
        self.asked.append(timeout_s)
        length_s, got = self.sleeps.pop(0)
        self.now += length_s
        return got


def test_waiter_takes_a_post_that_is_there_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waiter = Clock(monkeypatch, yields=[], sleeps=[]), Waiter(yields=True)
    waiter.patience.mean_s = GATE_S
    clock.there_at = 0
    assert waiter.wait(0, 1.0)
    assert waiter.patience.mean_s < GATE_S  # it counts as a wait, of no length


def test_it_yields_until_the_answer_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waiter = Clock(monkeypatch, yields=[5e-6] * 5, sleeps=[]), Waiter(yields=True)
    clock.there_at = clock.now + 18e-6
    assert waiter.wait(0, 1.0)
    assert len(clock.yields) == 1
    assert waiter.patience.mean_s == pytest.approx(20e-6 / 8)


def test_it_sleeps_when_the_budget_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, yields=[20e-6] * 3, sleeps=[(300e-6, True)])
    waiter = Waiter(yields=True)
    assert waiter.wait(0, 0.25)
    assert (clock.yields, clock.asked) == ([], [0.25])
    assert waiter.patience.mean_s == pytest.approx(360e-6 / 8)


def test_a_slow_yield_ends_the_yielding_and_the_next_wait_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, yields=[LOSS_S], sleeps=[(1e-3, True), (1e-3, False)])
    waiter = Waiter(yields=True)
    assert waiter.wait(0, 1.0)
    assert waiter.patience.level == 1
    assert not waiter.wait(0, 0.5)
    assert clock.asked == [1.0, 0.5]


def test_slow_yield_counts_even_if_the_post_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waiter = Clock(monkeypatch, yields=[LOSS_S], sleeps=[]), Waiter(yields=True)
    clock.there_at = clock.now + 1e-3
    assert waiter.wait(0, 1.0)
    assert waiter.patience.level == 1


def test_one_that_never_yields_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waiter = Clock(monkeypatch, yields=[], sleeps=[(1e-6, True)]), Waiter(yields=False)
    assert waiter.wait(0, 1.0)
    assert clock.asked == [1.0]


@pytest.mark.parametrize(("text", "yields"), [(None, True), ("adaptive", True), ("block", False)])
def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch, text: str | None, yields: bool) -> None:
    if text is None:
        monkeypatch.delenv("RAYLANE_WAIT", raising=False)
    else:
        monkeypatch.setenv("RAYLANE_WAIT", text)
    assert Waiter().yields is yields
    assert Waiter(yields=not yields).yields is not yields


@pytest.mark.parametrize("text", ["", "spin", "Block"])
def test_a_wrong_word_in_the_environment_is_told(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("RAYLANE_WAIT", text)
    with pytest.raises(ValueError, match=f"RAYLANE_WAIT must be adaptive .* or block, got '{text}'"):
        Waiter()


def made(count: int) -> Segment:
    segment = Segment.make(4096)
    for index in range(count):
        semaphore.init(segment.address + index * SEMAPHORE_BYTES)
    return segment


@pytest.mark.parametrize("yields", [True, False])
def test_a_wait_of_no_time_and_a_wait_in_vain(yields: bool) -> None:
    segment, waiter = made(1), Waiter(yields=yields)
    assert not waiter.wait(segment.address, 0)
    assert not waiter.wait(segment.address, 0.01)
    post(segment.address)
    assert waiter.wait(segment.address, 0)
    assert value(segment.address) == 0


def _echo(pipe: Pipe, path: str, count: int, yields: bool) -> bool:
    segment, waiter = Segment.open(path), Waiter(yields=yields)
    for _ in range(count):
        while not waiter.wait(segment.address, 1.0):
            pass
        post(segment.address + SEMAPHORE_BYTES)
    return waiter.patience.mean_s > 0


@pytest.mark.processes
@pytest.mark.parametrize("yields", [True, False])
def test_two_processes_lose_no_wake_up(yields: bool) -> None:
    segment, waiter = made(2), Waiter(yields=yields)
    child = start(_echo, segment.path, 2000, yields)
    for _ in range(2000):
        post(segment.address)
        while not waiter.wait(segment.address + SEMAPHORE_BYTES, 1.0):
            pass
    assert child.result()


def test_waiting_lets_other_threads_run(eventually: Callable[..., None]) -> None:
    segment, done = made(1), []

    def wait(waiter: Any) -> None:
        while not waiter.wait(segment.address, 1.0):
            pass
        done.append(waiter)

    threads = [threading.Thread(target=wait, args=(Waiter(yields=yields),)) for yields in (True, False)]
    for thread in threads:
        thread.start()
    for count in (1, 2):
        post(segment.address)
        eventually(lambda count=count: len(done) == count)
    for thread in threads:
        thread.join()


def test_the_numbers_agree_with_one_another() -> None:
    assert BUDGET_S < SLOW_YIELD_S < GATE_S < MAX_LOSS_S
    assert waiting.PENALTY << MAX_LEVEL > 100  # else yielding would cost more than it promises

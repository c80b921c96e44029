"""When a doorbell yields and when it sleeps, on waits made up and recorded; that a real one takes what it waits for."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from core.processes import Pipe, start
from raylane.core import native
from raylane.core.memory.segment import Segment
from raylane.core.signals import patience, semaphore
from raylane.core.signals.patience import (
    BUDGETS_NS,
    KEPT_WAITS,
    MAX_LEVEL,
    MAX_LOSS_NS,
    MS,
    PENALTY,
    SLOW_NS,
    US,
    Patience,
    S,
    best_budget_ns,
)
from raylane.core.signals.semaphore import SEMAPHORE_BYTES, post, value

LONGEST = BUDGETS_NS[0]
LOSS_NS = 4 * MS  # a time slice
START_NS = 10 * S


class Neighbour:
    """Run delay that grows with every loss, as beside a process that computes."""

    def __init__(self) -> None:
        self.delay_ns = 1

    def __call__(self) -> int:
        return self.delay_ns


class Machine:
    """Patience that is told of losses to a neighbour."""

    def __init__(self) -> None:
        self.delay = Neighbour()
        self.patience = Patience(run_delay=self.delay)

    def loses(self, now_ns: int, lost_ns: int, *, to_a_process: bool = True) -> None:
        if to_a_process:
            self.delay.delay_ns += lost_ns
        self.patience.review([(lost_ns, lost_ns)], now_ns)


# Budget


@pytest.mark.claim("graphs", "a waiter yields the CPU or sleeps, by the durations of recent waits and yields")
@pytest.mark.parametrize(
    ("waits", "budget_ns"),
    [
        ([], LONGEST),  # the benefit of the doubt
        ([20 * US] * 20, LONGEST),  # whatever covers them all costs the same: the longest takes in later ones too
        ([200 * US] * 20, LONGEST),
        ([1 * MS] * 20, 0),  # yielding first would only add to the cost
        ([600 * US] * 20, 0),
        ([1 * MS] * 2 + [20 * US] * 20, 60 * US),  # two are no habit
        ([1 * MS] * 10 + [20 * US] * 10, 60 * US),
        ([1 * MS] * 10 + [100 * US] * 10, 125 * US),
        ([1 * MS] * 50 + [100 * US] * 10, 0),
        ([3600 * S] + [20 * US] * 5, 60 * US),  # however long it was
    ],
)
def test_budget_is_what_would_have_cost_least(waits: list[int], budget_ns: int) -> None:
    assert best_budget_ns(deque(waits)) == budget_ns


def test_budget_follows_the_recent_waits_only() -> None:
    policy = Patience(run_delay=lambda: 0)
    assert policy.review([(1 * MS, 0)] * KEPT_WAITS, START_NS) == (0, 0)
    assert policy.review([(30 * US, 0)] * (KEPT_WAITS // 16), START_NS)[0] == 0
    assert policy.review([(30 * US, 0)] * KEPT_WAITS, START_NS) == (LONGEST, 0)


def test_budget_that_never_yields_stays_zero() -> None:
    policy = Patience(yields=False)
    assert policy.budget_ns == 0
    assert policy.review([(20 * US, 0)] * 100, START_NS) == (0, 0)


# Pauses


@pytest.mark.claim("graphs", "a waiter yields the CPU or sleeps, by the durations of recent waits and yields")
def test_slow_yield_pause_is_proportional_to_the_loss() -> None:
    for lost_ns in (SLOW_NS + 1, LOSS_NS, MAX_LOSS_NS):
        machine = Machine()
        machine.loses(START_NS, lost_ns)
        assert machine.patience.level == 1
        assert machine.patience.resume_ns == START_NS + PENALTY * lost_ns


def test_slow_yields_double_the_pause_to_a_limit() -> None:
    machine, now, pauses = Machine(), START_NS, []
    for _ in range(11):
        machine.loses(now, 2 * MS)
        pauses.append((machine.patience.resume_ns - now) // (PENALTY * 2 * MS))
        now = machine.patience.resume_ns
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, 256, 256]
    assert 1 / (pauses[4] * PENALTY) < 0.01  # what the module says: soon less than 1% of the time
    assert machine.patience.level == MAX_LEVEL


def test_yield_of_a_sibling_starts_no_pause() -> None:
    machine = Machine()
    for _ in range(100):
        machine.loses(START_NS, 800 * US)
    assert (machine.patience.level, machine.patience.resume_ns) == (0, 0)


@pytest.mark.parametrize("lost_ns", [MAX_LOSS_NS, S // 2, 60 * S, 10**6 * S])
def test_stopped_process_starts_no_pause(lost_ns: int) -> None:
    """It was not runnable: nobody else took its CPU."""
    machine = Machine()
    machine.loses(START_NS, lost_ns, to_a_process=False)
    assert (machine.patience.level, machine.patience.resume_ns) == (0, 0)


def test_kernel_without_run_delays_counts_every_loss() -> None:
    policy = Patience(run_delay=lambda: 0)
    policy.review([(60 * S, 60 * S)], START_NS)
    assert policy.resume_ns == START_NS + PENALTY * MAX_LOSS_NS


@pytest.mark.parametrize(
    ("slept", "yielded", "level"),
    [
        ([40 * US] * 100, [10 * US] * 9000, 2),  # half of the level before, and one for the loss
        ([40 * US] * 100, [38 * US] * 9000, 4),  # no gain
        ([40 * US] * 100, [10 * US] * 20, 4),  # the loss is more than the gain
        ([], [10 * US] * 9000, 4),  # nothing is known about the pause
    ],
)
def test_levels_fall_where_yielding_is_worth_its_loss(slept: list[int], yielded: list[int], level: int) -> None:
    machine, now = Machine(), START_NS
    for _ in range(3):
        machine.loses(now, LOSS_NS)
        now = machine.patience.resume_ns
    assert machine.patience.level == 3
    machine.patience.review([(length, 0) for length in slept] + [(length, 2 * US) for length in yielded], now)
    assert machine.patience.level == 3
    machine.loses(now + 1000 * S, LOSS_NS)  # time without waits proves nothing
    assert machine.patience.level == level
    assert machine.patience.resume_ns == now + 1000 * S + PENALTY * LOSS_NS * 2 ** (level - 1)


def test_run_delay_of_a_thread_never_falls() -> None:
    before = native.run_delay_ns()
    os.sched_yield()
    assert 0 <= before <= native.run_delay_ns()


def test_patience_state_can_be_read() -> None:
    machine = Machine()
    machine.loses(START_NS, LOSS_NS)
    assert repr(machine.patience) == "Patience(budget 0 us, level 1)"


# The environment


@pytest.mark.parametrize(("text", "yields"), [(None, True), ("adaptive", True), ("block", False)])
def test_environment_decides_whether_to_yield(monkeypatch: pytest.MonkeyPatch, text: str | None, yields: bool) -> None:
    if text is None:
        monkeypatch.delenv("RAYLANE_WAIT", raising=False)
    else:
        monkeypatch.setenv("RAYLANE_WAIT", text)
    assert patience.patience().yields is yields


# Doorbells


def made(count: int) -> Segment:
    segment = Segment.make(4096)
    for index in range(count):
        semaphore.init(segment.address + index * SEMAPHORE_BYTES)
    return segment


class Policy:
    """Policy with a fixed budget that keeps the waits it is given. Reviews at once, because every yield is slow."""

    def __init__(self, budget_ns: int, *, slow_ns: int = 0) -> None:
        self.budget_ns = budget_ns
        self.slow_ns = slow_ns
        self.waits: list[tuple[int, int]] = []
        self.resume_ns = 0

    def review(self, waits: list[tuple[int, int]], now_ns: int) -> tuple[int, int]:
        self.waits += waits
        return self.budget_ns, self.resume_ns


YIELDS = pytest.mark.parametrize("yields", [True, False])


def test_doorbell_takes_a_post_that_is_there_at_once() -> None:
    segment, policy = made(1), Policy(LONGEST)
    doorbell = native.Doorbell(segment.memory, policy)
    for take in (lambda: doorbell.wait(1.0), doorbell.glance):
        post(segment.address)
        assert take()
    assert doorbell.consumed == 2
    assert policy.waits == []  # no wait to report


@pytest.mark.claim("graphs", "a waiter sleeps when its budget of yields is spent")
def test_doorbell_sleeps_when_the_budget_is_spent() -> None:
    policy = Policy(1)  # the first yield takes longer
    assert not native.Doorbell(made(1).memory, policy).wait(0.01)
    ((length_ns, longest_ns),) = policy.waits
    assert length_ns - longest_ns >= 9 * MS


def test_doorbell_pauses_after_a_slow_yield() -> None:
    policy = Policy(3600 * S)
    policy.resume_ns = time.monotonic_ns() + 3600 * S
    doorbell = native.Doorbell(made(1).memory, policy)
    for _ in range(1 + native.LOGGED):
        assert not doorbell.wait(0.0)
    first, *others = policy.waits
    assert first[1] > 0  # one yield, which ended the yielding although the budget is an hour
    assert {longest_ns for _, longest_ns in others} == {0}
    assert not doorbell.glance()
    assert len(policy.waits) == 1 + native.LOGGED  # no wait


def test_doorbell_glance_never_sleeps() -> None:
    policy = Policy(1)
    doorbell = native.Doorbell(made(1).memory, policy)
    assert not doorbell.glance()
    assert len(policy.waits) == 1
    policy.budget_ns = 0
    assert not doorbell.glance()  # yields for the budget of before, and gets the new one
    assert not doorbell.glance()
    assert len(policy.waits) == 2
    assert doorbell.consumed == 0


@YIELDS
def test_doorbell_waits_of_no_time_and_in_vain(yields: bool) -> None:
    segment = made(1)
    doorbell = native.Doorbell(segment.memory, Patience(yields=yields))
    assert not doorbell.wait(0)
    assert not doorbell.wait(0.01)
    post(segment.address)
    assert doorbell.wait(0)
    assert (value(segment.address), doorbell.consumed) == (0, 1)
    assert not doorbell.glance()


def test_doorbell_reports_its_waits() -> None:
    policy = Policy(LONGEST, slow_ns=3600 * S)  # else a busy machine makes the policy review at once
    doorbell = native.Doorbell(made(1).memory, policy)
    for _ in range(native.LOGGED):
        assert policy.waits == []
        doorbell.wait(0.0)
    assert len(policy.waits) == native.LOGGED
    assert all(length_ns >= longest_ns > 0 for length_ns, longest_ns in policy.waits)


def test_doorbell_raises_the_error_of_its_policy() -> None:
    class Broken(Policy):
        def review(self, waits: list[tuple[int, int]], now_ns: int) -> tuple[int, int]:
            raise ZeroDivisionError("no idea")

    doorbell = native.Doorbell(made(1).memory, Broken(0))
    for _ in range(native.LOGGED - 1):
        doorbell.wait(0.0)
    with pytest.raises(ZeroDivisionError, match="no idea"):
        doorbell.wait(0.0)


def _echo(pipe: Pipe, paths: tuple[str, str], count: int, yields: bool) -> int:
    mine, other = Segment.open(paths[0]), Segment.open(paths[1])
    doorbell = native.Doorbell(mine.memory, Patience(yields=yields))
    for _ in range(count):
        while not doorbell.wait(1.0):
            pass
        post(other.address)
    return int(doorbell.consumed)


@pytest.mark.processes
@YIELDS
def test_two_processes_lose_no_wake_up(yields: bool) -> None:
    here, there = made(1), made(1)
    doorbell = native.Doorbell(here.memory, Patience(yields=yields))
    child = start(_echo, (there.path, here.path), 2000, yields)
    for _ in range(2000):
        post(there.address)
        while not doorbell.wait(1.0):
            pass
    assert child.result() == 2000


def test_waiting_lets_other_threads_run(eventually: Callable[..., None]) -> None:
    segment, done = made(1), []

    def wait(doorbell: Any) -> None:
        while not doorbell.wait(1.0):
            pass
        done.append(doorbell)

    threads = [
        threading.Thread(target=wait, args=(native.Doorbell(segment.memory, Patience(yields=yields)),))
        for yields in (True, False)
    ]
    for thread in threads:
        thread.start()
    for count in (1, 2):
        post(segment.address)
        eventually(lambda count=count: len(done) == count)
    for thread in threads:
        thread.join()


def test_numbers_agree_with_one_another() -> None:
    assert list(BUDGETS_NS) == sorted(BUDGETS_NS, reverse=True)
    assert LONGEST <= patience.SLEEP_NS < SLOW_NS < MAX_LOSS_NS
    assert patience.PENALTY << MAX_LEVEL > 100  # else yielding would cost more than it promises

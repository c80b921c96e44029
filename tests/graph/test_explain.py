"""Last input of a call, words of `stats`, and critical path of `explain`: where the time of a graph went."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

import raylane
from graph.graphs import make_plan, random_plan, simulated
from raylane.graph.inspect import stats
from raylane.graph.inspect.arrivals import Arrival, Arrivals, CallRecord, DriverRecord
from raylane.graph.inspect.critical_path import critical_path, explain
from raylane.graph.plan.ir import DRIVER, INPUT

CHAIN = make_plan([1, 2], [[INPUT], [0]], names=["A", "B"], labels=["A.f", "B.g"])
CHAIN_CALLS: list[CallRecord] = [(0, 0, 9.0, 10.0, 12.0, 13.0), (1, 0, 9.0, 15.0, 20.0, 22.0)]
CHAIN_RUN: list[DriverRecord] = [(0, 9.5, 25.0)]
CHAIN_PATH = [
    ("input -> A.f", 0.5),
    ("A.f computes", 2.0),
    ("A.f sends", 1.0),
    ("A.f -> B.g", 2.0),
    ("B.g computes", 5.0),
    ("B.g sends", 2.0),
    ("B.g -> driver", 3.0),
]


def path_of(plan: Any, calls: list[CallRecord], run: DriverRecord) -> list[tuple[str, float]]:
    return critical_path(Arrivals(plan, calls, [run]), run[0])


def test_path_of_a_chain_covers_the_whole_time() -> None:
    assert path_of(CHAIN, CHAIN_CALLS, CHAIN_RUN[0]) == CHAIN_PATH


def test_path_follows_the_later_of_two_inputs() -> None:
    join = make_plan([1, 2, 3], [[INPUT], [INPUT], [0, 1]], labels=["A.f", "B.g", "C.h"])
    early, late = (0, 0, 0.0, 1.0, 2.0, 3.0), (1, 0, 0.0, 1.0, 6.0, 7.0)
    calls = [early, late, (2, 0, 0.0, 8.0, 9.0, 10.0)]
    assert [what for what, _ in path_of(join, calls, (0, 0.5, 11.0))][:4] == [
        "input -> B.g",
        "B.g computes",
        "B.g sends",
        "B.g -> C.h",
    ]
    assert Arrivals(join, calls, []).last_input(2, 0) == Arrival(1, 7.0)


def test_path_passes_through_the_call_that_held_the_actor() -> None:
    both = make_plan([1, 1], [[INPUT], [INPUT]], order={1: [0, 1]}, labels=["A.f", "A.g"])
    calls = [(0, 0, 0.0, 1.0, 4.0, 5.0), (1, 0, 5.0, 5.5, 6.0, 7.0)]
    assert path_of(both, calls, (0, 0.5, 8.0)) == [
        ("input -> A.f", 0.5),
        ("A.f computes", 3.0),
        ("A.f sends", 1.0),
        ("A goes on to A.g", 0.5),
        ("A.g computes", 0.5),
        ("A.g sends", 1.0),
        ("A.g -> driver", 1.0),
    ]


@pytest.mark.parametrize("known", [True, False])
def test_path_ends_at_an_actor_that_is_busy(known: bool) -> None:
    one = make_plan([1], [[INPUT]], labels=["A.f"])
    calls: list[CallRecord] = [(0, 0, 0.0, 1.0, 6.0, 7.0)] * known + [(0, 1, 7.0, 7.5, 9.0, 9.5)]
    assert path_of(one, calls, (1, 2.0, 10.0)) == [
        ("A is busy with earlier executions", 5.5),
        ("A.f computes", 1.5),
        ("A.f sends", 0.5),
        ("A.f -> driver", 0.5),
    ]


@pytest.mark.parametrize("seed", range(15))
def test_steps_of_any_path_add_up_to_the_execution(seed: int) -> None:
    rng = random.Random(seed)
    plan = random_plan(rng, tasks=8, bad_orders=0)
    calls, driver = simulated(plan, rng, executions=20)
    # Clocks of hosts that differ by less than a message takes, or by more.
    moved = [(*call[:2], *(at_s + rng.choice([0, 0, 3e-6, -3e-6]) for at_s in call[2:])) for call in calls]
    for records in (calls, moved):
        arrivals = Arrivals(plan, rng.sample(records, len(records)), driver)
        for number, submitted_s, completed_s in driver:
            path = critical_path(arrivals, number)
            assert all(seconds >= 0 for _, seconds in path)
            assert sum(seconds for _, seconds in path) == pytest.approx(completed_s - submitted_s, abs=1e-9)
            assert path[-1][0].endswith("-> driver")


def test_explain_shows_medians_of_the_most_common_path() -> None:
    calls, runs = [], []
    for number, slow_s in enumerate([4.0, 2.0, 6.0]):
        begin_s = 100.0 * number
        calls.append((0, number, begin_s - 1, begin_s + 1, begin_s + 2, begin_s + 2.0))
        calls.append((1, number, begin_s - 1, begin_s + 3, begin_s + 3 + slow_s, begin_s + 3 + slow_s))
        runs.append((number, begin_s, begin_s + 4 + slow_s))
    assert explain(CHAIN, calls, runs).splitlines() == [
        "critical path of 3 executions: 8,000,000.0 us from execute to result (median)",
        "3 executions took this path (medians):",
        " 1,000,000.0 us   12%  input -> A.f",
        " 1,000,000.0 us   12%  A.f computes",
        "         0.0 us    0%  A.f sends",
        " 1,000,000.0 us   12%  A.f -> B.g",
        " 4,000,000.0 us   50%  B.g computes",
        "         0.0 us    0%  B.g sends",
        " 1,000,000.0 us   12%  B.g -> driver",
        "sum over all paths: B.g computes 50%, input -> A.f 12%, A.f computes 12%, A.f -> B.g 12%, B.g -> driver 12%",
    ]


def test_explain_leaves_out_executions_without_all_records() -> None:
    incomplete = [(0, 1, 30.0, 31.0, 32.0, 33.0)]
    text = explain(CHAIN, [*CHAIN_CALLS, *incomplete], [*CHAIN_RUN, (1, 30.5, 40.0)])
    assert text.startswith("critical path of 1 execution: 15,500,000.0 us")
    assert explain(CHAIN, incomplete, []) == (
        "no complete record of an execution: execute the graph, get the results, and ask again"
    )


def test_waits_name_the_driver_until_the_submission() -> None:
    # A and B were ready at 9.0, half a second before the driver submitted.
    assert Arrivals(CHAIN, CHAIN_CALLS, CHAIN_RUN).waits() == {1: {DRIVER: 1.0}, 2: {DRIVER: 0.5, 1: 5.5}}
    assert Arrivals(CHAIN, CHAIN_CALLS, []).waits() == {1: {1: 1.0}, 2: {1: 6.0}}, "the submission is not known"


@pytest.mark.parametrize("seed", range(5))
def test_waits_add_up_to_the_recorded_ones(seed: int) -> None:
    rng = random.Random(seed)
    plan = random_plan(rng, tasks=8, bad_orders=0)
    calls, driver = simulated(plan, rng, executions=20)
    spent = stats.spent_of_records(plan, calls)
    waits = Arrivals(plan, calls, driver).waits()
    for member, (waited_s, *_) in spent.items():
        assert sum(waits[member].values()) == pytest.approx(waited_s)


def test_words_name_shares_and_who_was_waited_for() -> None:
    arrivals = Arrivals(CHAIN, CHAIN_CALLS, CHAIN_RUN)
    assert stats.where_time_went(CHAIN, {1: [1.0, 2.0, 1.0], 2: [12.0, 5.0, 3.0]}, arrivals) == {
        "A": "waited 25% of the time (for driver 25%), computed 50%, sent 25%",
        "B": "waited 60% of the time (for A 55%, for driver 5%), computed 25%, sent 15%",
    }
    nothing = Arrivals(CHAIN, [], [])
    assert stats.where_time_went(CHAIN, {1: [0.0, 0.0, 0.0], 2: [1.0, 1.0, 0.0]}, nothing) == {
        "A": "no call yet",
        "B": "waited 50% of the time, computed 50%, sent 0%",
    }


@pytest.mark.claim("graphs", "counters are always on, also as Ray metrics, and in words where the time went")
@pytest.mark.usefixtures("clean")
def test_running_graph_explains_its_time(workers: list[Any], graph: Callable[..., Any]) -> None:
    g = graph(lambda x: raylane.bind(workers[1].echo, raylane.bind(workers[0].echo, x)))
    for number in range(5):
        assert g.execute(number).get() == number
    lines = g.explain().splitlines()
    assert lines[0].startswith("critical path of 5 executions: ")
    assert any(line.endswith("Worker#2.echo -> driver") for line in lines)
    assert g.explain(last=2).startswith("critical path of 2 executions: ")
    words = g.stats()["time"]
    assert list(words) == ["Worker#1", "Worker#2"]
    assert all("% of the time" in text and "computed" in text for text in words.values())


def test_inline_graph_explains_its_time() -> None:
    class Doubler:
        def double(self, x: int) -> int:
            return 2 * x

    one, other = Doubler(), Doubler()
    with raylane.InputNode() as x:
        node = raylane.bind(other.double, raylane.bind(one.double, x))
    g = raylane.compile(node, backend="inline")
    assert g.explain().startswith("no complete record")
    assert g.execute(1).get() == 4
    assert "Doubler#1.double -> Doubler#2.double" in g.explain()
    assert list(g.stats()["time"]) == ["Doubler#1", "Doubler#2"]
    g.teardown()

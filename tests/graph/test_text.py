from __future__ import annotations

import random
from dataclasses import replace

import pytest

from graph.graphs import make_plan, random_plan
from raylane.graph.inspect.text import WIDTH, arguments_text, describe, expression_text, summary
from raylane.graph.plan.ir import INPUT, Build, Const, Join, Plan, Ref, Select


@pytest.fixture
def plan() -> Plan:
    """input[0] goes to both; B uses what A made, and what it made itself; nobody needs A's second result."""
    first = (INPUT, (("argument", "item", 0),))
    made = make_plan(
        [1, 2, 2, 1],
        [[first], [0, first], [1], [first]],
        names=["Encoder", "Head"],
        labels=["Encoder.forward", "Head.loss", "Head.sample", "Encoder.tidy"],
        outputs=[2],
    )
    tasks = (*made.tasks[:3], replace(made.tasks[3], leaf=True))
    return replace(made, tasks=tasks, output=Ref(made.collects[0]))


def test_describe(plan: Plan) -> None:
    ways = {0: [("ring", "one copy for 2 readers")], 1: [("ring", ""), ("link", "to 10.0.0.7, fanned out there")]}
    assert describe(plan, ways, max_inflight=2) == "\n".join(
        [
            "graph of 2 actors, 4 calls, 3 edges; at most 2 executions in flight",
            "",
            "driver",
            "  sends     e0",
            "  collects  e2",
            "  returns   Head.sample",
            "",
            "Encoder",
            "  1.  forward(input[0])                takes e0       sends e1",
            "  2.  tidy(input[0])                   has input[0]   sends nothing (leaf)",
            "Head",
            "  1.  loss(Encoder.forward, input[0])  takes e0, e1   sends nothing",
            "  2.  sample(Head.loss)                has Head.loss  sends e2",
            "",
            "edges",
            "  e0  input[0]         driver -> Encoder, Head  ring  one copy for 2 readers",
            "  e1  Encoder.forward  Encoder -> Head          ring",
            "                                                link  to 10.0.0.7, fanned out there",
            "  e2  Head.sample      Head -> driver",
        ]
    )


def test_show_wraps_cells_that_are_too_wide() -> None:
    names = [f"Worker#{n}" for n in range(1, 31)]
    plan = make_plan(
        [*range(1, 31), 31],
        [*([(INPUT, (("part", n, 30, 0),))] for n in range(30)), list(range(30))],
        names=[*names, "Head"],
        labels=[*(f"{name}.step" for name in names), "Head.gather"],
    )
    lines = describe(plan, {0: [("ring", "a long note " * 20)]}, max_inflight=1).splitlines()
    assert max(map(len, lines)) <= WIDTH
    at = lines.index("Head")
    assert lines[at + 1].startswith("  1.  gather(Worker#1.step, Worker#2.step,")
    assert lines[at + 2].startswith("      Worker#3.step")


@pytest.mark.parametrize("seed", range(20))
def test_any_plan_is_told_with_all_its_parts(seed: int) -> None:
    plan = random_plan(random.Random(seed), bad_orders=0)
    text = describe(plan)
    assert all(len(line) <= WIDTH for line in text.splitlines())
    for task in plan.tasks:
        assert f"  f{task.index}(" in text
    for edge in plan.edges:
        assert f"\n  e{edge.index} " in text
    for member in plan.members:
        assert f"\n{member}\n" in text


def test_counts_are_in_good_english() -> None:
    assert summary(make_plan([1], [[INPUT]]), 1) == "graph of 1 actor, 1 call, 2 edges; at most 1 execution in flight"
    assert summary(make_plan([1, 2], [[INPUT], [0]])) == "graph of 2 actors, 2 calls, 3 edges"


class Model:
    pass


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (Ref(0), "input"),
        (Ref(1), "A.f0"),
        (Const(3), "3"),
        (Const(None), "None"),
        (Const("a"), "'a'"),
        (Const("x" * 50), "'" + "x" * 24 + "'..."),
        (Const([]), "[]"),
        (Const([1]), "<list>"),
        (Const(10**60), "<int>"),
        (Const(Model()), "<Model>"),
        (Build("list", (Ref(1), Const(1))), "[A.f0, 1]"),
        (Build("tuple", (Ref(1),)), "(A.f0,)"),
        (Build("dict", (Ref(1), Const(1)), ("x", 2)), "{'x': A.f0, 2: 1}"),
        (Select(Join("gather", (Ref(0), Ref(1)), 0), (("item", 1),)), "gather(input, A.f0, axis=0)[1]"),
        (Join("mean", (Ref(0), Ref(1)), None), "mean(input, A.f0)"),
    ],
)
def test_expressions_are_told_as_they_are_written(expression: object, text: str) -> None:
    assert expression_text(make_plan([1], [[INPUT]]), expression) == text  # type: ignore[arg-type]


def test_arguments_are_told_as_in_a_call() -> None:
    plan = make_plan([1], [[INPUT]])
    task = replace(plan.tasks[0], args=(Ref(0), Const(2)), kwargs=(("k", Const("x")),))
    assert arguments_text(plan, task) == "input, 2, k='x'"

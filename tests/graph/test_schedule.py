from __future__ import annotations

import random
from itertools import permutations, product

import pytest

from graph.graphs import make_plan, random_plan
from graph.marked_graph import arcs_of, has_cycle_without_tokens
from graph.simulator import endings, run_at_random
from raylane.errors import GraphDeadlockError
from raylane.graph.plan.ir import INPUT, Plan
from raylane.graph.plan.schedule import check, find_deadlock, order_of, reading_task

# The order


def test_tasks_keep_their_numbers_where_they_are_free() -> None:
    assert order_of([1, 2, 1, 2], [(), (), (), ()]) == ((), (0, 2), (1, 3))


def test_a_task_follows_what_it_needs() -> None:
    assert order_of([1, 1, 2], [{2}, (), ()]) == ((), (1, 0), (2,))


def test_the_order_that_is_wanted_is_taken() -> None:
    assert order_of([1, 2, 1, 2], [(), (), (), ()], {1: [2, 0]}) == ((), (2, 0), (1, 3))


def test_an_order_that_forces_others_is_followed_by_them() -> None:
    # B's tasks 2 and 3 are free of each other, but A uses 3 for 0 and its 0 is wanted before 1, which 2 needs.
    members, needs = [1, 1, 2, 2], [{3}, (), {1}, ()]
    assert order_of(members, needs, {1: [0, 1]})[2] == (3, 2)
    assert find_deadlock(make_plan(members, [[3], [INPUT], [1], [INPUT]], order={1: [0, 1]}), 1, 1) is None


def test_an_order_is_returned_for_what_cannot_be_ordered() -> None:
    assert order_of([1, 2, 2], [{1}, {0}, ()]) == ((), (0,), (2, 1))
    assert order_of([1, 1], [(), {0}], {1: [1, 0]}) == ((), (1, 0))


def test_an_order_that_is_none_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        order_of([1, 1], [(), ()], {1: [0]})


@pytest.mark.parametrize("seed", range(20))
def test_every_member_runs_its_own_tasks_after_what_they_need(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        number = rng.randint(1, 12)
        members = [rng.randint(1, 4) for _ in range(number)]
        names = list(range(number))
        rng.shuffle(names)  # so that tasks do not happen to be numbered in a topological order
        needs = [{names[j] for j in range(names.index(t)) if rng.random() < 0.3} for t in range(number)]
        order = order_of(members, needs)
        for member, tasks in enumerate(order):
            assert sorted(tasks) == [t for t in range(number) if members[t] == member]
            for place, task in enumerate(tasks):
                assert not needs[task] & set(tasks[place:])


# The proof

REVERSED = make_plan([1, 1, 2, 2], [[INPUT], [INPUT], [0], [1, 2]], order={1: [0, 1], 2: [3, 2]}, exact_order=True)
CROSSED = make_plan(
    [1, 1, 2, 2],
    [[INPUT], [2], [INPUT], [0]],
    order={1: [1, 0], 2: [3, 2]},
    exact_order=True,
    names=["Left", "Right"],
    labels=["Left.make", "Left.use", "Right.make", "Right.use"],
)
RING = make_plan(
    [1, 1, 2, 2, 3, 3],
    [[INPUT], [4], [INPUT], [0], [INPUT], [2]],
    order={1: [1, 0], 2: [3, 2], 3: [5, 4]},
    exact_order=True,
)
KNOT = make_plan([1, 2], [[1, INPUT], [0]], order={1: [0], 2: [1]}, exact_order=True)
SELFISH = make_plan([1], [[0, INPUT]], order={1: [0]}, exact_order=True)
LATER = make_plan([1, 1], [[1], [INPUT]], order={1: [0, 1]}, exact_order=True)


@pytest.mark.parametrize(
    ("plan", "cycle"),
    [
        (REVERSED, ["B.f2 waits for B.f3: B runs it first", "B.f3 waits for B.f2: it uses B.f2"]),
        (
            CROSSED,
            [
                "Left.make waits for Left.use: Left runs it first",
                "Left.use waits for Right.make: it reads Right.make from edge 1",
                "Right.make waits for Right.use: Right runs it first",
                "Right.use waits for Left.make: it reads Left.make from edge 2",
            ],
        ),
        (
            RING,
            [
                "A.f0 waits for A.f1: A runs it first",
                "A.f1 waits for C.f4: it reads C.f4 from edge 1",
                "C.f4 waits for C.f5: C runs it first",
                "C.f5 waits for B.f2: it reads B.f2 from edge 3",
                "B.f2 waits for B.f3: B runs it first",
                "B.f3 waits for A.f0: it reads A.f0 from edge 2",
            ],
        ),
        (
            KNOT,
            ["A.f0 waits for B.f1: it reads B.f1 from edge 0", "B.f1 waits for A.f0: it reads A.f0 from edge 2"],
        ),
        (SELFISH, ["A.f0 waits for A.f0: it uses A.f0"]),
        (LATER, ["A.f0 waits for A.f1: it uses A.f1", "A.f1 waits for A.f0: A runs it first"]),
    ],
    ids=["reversed", "crossed", "ring", "knot", "selfish", "later"],
)
@pytest.mark.parametrize(("max_inflight", "slots"), [(1, 1), (3, 1), (3, 3)])
def test_a_graph_that_blocks_itself_is_refused_with_its_cycle(
    plan: Plan, cycle: list[str], max_inflight: int, slots: int
) -> None:
    assert find_deadlock(plan, max_inflight, slots) == cycle
    assert endings(plan, max_inflight, slots, executions=2) == {False}
    with pytest.raises(GraphDeadlockError) as caught:
        check(plan, max_inflight, slots)
    assert caught.value.fields["cycle"] == cycle
    for number, step in enumerate(cycle, 1):
        assert f"\n  {number}. {step}" in str(caught.value)


@pytest.mark.parametrize(
    ("plan", "members", "remedy"),
    [
        (REVERSED, ["B"], "change order= for B from [B.f3, B.f2] to [B.f2, B.f3], or leave it out"),
        (
            CROSSED,
            ["Left", "Right"],
            "change order= for Left from [Left.use, Left.make] to [Left.make, Left.use], or leave it out",
        ),
        (RING, ["A", "B", "C"], "change order= for A from [A.f1, A.f0] to [A.f0, A.f1], or leave it out"),
        (KNOT, ["A", "B"], "no order= can help: a call needs a result that is made from its own"),
        (LATER, ["A"], "change order= for A from [A.f0, A.f1] to [A.f1, A.f0], or leave it out"),
    ],
    ids=["reversed", "crossed", "ring", "knot", "later"],
)
def test_the_refusal_says_which_order_to_change(plan: Plan, members: list[str], remedy: str) -> None:
    with pytest.raises(GraphDeadlockError) as caught:
        check(plan, 2)
    assert caught.value.fields["members"] == members
    assert remedy in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_two_orders_that_are_both_bad_are_both_named() -> None:
    plan = make_plan(
        [1, 1, 2, 2], [[INPUT], [0], [INPUT], [2]], order={1: [1, 0], 2: [3, 2]}, exact_order=True, outputs=[1, 3]
    )
    with pytest.raises(GraphDeadlockError, match=r"change order= for A from .*; change order= for B from "):
        check(plan, 1)


@pytest.mark.parametrize(
    "plan",
    [
        make_plan([1], [[INPUT]]),
        make_plan([1, 2, 3], [[INPUT], [0], [1]]),
        make_plan([1, 2, 1], [[INPUT], [0], [1, 0]]),
        make_plan([1, 2, 3, 4, 1], [[INPUT], [0], [0], [0], [1, 2, 3]]),
        make_plan([1, 1, 2, 2], [[INPUT], [2], [INPUT], [0]], order={1: [0, 1], 2: [3, 2]}, exact_order=True),
    ],
    ids=["one", "chain", "there and back", "diamond", "handed over"],
)
@pytest.mark.parametrize(("max_inflight", "slots"), [(1, 1), (2, 1), (2, 2)])
def test_a_graph_that_runs_is_accepted(plan: Plan, max_inflight: int, slots: int) -> None:
    check(plan, max_inflight, slots)
    assert endings(plan, max_inflight, slots, executions=3) == {True}


@pytest.mark.parametrize(("max_inflight", "slots"), list(product((1, 2, 3), (1, 2, 3))))
def test_the_check_says_what_happens(max_inflight: int, slots: int) -> None:
    """Hundreds of small graphs, good and bad, run in random interleavings against the check."""
    rng = random.Random(100 * max_inflight + slots)
    outcomes = []
    for _ in range(120):
        plan = random_plan(rng, bad_orders=0.4, back_edges=rng.choice([0.0, 0.0, 0.2]))
        runs = {run_at_random(plan, max_inflight, slots, 5, rng) for _ in range(3)}
        assert runs == {find_deadlock(plan, max_inflight, slots) is None}, plan
        outcomes += runs
    assert 20 < sum(outcomes) < 110  # both kinds were really tried


@pytest.mark.parametrize("seed", range(10))
def test_check_agrees_with_the_marked_graph_of_all_waits(seed: int) -> None:
    """Waits across executions, of the driver and for slots never decide, so the check may leave them out."""
    rng = random.Random(seed)
    outcomes = []
    for _ in range(100):
        plan = random_plan(rng, tasks=rng.randint(1, 12), bad_orders=0.3, back_edges=rng.choice([0.0, 0.1]))
        max_inflight, slots = rng.randint(1, 4), rng.randint(1, 4)
        found = find_deadlock(plan, max_inflight, slots) is not None
        assert found == has_cycle_without_tokens(plan, max_inflight, slots), plan
        outcomes.append(found)
    assert 5 < sum(outcomes) < 95


@pytest.mark.claim("graphs", "deadlocks are found when a graph is compiled, by an exact check")
@pytest.mark.parametrize("seed", range(6))
def test_the_check_says_what_happens_in_every_state(seed: int) -> None:
    """Tiny graphs, each over all states that any timing can reach."""
    rng = random.Random(seed)
    for _ in range(25):
        plan = random_plan(rng, tasks=4, members=3, bad_orders=0.4, back_edges=0.1)
        max_inflight, slots = rng.randint(1, 3), rng.randint(1, 2)
        assert endings(plan, max_inflight, slots, 2) == {find_deadlock(plan, max_inflight, slots) is None}, plan


@pytest.mark.parametrize("max_inflight", [1, 2, 3, 8])
def test_the_default_order_never_blocks(max_inflight: int) -> None:
    rng = random.Random(max_inflight)
    for _ in range(100):
        drawn = random_plan(rng, tasks=12)
        needs = [{s for v in task.reads if (s := drawn.values[v].source) != INPUT} for task in drawn.tasks]
        order = order_of([task.member for task in drawn.tasks], needs)
        plan = Plan(**{**vars(drawn), "order": order})
        check(plan, max_inflight)
        assert run_at_random(plan, max_inflight, max_inflight, 2 * max_inflight + 1, rng)


@pytest.mark.parametrize("seed", range(10))
def test_order_of_other_members_adapts_where_possible(seed: int) -> None:
    """With one member's order given, the check refuses only if a run is impossible with every order of the rest."""
    rng = random.Random(seed)
    for _ in range(15):
        drawn = random_plan(rng, tasks=5, members=3)
        members = [task.member for task in drawn.tasks]
        needs = [{s for v in task.reads if (s := drawn.values[v].source) != INPUT} for task in drawn.tasks]
        order = order_of(members, needs, {1: drawn.order[1]})
        accepted = find_deadlock(Plan(**{**vars(drawn), "order": order}), 1, 1) is None
        others = product(*(permutations(tasks) for tasks in drawn.order[2:]))
        possible = any(
            find_deadlock(Plan(**{**vars(drawn), "order": ((), drawn.order[1], *rest)}), 1, 1) is None
            for rest in others
        )
        assert accepted == possible


def test_the_remedy_works() -> None:
    """Whatever random order is refused, what the message proposes is accepted."""
    rng = random.Random(5)
    tried = 0
    for _ in range(200):
        plan = random_plan(rng, bad_orders=0.6)
        try:
            check(plan, 2)
        except GraphDeadlockError as error:
            advice = str(error).splitlines()[-1].split("; ")
        else:
            continue
        order = list(plan.order)
        for one in advice:
            member = plan.members.index(one.split(" from ")[0].removeprefix("change order= for "))
            listed = one.split(" to [")[1].split("]")[0].split(", ")
            order[member] = tuple(plan.labels.index(label) for label in listed)
        check(Plan(**{**vars(plan), "order": tuple(order)}), 2)
        tried += 1
    assert tried > 20


def test_the_first_reader_of_a_member_takes_a_message() -> None:
    plan = make_plan([1, 2, 2], [[INPUT], [0], [0]], order={1: [0], 2: [2, 1]}, exact_order=True)
    edge = next(edge for edge in plan.edges if edge.writer == 1)
    assert reading_task(plan, edge.index, 2) == 2


def test_arcs_carry_the_distance_between_executions() -> None:
    plan = make_plan([1], [[INPUT]])
    tokens = {(arc.before, arc.after): arc.tokens for arc in arcs_of(plan, max_inflight=5, slots=3)}
    assert tokens == {
        (("submit", 0), ("send", 0)): 0,
        (("send", 0), ("submit", 0)): 1,
        (("collect", 1), ("submit", 0)): 5,
        (("task", 0), ("task", 0)): 1,
        (("send", 0), ("task", 0)): 0,
        (("task", 0), ("send", 0)): 3,
        (("task", 0), ("collect", 1)): 0,
        (("collect", 1), ("task", 0)): 3,
    }


@pytest.mark.parametrize(("max_inflight", "slots"), [(0, 1), (1, 0), (-1, 2)])
def test_no_place_at_all_is_a_mistake(max_inflight: int, slots: int) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        find_deadlock(make_plan([1], [[INPUT]]), max_inflight, slots)

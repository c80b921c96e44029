"""Order of each member's tasks, and the proof that a plan cannot deadlock. Pure.

`order_of` is used by `planner`, `check` by `compile` before any actor is called.

**Which waits decide.** A running graph is a marked graph (F. Commoner, A. Holt, S. Even, A. Pnueli, "Marked directed
graphs", J. Comput. Syst. Sci. 5, 1971): it deadlocks if and only if a cycle of events exists in which each waits for
the one before it *in the same execution*. A wait for an earlier execution cannot be part of such a cycle. Those are:

    submit      waits for the end of the execution `max_inflight` earlier, and for the submission before
    a member    begins an execution after it has ended the one before
    a writer    waits for a free slot, that is, for the readers of the execution `slots` earlier

The driver's sends wait for its submission and for each other alone, and for its collecting nothing waits in the same
execution: so neither is on a cycle. What is left are waits of tasks for tasks, and these decide:

    task        waits for the task that its member runs before it
    task        waits for the tasks whose results it uses

So a plan cannot deadlock, with any `max_inflight` and any number of slots, if and only if these waits form no cycle.
The tests compare this with a check of all waits, and with simulated runs in random and in all orders.
"""

from __future__ import annotations

import dataclasses
import graphlib
import heapq
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from raylane.errors import GraphDeadlockError
from raylane.graph.plan.ir import INPUT, Plan


class Wait(NamedTuple):
    """Task `task` begins after task `before` of the same execution has ended."""

    task: int
    before: int
    value: int | None
    """Value of `before` that `task` uses; None if the member's order is the reason."""


def order_of(
    task_members: Sequence[int], needs: Sequence[Collection[int]], user_orders: Mapping[int, Sequence[int]] = {}
) -> tuple[tuple[int, ...], ...]:
    """Return the tasks of every member (the driver, 0, has none) in the order in which it runs them.

    `task_members[t]` is the member that runs task t, `needs[t]` are the tasks whose results t uses. All members follow
    one global order, in which the smallest index comes first where several tasks may be next; so no two members can
    wait for each other. `user_orders` fixes the order of some members and must list each of their tasks once; the
    others adapt to it where that is possible. Otherwise `find_deadlock` finds the cycle: this function always returns.
    """
    before = [set(need) for need in needs]
    for member, tasks in user_orders.items():
        assert sorted(tasks) == [t for t, m in enumerate(task_members) if m == member], f"order of {member}: {tasks}"
        for earlier, later in pairwise(tasks):
            before[later].add(earlier)
    after: list[list[int]] = [[] for _ in before]
    for task, earlier_ones in enumerate(before):
        for earlier_task in earlier_ones:
            after[earlier_task].append(task)
    order: list[list[int]] = [[] for _ in range(max(task_members, default=0) + 1)]
    unplaced = set(range(len(before)))
    ready = [task for task in unplaced if not before[task]]
    heapq.heapify(ready)  # a heap, so that equal plans get equal orders in every process and in every run
    while unplaced:
        # No task is free: the wanted orders contradict the data. Continue with a task that has its data, so that the
        # check can name the cycle in terms of the user's calls.
        if not ready:
            ready = [min((t for t in unplaced if unplaced.isdisjoint(needs[t])), default=min(unplaced))]
        task = heapq.heappop(ready)
        unplaced.remove(task)
        order[task_members[task]].append(task)
        for later in after[task]:
            before[later].remove(task)
            if not before[later] and later in unplaced:
                heapq.heappush(ready, later)
    # Where no valid order exists, the wish of the user stands: the check then names the cycle with those calls.
    return tuple(tuple(user_orders.get(member, tasks)) for member, tasks in enumerate(order))


def reading_task(plan: Plan, edge: int, member: int) -> int:
    """Return the task of a member that reads an edge's message: the first in its order that uses the value."""
    value = plan.edges[edge].value
    readers = [task for task in plan.order[member] if value in plan.tasks[task].reads]
    assert readers, f"edge {edge} goes to {plan.members[member]}, where no task reads value {value}"
    return readers[0]


def waits_of(plan: Plan) -> list[list[Wait]]:
    """Return for each task its waits for other tasks of the same execution."""
    waits: list[list[Wait]] = [[] for _ in plan.tasks]
    for tasks in plan.order:
        for earlier, later in pairwise(tasks):
            waits[later].append(Wait(later, earlier, None))
    for reader in plan.tasks:
        sources = ((value, plan.values[value].source) for value in reader.reads)
        waits[reader.index] += [Wait(reader.index, source, value) for value, source in sources if source != INPUT]
    return waits


def find_deadlock(plan: Plan, max_inflight: int, slots: int) -> list[str] | None:
    """Return None if the graph can never deadlock, whatever the timing; else a cycle of tasks that wait for each other.

    Each step names two tasks and the reason; the second task of a step is the first of the next, and the last step
    leads back to the first. `max_inflight` and `slots` must be 1 or more; their values change nothing (see above).
    """
    cycle = _cycle(plan, max_inflight, slots)
    return None if cycle is None else [_text(plan, wait) for wait in cycle]


def check(plan: Plan, max_inflight: int, slots: int = 1) -> None:
    """Raise GraphDeadlockError, with the cycle and the order to change, if the graph could deadlock.

    The error's field `cycle` holds the steps, `members` the names of the members on the cycle.
    """
    cycle = _cycle(plan, max_inflight, slots)
    if cycle is None:
        return
    steps = [_text(plan, wait) for wait in cycle]
    members = sorted({plan.tasks[wait.task].member for wait in cycle})
    shown = "".join(f"\n  {number}. {step}" for number, step in enumerate(steps, 1))
    raise GraphDeadlockError(
        f"this graph would deadlock in its first execution, because these wait for each other:{shown}\n"
        f"{_remedy(plan, members)}",
        cycle=steps,
        members=[plan.members[member] for member in members],
    )


def _cycle(plan: Plan, max_inflight: int = 1, slots: int = 1) -> list[Wait] | None:
    """Return a cycle of waits, in which the `before` of each is the `task` of the next one; None if there is none."""
    if max_inflight < 1 or slots < 1:
        raise ValueError(f"max_inflight and slots must be 1 or more, got {max_inflight} and {slots}")
    waits = waits_of(plan)
    try:
        graphlib.TopologicalSorter(
            {task: [w.before for w in waits_of_task] for task, waits_of_task in enumerate(waits)}
        ).prepare()
    except graphlib.CycleError as error:
        # The cycle that was found may be a long one: show the shortest on which one of its tasks lies.
        return min((_shortest_cycle(task, waits) for task in sorted(set(error.args[1]))), key=len)
    return None


def _shortest_cycle(start: int, waits: Sequence[Sequence[Wait]]) -> list[Wait]:
    """Return the shortest way from a task, along the tasks that it waits for, back to itself. There must be one."""
    # Breadth first: the first way that returns to `start` is a shortest one.
    ways = deque([wait] for wait in waits[start])
    seen = set()
    while (last := ways[0][-1].before) != start:
        way = ways.popleft()
        if last not in seen:
            seen.add(last)
            ways.extend([*way, wait] for wait in waits[last])
    return ways[0]


def _text(plan: Plan, wait: Wait) -> str:
    member, before = plan.tasks[wait.task].member, plan.tasks[wait.before].member
    names = []
    for task in wait[:2]:
        # A label usually begins with the member's name; where it does not, the name is added.
        label, name = plan.labels[task], plan.members[plan.tasks[task].member]
        names.append(label if label.startswith(name) else f"{label} on {name}")
    if wait.value is None:
        why = f"{plan.members[before]} runs it first"
    elif member == before:
        why = f"it uses {plan.source_label(wait.value)}"
    else:
        edge = next(edge.index for edge in plan.edges if edge.value == wait.value)
        why = f"it reads {plan.source_label(wait.value)} from edge {edge}"
    return f"{names[0]} waits for {names[1]}: {why}"


def _remedy(plan: Plan, members: Sequence[int]) -> str:
    """Return the advice to change the order of one member on the cycle if that is enough, else of several."""
    task_members = [task.member for task in plan.tasks]
    needs = [{s for value in task.reads if (s := plan.values[value].source) != INPUT} for task in plan.tasks]
    orders = dict(enumerate(plan.order))
    # Prefer the smallest change: one member, else all members at once.
    for candidate in [*({m: order for m, order in orders.items() if m != member} for member in members), {}]:
        order = order_of(task_members, needs, candidate)
        if _cycle(dataclasses.replace(plan, order=order)) is None:
            advice = []
            for member, tasks in enumerate(order):
                if tasks != plan.order[member]:
                    now, then = (", ".join(plan.labels[task] for task in each) for each in (plan.order[member], tasks))
                    advice.append(f"change order= for {plan.members[member]} from [{now}] to [{then}], or leave it out")
            return "; ".join(advice)
    return "no order= can help: a call needs a result that is made from its own result. Remove that dependency"

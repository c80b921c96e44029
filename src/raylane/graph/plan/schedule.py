"""Order of each member's tasks, and the proof that a plan cannot deadlock. Pure.

`order_of` is used by `planner`, `check` by `compile` before any actor is called.

A running graph is a marked graph (F. Commoner, A. Holt, S. Even, A. Pnueli, "Marked directed graphs", J. Comput. Syst.
Sci. 5, 1971): each *event* happens once in every execution, and an *arc* from a to b with k tokens means that b of
execution n comes after a of execution n - k. These arcs are the only reasons to wait:

    submit -0-> send e0 -0-> send e1 ... -1-> submit       the driver submits one execution after the other
    collect e -max_inflight-> submit                       and only when there is capacity
    task -0-> next task of the member ... -1-> first       a member runs its tasks in order, then starts again
    writer of an edge's message -0-> its reader            a message is written before it is read
    reader -slots-> writer                                 a slot is free before it is written
    task -0-> task of the same member that uses its result

Theorem: such a system never deadlocks if and only if every directed cycle carries a token. On a cycle without tokens
each event waits for the one before it, in the first execution already. The arcs across executions (`max_inflight`,
`slots`, from one execution to the next) all carry tokens. So, as long as every edge has one message in each execution,
only the orders within one execution matter; the check does not rely on that and uses all arcs.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from raylane.errors import GraphDeadlockError
from raylane.graph.plan.ir import DRIVER, INPUT, Plan

__all__ = ["Arc", "arcs_of", "check", "find_deadlock", "order_of", "reading_task"]

Event: TypeAlias = tuple[str, int]
"""("task", index); ("send", edge) and ("collect", edge) of the driver; ("submit", 0)."""

SUBMIT: Event = ("submit", 0)


@dataclass(frozen=True)
class Arc:
    """Constraint: `after` of execution n waits for `before` of execution n - `tokens`. `why` is the text for people."""

    before: Event
    after: Event
    tokens: int
    why: str


def order_of(
    task_members: Sequence[int], needs: Sequence[Collection[int]], wanted: Mapping[int, Sequence[int]] = {}
) -> tuple[tuple[int, ...], ...]:
    """Return the tasks of every member (the driver, 0, has none) in the order in which it runs them.

    `task_members[t]` is the member that runs task t, `needs[t]` are the tasks whose results t uses. All members follow
    one global order, in which the smallest index comes first where several tasks may be next; so no two members can
    wait for each other. `wanted` fixes the order of some members and must list each of their tasks once; the others
    adapt to it where that is possible. Otherwise `find_deadlock` finds the cycle: this function always returns.
    """
    before = [set(need) for need in needs]
    for member, tasks in wanted.items():
        assert sorted(tasks) == [t for t, m in enumerate(task_members) if m == member], f"order of {member}: {tasks}"
        for earlier, later in pairwise(tasks):
            before[later].add(earlier)
    # Where no valid order exists, the wish of the user stands: the check then names the cycle with those calls.
    order: list[list[int]] = [[] for _ in range(max(task_members, default=DRIVER) + 1)]
    for task in _global_order(before, needs):
        order[task_members[task]].append(task)
    return tuple(tuple(wanted.get(member, tasks)) for member, tasks in enumerate(order))


def _global_order(before: Sequence[Collection[int]], needs: Sequence[Collection[int]]) -> list[int]:
    """Return a topological order by `before`. A cycle is cut at a task whose `needs` are met, if there is one."""
    after: list[list[int]] = [[] for _ in before]
    for task, earlier in enumerate(before):
        for one in earlier:
            after[one].append(task)
    missing = [len(earlier) for earlier in before]
    ready = [task for task, count in enumerate(missing) if count == 0]
    left = set(range(len(before)))
    order = []
    while left:
        if not ready:
            # No task is free: the wanted orders contradict the data. Continue all the same, so that the check can name
            # the cycle in terms of the user's calls.
            ready = [min((t for t in left if left.isdisjoint(needs[t])), default=min(left))]
        # A heap, so that equal plans get equal orders in every process and in every run.
        task = heapq.heappop(ready)
        left.remove(task)
        order.append(task)
        for later in after[task]:
            missing[later] -= 1
            if missing[later] == 0 and later in left:
                heapq.heappush(ready, later)
    return order


def reading_task(plan: Plan, edge: int, member: int) -> int:
    """Return the task of a member that reads an edge's message: the first in its order that uses the value."""
    value = plan.edges[edge].value
    readers = [task for task in plan.order[member] if value in plan.tasks[task].reads]
    assert readers, f"edge {edge} goes to {plan.members[member]}, where no task reads value {value}"
    return readers[0]


def arcs_of(plan: Plan, max_inflight: int, slots: int) -> list[Arc]:
    """Return all reasons to wait, if `slots` messages fit into each edge."""
    return [
        *_driver_arcs(plan, max_inflight),
        *_order_arcs(plan),
        *_edge_arcs(plan, slots),
        *_own_result_arcs(plan),
    ]


def _driver_arcs(plan: Plan, max_inflight: int) -> Iterable[Arc]:
    sends: list[Event] = [("send", edge.index) for edge in plan.edges_from(DRIVER)]
    turn = [SUBMIT, *sends]
    for earlier, later in pairwise(turn):
        yield Arc(
            earlier, later, 0, f"{_name(plan, later)} waits for {_name(plan, earlier)}: the driver sends in this order"
        )
    # The submit lock: one execution is submitted completely before the next one begins.
    yield Arc(turn[-1], SUBMIT, 1, f"{_name(plan, SUBMIT)} waits for the previous submission")
    for edge in plan.edges_to(DRIVER):
        collect: Event = ("collect", edge.index)
        yield Arc(collect, SUBMIT, max_inflight, f"{_name(plan, SUBMIT)} waits for {_name(plan, collect)}")


def _order_arcs(plan: Plan) -> Iterable[Arc]:
    for member, tasks in enumerate(plan.order):
        events: list[Event] = [("task", task) for task in tasks]
        for earlier, later in pairwise(events):
            why = f"{_name(plan, later)} waits for {_name(plan, earlier)}: {plan.members[member]} runs it first"
            yield Arc(earlier, later, 0, why)
        if events:
            why = f"{_name(plan, events[0])} waits for {_name(plan, events[-1])} of the previous execution"
            yield Arc(events[-1], events[0], 1, why)


def _edge_arcs(plan: Plan, slots: int) -> Iterable[Arc]:
    for edge in plan.edges:
        source = plan.values[edge.value].source
        made: Event = ("send", edge.index) if source == INPUT else ("task", source)
        for reader in edge.readers:
            read: Event = (
                ("collect", edge.index) if reader == DRIVER else ("task", reading_task(plan, edge.index, reader))
            )
            writer, reading, value = _name(plan, made), _name(plan, read), plan.source_label(edge.value)
            yield Arc(made, read, 0, f"{reading} waits for {writer}: it reads {value} from edge {edge.index}")
            yield Arc(read, made, slots, f"{writer} waits for {reading}: edge {edge.index} is full")


def _own_result_arcs(plan: Plan) -> Iterable[Arc]:
    for task in plan.tasks:
        for value in task.reads:
            source = plan.values[value].source
            if source != INPUT and plan.tasks[source].member == task.member:
                made: Event = ("task", source)
                used: Event = ("task", task.index)
                why = f"{_name(plan, used)} waits for {_name(plan, made)}: it uses {plan.source_label(value)}"
                yield Arc(made, used, 0, why)


def _name(plan: Plan, event: Event) -> str:
    kind, index = event
    if kind == "task":
        # A label usually begins with the member's name; where it does not, the name is added.
        label, member = plan.labels[index], plan.members[plan.tasks[index].member]
        return label if label.startswith(member) else f"{label} on {member}"
    if kind == "submit":
        return "the driver's submission"
    value = plan.source_label(plan.edges[index].value)
    return f"the driver's sending of {value}" if kind == "send" else f"the driver's collecting of {value}"


def find_deadlock(plan: Plan, max_inflight: int, slots: int) -> list[str] | None:
    """Return None if the graph can never deadlock, whatever the timing; else a shortest cycle of waiting events.

    Each step names two events (member and task, or an action of the driver) and the reason; the second event of a step
    is the first of the next, and the last step leads back to the first. The check is exact: see the module docstring.
    """
    found = _cycle(plan, max_inflight, slots)
    return None if found is None else [arc.why for arc in found]


def check(plan: Plan, max_inflight: int, slots: int | None = None) -> None:
    """Raise GraphDeadlockError, with the cycle and the order to change, if the graph could deadlock.

    `slots` is the number of messages that fit into an edge; by default `max_inflight`, so that no write has to wait.
    The error's field `cycle` holds the steps, `members` the names of the members on the cycle.
    """
    slots = max_inflight if slots is None else slots
    cycle = _cycle(plan, max_inflight, slots)
    if cycle is None:
        return
    members = sorted({plan.tasks[arc.after[1]].member for arc in cycle if arc.after[0] == "task"})
    names = [plan.members[member] for member in members]
    steps = "".join(f"\n  {number}. {arc.why}" for number, arc in enumerate(cycle, 1))
    raise GraphDeadlockError(
        f"this graph would deadlock in its first execution, because these wait for each other:{steps}\n"
        f"{_remedy(plan, members, max_inflight, slots)}",
        cycle=[arc.why for arc in cycle],
        members=names,
    )


def _remedy(plan: Plan, members: Sequence[int], max_inflight: int, slots: int) -> str:
    """Return the advice to change the order of one member on the cycle if that is enough, else of several."""
    task_members = [task.member for task in plan.tasks]
    needs = [{s for value in task.reads if (s := plan.values[value].source) != INPUT} for task in plan.tasks]
    kept = dict(enumerate(plan.order))
    attempts = [{m: order for m, order in kept.items() if m != member} for member in members]
    # Prefer the smallest change: one member, else all members at once.
    for wanted in [*attempts, {}]:
        order = order_of(task_members, needs, wanted)
        if _cycle(dataclasses.replace(plan, order=order), max_inflight, slots) is None:
            advice = []
            for member, tasks in enumerate(order):
                if tasks != plan.order[member]:
                    now, then = (", ".join(plan.labels[task] for task in each) for each in (plan.order[member], tasks))
                    advice.append(f"change order= for {plan.members[member]} from [{now}] to [{then}], or leave it out")
            return "; ".join(advice)
    return "no order= can help: a call needs a result that is made from its own result. Remove that dependency"


def _cycle(plan: Plan, max_inflight: int, slots: int) -> list[Arc] | None:
    """Return a shortest cycle of arcs without tokens; the `before` of each arc is the `after` of the next one."""
    if max_inflight < 1 or slots < 1:
        raise ValueError(f"max_inflight and slots must be 1 or more, got {max_inflight} and {slots}")
    blocking: dict[Event, list[Arc]] = {}
    for arc in arcs_of(plan, max_inflight, slots):
        if arc.tokens == 0:
            blocking.setdefault(arc.after, []).append(arc)
    # First find all events that can never happen; only among them the shortest cycle is searched.
    stuck = _never_reached(blocking)
    cycles = (_shortest_from(event, blocking, stuck) for event in sorted(stuck))
    return min((cycle for cycle in cycles if cycle), key=len, default=None)


def _never_reached(blocking: Mapping[Event, Sequence[Arc]]) -> set[Event]:
    """Return the events on a cycle or behind one: those that are left after all possible events have happened."""
    missing = {event: len(arcs) for event, arcs in blocking.items()}
    after: dict[Event, list[Event]] = {}
    for event, arcs in blocking.items():
        for arc in arcs:
            after.setdefault(arc.before, []).append(event)
    happening = [event for event in after if event not in missing]
    while happening:
        for later in after.get(happening.pop(), []):
            missing[later] -= 1
            if missing[later] == 0:
                happening.append(later)
    return {event for event, count in missing.items() if count}


def _shortest_from(start: Event, blocking: Mapping[Event, Sequence[Arc]], stuck: Collection[Event]) -> list[Arc]:
    """Return the shortest path from an event, along the events it waits for, back to itself; empty if there is none."""
    # Breadth first: the first path that returns to `start` is a shortest one.
    came_by: dict[Event, Arc] = {}
    waiting = deque([start])
    while waiting and start not in came_by:
        for arc in blocking[waiting.popleft()]:
            if arc.before in stuck and arc.before not in came_by:
                came_by[arc.before] = arc
                waiting.append(arc.before)
    if start not in came_by:
        return []
    steps = [came_by[start]]
    while steps[-1].after != start:
        steps.append(came_by[steps[-1].after])
    return steps[::-1]

"""In what order each member runs its tasks, and the proof that a plan can never come to a standstill.

Pure. `order_of` is used by `plan`, `check` by `compile` before anything starts.

A graph in flight is a marked graph (F. Commoner, A. Holt, S. Even, A. Pnueli, "Marked directed graphs", J. Comput.
Syst. Sci. 5, 1971): each *event* happens once in every execution, and an *arc* from a to b with k tokens says that b of
execution n comes after a of execution n - k. Nothing but these arcs makes anybody wait:

    submit -0-> send e0 -0-> send e1 ... -1-> submit       the driver submits, one execution after the other
    collect e -max_inflight-> submit                       and not before there is room
    task -0-> next task of the member ... -1-> first       a member runs its tasks in its order, for ever
    maker of an edge's message -0-> who takes it           a message is there before it is taken
    who takes it -slots-> maker                            a slot is free before it is written
    task -0-> task of the same member that uses its result

Theorem: such a system runs for ever if and only if every directed cycle carries a token; on a cycle without tokens each
event waits for the one before it, in the very first execution already. The arcs across executions (`max_inflight`,
`slots`, the turn from one execution to the next) all carry one. So, as long as every edge has one message in each
execution, the orders within one execution alone decide; the check does not rely on that, but takes all arcs.
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

__all__ = ["Arc", "arcs_of", "check", "find_deadlock", "order_of", "taker_of"]

Event: TypeAlias = tuple[str, int]
"""("task", its index), ("send", edge) and ("collect", edge) of the driver, or ("submit", 0)."""

SUBMIT: Event = ("submit", 0)


@dataclass(frozen=True)
class Arc:
    """`after` of execution n waits for `before` of execution n - `tokens`; `why` says so to people."""

    before: Event
    after: Event
    tokens: int
    why: str


def order_of(
    task_members: Sequence[int], needs: Sequence[Collection[int]], wanted: Mapping[int, Sequence[int]] = {}
) -> tuple[tuple[int, ...], ...]:
    """The tasks of every member (0, the driver, has none) in the order in which it runs them.

    `task_members[t]` is the member that runs task t, `needs[t]` are the tasks whose results t uses. All members follow
    one global order, the smallest index first where several may be next; so no two can wait for each other. `wanted`
    gives the order of some members, each of whose tasks it lists once; the others adapt to it where that is possible.
    Where it is not, `find_deadlock` will find the cycle: this function always returns an order.
    """
    before = [set(need) for need in needs]
    for member, tasks in wanted.items():
        assert sorted(tasks) == [t for t, m in enumerate(task_members) if m == member], f"order of {member}: {tasks}"
        for earlier, later in pairwise(tasks):
            before[later].add(earlier)
    order: list[list[int]] = [[] for _ in range(max(task_members, default=DRIVER) + 1)]
    for task in _global_order(before, needs):
        order[task_members[task]].append(task)
    return tuple(tuple(wanted.get(member, tasks)) for member, tasks in enumerate(order))


def _global_order(before: Sequence[Collection[int]], needs: Sequence[Collection[int]]) -> list[int]:
    """A topological order by `before`. A cycle is cut at a task that has at least what it needs, if there is one."""
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
            ready = [min((t for t in left if left.isdisjoint(needs[t])), default=min(left))]
        task = heapq.heappop(ready)
        left.remove(task)
        order.append(task)
        for later in after[task]:
            missing[later] -= 1
            if missing[later] == 0 and later in left:
                heapq.heappush(ready, later)
    return order


def taker_of(plan: Plan, edge: int, member: int) -> int:
    """The task of a reading member that takes an edge's message: the first in its order that uses the value."""
    value = plan.edges[edge].value
    takers = [task for task in plan.order[member] if value in plan.tasks[task].reads]
    assert takers, f"edge {edge} goes to {plan.members[member]}, where no task reads value {value}"
    return takers[0]


def arcs_of(plan: Plan, max_inflight: int, slots: int) -> list[Arc]:
    """Everything that anybody waits for, with `slots` messages fitting into each edge."""
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
            earlier, later, 0, f"{_name(plan, later)} waits for {_name(plan, earlier)}: they go out in this order"
        )
    yield Arc(turn[-1], SUBMIT, 1, f"{_name(plan, SUBMIT)} waits for the submission before")
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
            why = f"{_name(plan, events[0])} waits for {_name(plan, events[-1])} of the execution before"
            yield Arc(events[-1], events[0], 1, why)


def _edge_arcs(plan: Plan, slots: int) -> Iterable[Arc]:
    for edge in plan.edges:
        source = plan.values[edge.value].source
        made: Event = ("send", edge.index) if source == INPUT else ("task", source)
        for reader in edge.readers:
            taken: Event = ("collect", edge.index) if reader == DRIVER else ("task", taker_of(plan, edge.index, reader))
            maker, taker, value = _name(plan, made), _name(plan, taken), plan.source_label(edge.value)
            yield Arc(made, taken, 0, f"{taker} waits for {maker}: it takes {value} from edge {edge.index}")
            yield Arc(taken, made, slots, f"{maker} waits for {taker}: edge {edge.index} is full")


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
        return _task_name(plan, index)
    if kind == "submit":
        return "the driver's submission"
    value = plan.source_label(plan.edges[index].value)
    return f"the driver's sending of {value}" if kind == "send" else f"the driver's collecting of {value}"


def _task_name(plan: Plan, task: int) -> str:
    """Its label, which usually begins with the member's name, and the member's name if it does not."""
    label, member = plan.labels[task], plan.members[plan.tasks[task].member]
    return label if label.startswith(member) else f"{label} on {member}"


def find_deadlock(plan: Plan, max_inflight: int, slots: int) -> list[str] | None:
    """None if the graph can run for ever, whatever the timing; else a shortest cycle of who waits for whom.

    Each step names two events (member and task, or what the driver sends) and the reason; the second event of a step
    is the first of the next, and the last step leads back to the first. Exact, see the head of this module.
    """
    found = _cycle(plan, max_inflight, slots)
    return None if found is None else [arc.why for arc in found]


def check(plan: Plan, max_inflight: int, slots: int | None = None) -> None:
    """GraphDeadlockError, naming the cycle and the order to change, if the graph could come to a standstill.

    `slots` is how many messages fit into an edge; by default `max_inflight`, so that nobody waits to write.
    The error's field `cycle` holds the steps, `members` the names of the members on it.
    """
    slots = max_inflight if slots is None else slots
    cycle = _cycle(plan, max_inflight, slots)
    if cycle is None:
        return
    members = sorted({plan.tasks[arc.after[1]].member for arc in cycle if arc.after[0] == "task"})
    names = [plan.members[member] for member in members]
    steps = "".join(f"\n  {number}. {arc.why}" for number, arc in enumerate(cycle, 1))
    raise GraphDeadlockError(
        f"this graph would stand still in its first execution, because these wait for one another:{steps}\n"
        f"{_remedy(plan, members, max_inflight, slots)}",
        cycle=[arc.why for arc in cycle],
        members=names,
    )


def _remedy(plan: Plan, members: Sequence[int], max_inflight: int, slots: int) -> str:
    """Which order to change, and to what: of one member on the cycle if that is enough, else of all that must."""
    task_members = [task.member for task in plan.tasks]
    needs = [{s for value in task.reads if (s := plan.values[value].source) != INPUT} for task in plan.tasks]
    kept = dict(enumerate(plan.order))
    attempts = [{m: order for m, order in kept.items() if m != member} for member in members]
    for wanted in [*attempts, {}]:
        order = order_of(task_members, needs, wanted)
        if _cycle(dataclasses.replace(plan, order=order), max_inflight, slots) is None:
            changed = [m for m in range(len(order)) if order[m] != plan.order[m]]
            return "; ".join(_advice(plan, member, order[member]) for member in changed)
    return "no order= can help: a call needs a result that is made from its own; remove that dependency"


def _advice(plan: Plan, member: int, order: Sequence[int]) -> str:
    now, then = (", ".join(plan.labels[task] for task in tasks) for tasks in (plan.order[member], order))
    return f"change order= for {plan.members[member]} from [{now}] to [{then}], or leave it out"


def _cycle(plan: Plan, max_inflight: int, slots: int) -> list[Arc] | None:
    """A shortest cycle of arcs without tokens, each arc's `before` being the next one's `after`."""
    if max_inflight < 1 or slots < 1:
        raise ValueError(f"max_inflight and slots are 1 or more, got {max_inflight} and {slots}")
    blocking: dict[Event, list[Arc]] = {}
    for arc in arcs_of(plan, max_inflight, slots):
        if arc.tokens == 0:
            blocking.setdefault(arc.after, []).append(arc)
    stuck = _never_reached(blocking)
    cycles = (_shortest_from(event, blocking, stuck) for event in sorted(stuck))
    return min((cycle for cycle in cycles if cycle), key=len, default=None)


def _never_reached(blocking: Mapping[Event, Sequence[Arc]]) -> set[Event]:
    """The events that lie on a cycle or behind one: what is left when all that can happen has happened."""
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
    """The shortest way from an event over what it waits for back to itself; empty if there is none."""
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

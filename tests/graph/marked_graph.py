"""The marked graph of a plan: every reason to wait, those across executions included.

`schedule` checks only waits of tasks for tasks within one execution. Tests compare it with this graph, which makes no
use of that reduction: by the theorem of Commoner, Holt, Even and Pnueli (1971) a plan can deadlock if and only if there
is a cycle of arcs without tokens.

    submit -0-> send e0 -0-> send e1 ... -1-> submit       the driver submits one execution after the other
    collect e -max_inflight-> submit                       and only when there is capacity
    task -0-> next task of the member ... -1-> first       a member runs its tasks in order, then starts again
    writer of an edge's message -0-> its reader            a message is written before it is read
    reader -slots-> writer                                 a slot is free before it is written
    task -0-> task of the same member that uses its result
"""

from __future__ import annotations

import graphlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from raylane.graph.plan.ir import DRIVER, INPUT, Plan
from raylane.graph.plan.schedule import reading_task

Event: TypeAlias = tuple[str, int]
"""("task", index); ("send", edge) and ("collect", edge) of the driver; ("submit", 0)."""

SUBMIT: Event = ("submit", 0)


@dataclass(frozen=True)
class Arc:
    """Constraint: `after` of execution n waits for `before` of execution n - `tokens`."""

    before: Event
    after: Event
    tokens: int


def arcs_of(plan: Plan, max_inflight: int, slots: int) -> list[Arc]:
    """Return all reasons to wait, if `slots` messages fit into each edge."""
    return [
        *_driver_arcs(plan, max_inflight),
        *_order_arcs(plan),
        *_edge_arcs(plan, slots),
        *_own_result_arcs(plan),
    ]


def has_cycle_without_tokens(plan: Plan, max_inflight: int, slots: int) -> bool:
    sorter: graphlib.TopologicalSorter[Event] = graphlib.TopologicalSorter()
    for arc in arcs_of(plan, max_inflight, slots):
        if arc.tokens == 0:
            sorter.add(arc.after, arc.before)
    try:
        sorter.prepare()
    except graphlib.CycleError:
        return True
    return False


def _driver_arcs(plan: Plan, max_inflight: int) -> Iterable[Arc]:
    sends: list[Event] = [("send", edge.index) for edge in plan.edges_from(DRIVER)]
    turn = [SUBMIT, *sends]
    for earlier, later in pairwise(turn):
        yield Arc(earlier, later, 0)
    # The submit lock: one execution is submitted completely before the next one begins.
    yield Arc(turn[-1], SUBMIT, 1)
    for edge in plan.edges_to(DRIVER):
        yield Arc(("collect", edge.index), SUBMIT, max_inflight)


def _order_arcs(plan: Plan) -> Iterable[Arc]:
    for tasks in plan.order:
        events: list[Event] = [("task", task) for task in tasks]
        for earlier, later in pairwise(events):
            yield Arc(earlier, later, 0)
        if events:
            yield Arc(events[-1], events[0], 1)


def _edge_arcs(plan: Plan, slots: int) -> Iterable[Arc]:
    for edge in plan.edges:
        source = plan.values[edge.value].source
        made: Event = ("send", edge.index) if source == INPUT else ("task", source)
        for reader in edge.readers:
            read: Event = (
                ("collect", edge.index) if reader == DRIVER else ("task", reading_task(plan, edge.index, reader))
            )
            yield Arc(made, read, 0)
            yield Arc(read, made, slots)


def _own_result_arcs(plan: Plan) -> Iterable[Arc]:
    for task in plan.tasks:
        for value in task.reads:
            source = plan.values[value].source
            if source != INPUT and plan.tasks[source].member == task.member:
                yield Arc(("task", source), ("task", task.index), 0)

"""Records of past calls, and for each call the input that arrived last: the one that the call waited for. Pure.

Used by `stats`, `trace` and `critical_path`. Times are seconds of one clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from raylane.graph.plan.ir import DRIVER, INPUT, Plan
from raylane.graph.plan.schedule import reading_task

CallRecord: TypeAlias = tuple[int, int, float, float, float, float]
"""(task, execution, ready_s, start_s, end_s, sent_s), in seconds of one clock.

A member was ready for the task, started it when all inputs had arrived, ended it, and had sent its results.
"""

DriverRecord: TypeAlias = tuple[int, float, float]
"""(execution, submitted_s, completed_s)."""


class Arrival(NamedTuple):
    """Message that a call, or the driver, received last of all that it needed."""

    source: int
    """Task that sent the message, or INPUT."""
    sent_s: float


class Arrivals:
    """Index of the records of one graph."""

    def __init__(self, plan: Plan, calls: Iterable[CallRecord], executions: Iterable[DriverRecord]) -> None:
        self.plan = plan
        self.calls = {(call[0], call[1]): call for call in calls}
        """Record of each call, by (task, execution)."""
        self.executions = {execution[0]: execution for execution in executions}
        self._sources: dict[int, set[int]] = {task.index: set() for task in plan.tasks}
        """Sources of the messages that each task is the first of its member to read."""
        self._collected: set[int] = set()
        """Sources of the messages that the driver reads."""
        for edge in plan.edges:
            source = plan.values[edge.value].source
            for reader in edge.readers:
                if reader == DRIVER:
                    self._collected.add(source)
                else:
                    self._sources[reading_task(plan, edge.index, reader)].add(source)

    def complete(self, execution: int) -> bool:
        """Return True if there is a record of the execution and of each of its calls."""
        return execution in self.executions and all((task.index, execution) in self.calls for task in self.plan.tasks)

    def last_input(self, task: int, execution: int) -> Arrival | None:
        """Return the last message that a call waited for; None if it needed none, or none has a record."""
        return self._last(self._sources[task], execution)

    def last_result(self, execution: int) -> Arrival | None:
        """Return the last message that the driver waited for; None if it needed none, or none has a record."""
        return self._last(self._collected, execution)

    def _last(self, sources: Iterable[int], execution: int) -> Arrival | None:
        arrivals = []
        for source in sources:
            if source == INPUT and execution in self.executions:
                arrivals.append(Arrival(source, self.executions[execution][1]))
            elif (source, execution) in self.calls:
                arrivals.append(Arrival(source, self.calls[source, execution][5]))
        return max(arrivals, key=lambda arrival: arrival.sent_s, default=None)

    def call_before(self, task: int, execution: int) -> CallRecord | None:
        """Return the record of the call that the same actor ran before; None if there is no record."""
        order = self.plan.order[self.plan.tasks[task].member]
        place = order.index(task)
        # The first call of an execution follows the last one of the execution before it.
        return self.calls.get((order[place - 1], execution if place else execution - 1))

    def member_of(self, source: int) -> int:
        """Return the member that sends the messages of a source."""
        return DRIVER if source == INPUT else self.plan.tasks[source].member

    def waits(self) -> dict[int, dict[int, float]]:
        """Return the seconds that each actor waited, by the member that it waited for.

        Until its execution was submitted an actor waits for the driver; from then on for the sender of the last input.
        If the inputs had arrived before, or their senders have no record, the time counts for the actor itself.
        """
        waits: dict[int, dict[int, float]] = {}
        for task, execution, ready_s, start_s, *_ in self.calls.values():
            member = self.plan.tasks[task].member
            waited = waits.setdefault(member, {})
            submitted_s = self.executions[execution][1] if execution in self.executions else ready_s
            begin_s = min(max(ready_s, submitted_s), start_s)
            last = self.last_input(task, execution)
            sender = member if last is None or last.sent_s <= ready_s else self.member_of(last.source)
            for other, seconds in ((DRIVER, begin_s - ready_s), (sender, start_s - begin_s)):
                if seconds > 0:
                    waited[other] = waited.get(other, 0.0) + seconds
        return waits

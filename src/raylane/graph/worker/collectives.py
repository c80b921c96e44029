"""Calls of collectives in one actor: the functions that its executor calls, and the process groups that they use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from raylane.graph.collectives import GROUPS
from raylane.graph.plan.ir import Plan, Task
from raylane.graph.values import shares


class Collectives:
    """Collectives of one graph in this actor."""

    ended: Callable[[], bool] | None = None
    """Function that says, and is asked while a collective waits, whether the graph has ended."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._groups: dict[tuple[Any, ...], Any] = {}
        """Process group of each set of members and transport. Opens when it is first used."""

    def call(self, plan: Plan, task: Task) -> Callable[..., Any]:
        """Return the function that a task of a collective calls. GraphPlanError if this process lacks the transport."""
        collective = task.collective
        assert collective is not None
        group = None
        if collective.transport in GROUPS:
            # Imports torch, which actors without such collectives may not have loaded.
            from raylane.graph.worker import process_groups

            process_groups.check_available(collective.transport)
            # In the order of the ranks: the same actors in another order are another group.
            key = collective.transport, collective.members
            if key not in self._groups:
                self._groups[key] = process_groups.ProcessGroup(
                    collective.transport, collective.rank, collective.size, self._timeout_s, self._has_ended
                )
            group = self._groups[key]
        if collective.role == "share":
            return functools.partial(shares.share, collective, group)
        names = [plan.members[member] for member in collective.members]
        return functools.partial(shares.combine, collective, names, group)

    def _has_ended(self) -> bool:
        return self.ended is not None and self.ended()

    def miss(self, task: Task, error: BaseException) -> None:
        """Leave the process group of a call that will not run here, because of an error that only this actor has."""
        collective = task.collective
        if collective is not None and collective.transport in GROUPS and collective.role == "combine":
            group = self._groups.get((collective.transport, collective.members))
            if group is not None:  # else the graph has ended
                group.leave(error)

    def close(self) -> None:
        """Close the process groups, without waiting for a member that does not answer."""
        self.ended = None
        groups, self._groups = self._groups, {}  # they refer to this object: a cycle would keep their stores open
        for group in groups.values():
            group.end()

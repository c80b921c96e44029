"""Execution by brute force: a driver and members that do one step at a time, in any order that can happen.

It does not use the theory of marked graphs; tests compare the check of `schedule` with it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from raylane.graph.plan.ir import DRIVER, Edge, Plan


@dataclass
class World:
    """State of a plan that is run. `step` makes one step."""

    plan: Plan
    max_inflight: int
    slots: int
    executions: int
    ran: list[int] = field(default_factory=list)
    """For each member, how many tasks it has run since the start."""
    held: list[set[int]] = field(default_factory=list)
    """For each member, the values it holds of its present execution."""
    boxes: list[dict[int, set[int]]] = field(default_factory=list)
    """For each edge, the messages in it: execution -> readers who have not read it."""
    sent: int = 0
    """How many messages the driver has sent; its submissions are its edges, one after the other."""
    submitted: int = 0
    collected: dict[int, int] = field(default_factory=dict)
    """For each edge to the driver, how many messages it has collected."""

    def __post_init__(self) -> None:
        self.ran = self.ran or [0] * len(self.plan.members)
        self.held = self.held or [set() for _ in self.plan.members]
        self.boxes = self.boxes or [{} for _ in self.plan.edges]
        self.collected = self.collected or {edge.index: 0 for edge in self.plan.edges_to(DRIVER)}

    def key(self) -> object:
        """Return the state as a value; `held` and `boxes` follow from the rest."""
        return tuple(self.ran), self.sent, self.submitted, tuple(self.collected.values())

    def copy(self) -> World:
        return World(
            self.plan,
            self.max_inflight,
            self.slots,
            self.executions,
            list(self.ran),
            [set(held) for held in self.held],
            [{n: set(left) for n, left in box.items()} for box in self.boxes],
            self.sent,
            self.submitted,
            dict(self.collected),
        )

    def finished(self) -> bool:
        tasks_done = all(
            ran == self.executions * len(self.plan.order[m]) for m, ran in enumerate(self.ran) if self.plan.order[m]
        )
        return (
            tasks_done
            and self.submitted == self.executions
            and all(number == self.executions for number in self.collected.values())
        )

    def moves(self) -> list[Callable[[], None]]:
        """Return all steps that are possible next."""
        found: list[Callable[[], None]] = []
        if self._may_send():
            found.append(self._send)
        for edge in self.plan.edges_to(DRIVER):
            if self.collected[edge.index] in self.boxes[edge.index]:
                found.append(lambda index=edge.index: self._collect(index))  # type: ignore[misc]
        for member, order in enumerate(self.plan.order):
            if order and self._may_run(member):
                found.append(lambda member=member: self._run(member))  # type: ignore[misc]
        return found

    # The driver

    def _may_send(self) -> bool:
        edges = self.plan.edges_from(DRIVER)
        if self.submitted == self.executions:
            return False
        if self.sent == 0:
            room = self.submitted - self.max_inflight
            if any(number <= room for number in self.collected.values()):
                return False
        return not edges or len(self.boxes[edges[self.sent].index]) < self.slots

    def _send(self) -> None:
        edges = self.plan.edges_from(DRIVER)
        if edges:
            edge = edges[self.sent]
            self.boxes[edge.index][self.submitted] = set(edge.readers)
        self.sent += 1
        if self.sent >= len(edges):
            self.sent = 0
            self.submitted += 1

    def _collect(self, edge: int) -> None:
        self._take(edge, self.collected[edge], DRIVER)
        self.collected[edge] += 1

    # The members

    def _may_run(self, member: int) -> bool:
        order = self.plan.order[member]
        execution, place = divmod(self.ran[member], len(order))
        if execution == self.executions:
            return False
        task = self.plan.tasks[order[place]]
        for value in set(task.reads) - self.held[member]:
            edge = self._edge_with(value, member)
            if edge is None or execution not in self.boxes[edge.index]:
                return False
        return all(len(self.boxes[edge.index]) < self.slots for edge in self._written_by(task.index))

    def _run(self, member: int) -> None:
        order = self.plan.order[member]
        execution, place = divmod(self.ran[member], len(order))
        task = self.plan.tasks[order[place]]
        for value in set(task.reads) - self.held[member]:
            edge = self._edge_with(value, member)
            assert edge is not None
            self._take(edge.index, execution, member)
            self.held[member].add(value)
        self.held[member] |= {value.index for value in self.plan.values if value.source == task.index}
        for edge in self._written_by(task.index):
            assert execution not in self.boxes[edge.index]
            self.boxes[edge.index][execution] = set(edge.readers)
        self.ran[member] += 1
        if place == len(order) - 1:
            self.held[member] = set()

    def _edge_with(self, value: int, member: int) -> Edge | None:
        """Return the edge that brings a value; None if the member computes it itself (and, if asked, has not yet)."""
        return next((edge for edge in self.plan.edges_to(member) if edge.value == value), None)

    def _written_by(self, task: int) -> list[Edge]:
        return [edge for edge in self.plan.edges if self.plan.values[edge.value].source == task]

    def _take(self, edge: int, execution: int, reader: int) -> None:
        left = self.boxes[edge][execution]
        left.remove(reader)
        if not left:
            del self.boxes[edge][execution]


def run_at_random(plan: Plan, max_inflight: int, slots: int, executions: int, rng: random.Random) -> bool:
    """Return True if all executions finish when the next step is chosen at random."""
    world = World(plan, max_inflight, slots, executions)
    while moves := world.moves():
        rng.choice(moves)()
    return world.finished()


def endings(plan: Plan, max_inflight: int, slots: int, executions: int) -> set[bool]:
    """Return True if all executions finish in every state that can be reached."""
    waiting = [World(plan, max_inflight, slots, executions)]
    seen = {waiting[0].key()}
    found = set()
    while waiting:
        world = waiting.pop()
        number = len(world.moves())
        if number == 0:
            found.add(world.finished())
        for move in range(number):
            following = world.copy()
            following.moves()[move]()
            if following.key() not in seen:
                seen.add(following.key())
                waiting.append(following)
    return found

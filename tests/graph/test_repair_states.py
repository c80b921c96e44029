"""States of the repair of a graph: every order of deaths, restarts, replacements, calls and timeouts up to a bound."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest

from raylane.errors import GraphActorDiedError
from raylane.graph.driver.repair_states import TRANSITIONS, WORKING, RepairEvent, RepairPlan, RepairState

MEMBERS = (1, 2)
STEPS = 12
"""Length of the longest history."""
LOST = GraphActorDiedError("no restart")
"""Reason of a halt."""
SUCCESS = {
    RepairState.SETTLING: RepairEvent.SETTLED,
    RepairState.AWAITING: RepairEvent.RESTARTED,
    RepairState.OPENING: RepairEvent.OPENED,
}


class World:
    """A plan, the processes of two actors, and the step that the repair thread runs."""

    def __init__(self) -> None:
        self.plan = RepairPlan()
        self.process = dict.fromkeys(MEMBERS, 0)
        """Number of the present process of each actor; a death begins the next one."""
        self.open = dict.fromkeys(MEMBERS, 0)
        """Number of the process to which the channels of each actor lead."""
        self.step: tuple[RepairState, int, dict[int, int], dict[int, int]] | None = None
        """(state, round, dead members, processes) at the begin of the step."""

    def moves(self) -> Iterator[str]:
        """Yield what may happen next."""
        for member in MEMBERS:
            yield f"death {member}"
            if member in self.plan.dead and self.plan.state not in (RepairState.OPENING, RepairState.ENDED):
                yield f"replace {member}"
        yield "end"
        if self.step is None:
            if self.plan.state in WORKING:
                yield "begin"
        else:
            yield "finish"
            if self.step[0] is not RepairState.SETTLING:
                yield "timeout"

    def move(self, what: str) -> None:
        verb, _, number = what.partition(" ")
        if verb == "death":
            self.process[int(number)] += 1
            self.plan.died(int(number))
        elif verb == "replace":
            self.plan.replaced(int(number))
        elif verb == "end":
            self.plan.end()
        elif verb == "begin":
            self.step = self.plan.state, self.plan.round, dict(self.plan.dead), dict(self.process)
        else:
            assert self.step is not None
            (state, began, dead, process), self.step = self.step, None
            if verb == "timeout":
                self.plan.finish_step(RepairEvent.LOST, began, LOST)
            elif state is RepairState.OPENING:
                for member, since in dead.items():
                    if since == self.plan.dead.get(member):
                        self.open[member] = process[member]
                    self.plan.opened(member, since)
            else:
                self.plan.finish_step(SUCCESS[state], began)

    def key(self) -> tuple[object, ...]:
        """Return what decides about the future: rounds and processes only by their differences."""
        plan = self.plan
        step = self.step and (
            self.step[0],
            plan.round - self.step[1] == 0,
            *(plan.dead.get(m) == self.step[2].get(m) and m in self.step[2] for m in MEMBERS),
            *(self.process[m] == self.step[3][m] for m in MEMBERS),
        )
        current = tuple(self.process[m] == self.open[m] for m in MEMBERS)
        return plan.state, frozenset(plan.dead), step, current

    def check(self, history: tuple[str, ...]) -> None:
        plan = self.plan
        ended = plan.state is RepairState.ENDED
        # A call is admitted only if all channels lead to the present processes.
        assert plan.admits == (not plan.dead and not ended), history
        assert not plan.admits or self.open == self.process, history
        assert ended or (plan.state in (*WORKING, RepairState.HALTED)) == bool(plan.dead), history
        # A call that is neither admitted nor waits raises a reason.
        assert (plan.reason is not None) == (plan.state is RepairState.HALTED), history


def test_repair_plan_is_right_in_every_order() -> None:
    front: list[tuple[World, tuple[str, ...]]] = [(World(), ())]
    seen = {front[0][0].key()}
    histories = 0
    for _ in range(STEPS):
        later = []
        for world, history in front:
            for what in world.moves():
                histories += 1
                after, longer = copy.deepcopy(world), (*history, what)
                after.move(what)
                after.check(longer)
                if after.key() not in seen:
                    seen.add(after.key())
                    later.append((after, longer))
        front = later
    assert {key[0] for key in seen} == set(RepairState)
    assert histories > 100


def test_repair_plan_can_always_become_intact_again() -> None:
    world = World()
    for what in ("death 1", "begin", "death 2", "finish", "begin", "finish", "begin", "timeout", "replace 2"):
        world.move(what)
    while not world.plan.admits:
        world.move("begin" if world.step is None else "finish")
        world.check(())
    assert world.plan.dead == {}


def test_repair_plan_keeps_a_member_that_died_while_it_joined() -> None:
    plan = RepairPlan()
    plan.died(1)
    plan.finish_step(RepairEvent.SETTLED, plan.round)
    plan.finish_step(RepairEvent.RESTARTED, plan.round)
    since = plan.dead[1]
    plan.died(1)
    plan.opened(1, since)
    assert 1 in plan.dead
    assert plan.state is RepairState.SETTLING


def test_repair_plan_refuses_to_replace_a_living_member() -> None:
    plan = RepairPlan()
    with pytest.raises(KeyError):
        plan.replaced(1)
    plan.died(2)
    with pytest.raises(KeyError):
        plan.replaced(1)


def test_repair_table_answers_every_death_and_every_end() -> None:
    for state in RepairState:
        assert (state, RepairEvent.DEATH) in TRANSITIONS
        assert TRANSITIONS[state, RepairEvent.END] is RepairState.ENDED

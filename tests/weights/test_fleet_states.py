"""Switches of a fleet as a pure model: every order of reports, answers, steps, deaths and silences of three readers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from raylane.weights.state.fleet import CONTACT_S, NO_TARGET, FleetState, Order, Report, SwitchState, Target
from raylane.weights.state.readers import ReaderKey, VersionKey


def key(number: int) -> ReaderKey:
    return ReaderKey("policy", f"reader {number}", "host", number, 1)


@dataclass
class Reader:
    """A reader as `FleetReader` is one, without threads: what it knows, and when it was answered."""

    serving: Target = NO_TARGET
    ready: Target = NO_TARGET
    order: Order | None = None
    answered_s: float = float("-inf")
    failed: int = 0
    turn: int = 0
    alive: bool = True

    def report(self) -> Report:
        self.turn += 1
        return Report(self.turn, self.serving, self.ready, self.failed, "no memory")

    def take_in(self, order: Order, now_s: float) -> None:
        self.order, self.answered_s = order, now_s
        if self.ready not in (self.serving, order.committed, order.proposed) and not order.undecided:
            self.ready = self.serving

    def serves(self, now_s: float) -> Target | None:
        """Return what a step computes with that begins now; None if it serves nothing."""
        if not self.alive or self.order is None or self.order.undecided or now_s - self.answered_s >= CONTACT_S:
            return None
        return self.order.committed if self.order.committed.number else self.serving


@dataclass
class World:
    """A fleet, its readers, and the clock."""

    fleet: FleetState = field(default_factory=lambda: FleetState(0.0))
    readers: list[Reader] = field(default_factory=lambda: [Reader() for _ in range(3)])
    now_s: float = 0.0
    restarts: int = 0

    def ask(self, number: int) -> None:
        """Let a reader report, and get its answer."""
        reader = self.readers[number]
        self.fleet.report(key(number), reader.report(), self.now_s)
        reader.take_in(self.fleet.order(key(number), self.now_s), self.now_s)

    def step(self, number: int) -> None:
        """Let a reader begin a step."""
        reader = self.readers[number]
        target = reader.serves(self.now_s)
        if target is not None and target != reader.serving:
            reader.serving = reader.ready = target

    def state(self) -> object:
        """Return what tells two worlds apart. Readers are alike, so their order does not."""
        fleet, switch = self.fleet, self.fleet.switch
        readers = []
        for number, each in enumerate(self.readers):
            member = fleet._members.get(key(number))
            known = None if member is None else (member.report[1:], self.now_s - member.heard_s)
            takes_part = switch is not None and key(number) in switch.members
            own = (each.serving, each.ready, each.order, self.now_s - each.answered_s, each.failed, each.alive)
            readers.append(repr((own, known, takes_part)))
        begun = None if switch is None else (switch.target, switch.state, switch.end_s - self.now_s)
        return sorted(readers), begun, fleet.committed, fleet.before, fleet.is_decided(self.now_s), self.restarts


def serving_world() -> World:
    """Return a world in which all three serve target 1."""
    world = World()
    for number in range(3):
        world.ask(number)
    world.fleet.expect([key(number) for number in range(3)])
    switch = world.fleet.propose({"policy": VersionKey("life", 1)}, 10, world.now_s)
    for _ in range(4):
        for number in range(3):
            world.ask(number)
            order = world.readers[number].order
            if order is not None and order.proposed is not None:
                world.readers[number].ready = order.proposed
            world.step(number)
    world.fleet.decide(world.now_s)
    assert switch.state is SwitchState.DONE
    return world


def successors(world: World) -> Iterator[World]:
    """Return the worlds after each event that may be next."""

    def after() -> World:
        return copy.deepcopy(world)

    for number, reader in enumerate(world.readers):
        if not reader.alive:
            continue
        new = after()
        new.ask(number)
        yield new
        new = after()
        new.step(number)
        yield new
        proposed = None if reader.order is None else reader.order.proposed
        if proposed is not None and reader.ready != proposed and not reader.failed:
            new = after()
            new.readers[number].ready = proposed
            yield new
            if number == 0:  # the readers are alike
                new = after()
                new.readers[number].failed = proposed.number
                yield new
        if sum(each.alive for each in world.readers) > 1:
            new = after()
            new.readers[number].alive = False
            new.fleet.gone(key(number))
            new.fleet.decide(new.now_s)
            yield new
    if world.now_s < CONTACT_S:  # a silence: the readers that are stopped are those that do not ask afterwards
        new = after()
        new.now_s += CONTACT_S
        new.fleet.decide(new.now_s)
        yield new
    if world.restarts == 0:
        new = after()
        new.restarts, new.fleet = 1, FleetState(new.now_s)
        new.fleet.expect([key(number) for number, each in enumerate(new.readers) if each.alive])
        yield new


def check(world: World) -> None:
    """Nobody serves what was not committed, and after a switch has ended nobody serves anything else."""
    fleet, switch = world.fleet, world.fleet.switch
    served = {target for each in world.readers if (target := each.serves(world.now_s)) is not None}
    assert served <= {Target(1, (("policy", VersionKey("life", 1)),)), Target(2, (("policy", VersionKey("life", 2)),))}
    if switch is not None and switch.state is SwitchState.DONE:
        # What a step computes with that begins now.
        assert served <= {fleet.committed}, "a reader serves the old version after the switch"
    if switch is not None and switch.state in (SwitchState.PREPARING, SwitchState.ABORTED):
        assert served <= {Target(1, (("policy", VersionKey("life", 1)),))}, "a reader serves what was not committed"


@pytest.mark.slow
@pytest.mark.claim("weights", "the readers of a fleet switch together or not at all, whoever dies when")
def test_no_order_of_events_lets_two_versions_be_served() -> None:
    world = serving_world()
    world.fleet.propose({"policy": VersionKey("life", 2)}, CONTACT_S, world.now_s)
    seen, waiting, ends = set(), [world], set()
    while waiting:
        world = waiting.pop()
        check(world)
        for new in successors(world):
            before, after = world.fleet.switch, new.fleet.switch
            if before is not None and after is not None and before.state is not after.state is SwitchState.COMMITTED:
                reports = new.fleet.members()
                assert all(reports[each].ready == after.target for each in after.members & reports.keys())
            state = repr(new.state())
            if state not in seen:
                seen.add(state)
                waiting.append(new)
        if world.fleet.switch is not None:
            ends.add(world.fleet.switch.state)
    assert ends == set(SwitchState)
    assert len(seen) > 1000, "states that were looked at"


def test_readers_learn_after_a_restart_what_was_committed() -> None:
    world = serving_world()
    switch = world.fleet.propose({"policy": VersionKey("life", 2)}, 10, world.now_s)
    for number in range(3):
        world.ask(number)
        world.readers[number].ready = switch.target
    for number in range(3):
        world.ask(number)
    assert switch.state is SwitchState.COMMITTED
    world.ask(0)
    world.step(0)  # the others were not told yet
    world.fleet = FleetState(world.now_s)
    world.fleet.expect([key(number) for number in range(3)])
    world.ask(1)
    assert world.readers[1].serves(world.now_s) is None, "it may have been committed"
    world.ask(2)
    world.ask(0)
    world.ask(1)
    assert {each.serves(world.now_s) for each in (world.readers[0], world.readers[1])} == {switch.target}


def test_reports_of_the_past_do_not_count() -> None:
    fleet = FleetState(0)
    target = Target(3, (("policy", VersionKey("life", 7)),))
    fleet.report(key(0), Report(2, target, target), 1)
    assert not fleet.report(key(0), Report(1, NO_TARGET, NO_TARGET), 2)
    assert fleet.members()[key(0)].serving == fleet.committed == target
    assert fleet.propose({"policy": VersionKey("life", 8)}, 10, 3).target.number == 4
    assert fleet.order(key(0), 3) == Order(target, Target(4, (("policy", VersionKey("life", 8)),)), 10, False)
    fleet.report(key(1), Report(1, target, target), 3)
    fleet.leave(key(1), 5)
    assert fleet.switch is not None
    assert fleet.switch.state is SwitchState.PREPARING, "it was not in the switch"
    assert fleet.gone(key(0))
    assert not fleet.gone(key(0))
    assert fleet.switch.state is SwitchState.ABORTED
    assert fleet.switch.reasons == ["reader 0 has ended"]


def test_reader_that_leaves_holds_nobody_up() -> None:
    fleet = FleetState(0)
    for number in range(2):
        fleet.report(key(number), Report(1, NO_TARGET, NO_TARGET), 1)
    switch = fleet.propose({"policy": VersionKey("life", 1)}, 10, 1)
    fleet.report(key(0), Report(2, NO_TARGET, switch.target), 2)
    assert switch.state is SwitchState.PREPARING
    fleet.leave(key(1), 5)
    fleet.decide(3)
    assert switch.state is SwitchState.COMMITTED
    fleet.report(key(1), Report(4, NO_TARGET, NO_TARGET), 3)
    assert list(fleet.members()) == [key(0)], "a report from before it left"
    fleet.report(key(1), Report(6, NO_TARGET, NO_TARGET), 3)
    assert len(fleet.members()) == 2

"""A fleet: readers of one or several names that switch from one target to the next together, or not at all. Pure.

    switch    PREPARING ──all are ready──> COMMITTED ──all serve it──> DONE
                  └──a reader died, failed or is late──> ABORTED

A *target* is a version for each name, with a number that counts the targets. Each reader reports again and again what
it serves and what it has ready, and the answer (`Order`) says what is committed and what is to be prepared. Reports are
whole, so one that is lost or repeated does no harm.

A reader may serve while it has been answered within `CONTACT_S`. A reader that was not heard of for as long serves
nothing until it has asked, and it then learns what was committed meanwhile: so a switch waits for each reader until it
serves the target, has ended, or was silent for `CONTACT_S`.

A catalogue that was started again learns the target from the reports: the largest number counts. Whether a target that
readers have ready was committed is known when all have reported, or `CONTACT_S` later; those readers wait until then.
Called by `fleets`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from raylane.core.state_table import StateTable, unchanged
from raylane.weights.state.readers import MOST_LEFT, ReaderKey, VersionKey

CONTACT_S = 15.0
"""Seconds without an answer after which a reader serves nothing until it has asked."""


class Target(NamedTuple):
    """Version of each name, which a fleet serves."""

    number: int
    """Number of the target; later ones have larger numbers. 0: what each reader had when it joined."""
    versions: tuple[tuple[str, VersionKey], ...]
    """Names and their versions: numbers alone would begin anew when a name is dropped."""

    @property
    def numbers(self) -> dict[str, int]:
        """Numbers of the versions by name."""
        return {name: version.number for name, version in self.versions}


NO_TARGET = Target(0, ())


class Report(NamedTuple):
    """State of a reader, as it reports it."""

    turn: int
    """Number of the report: Ray runs calls in any order. A reader that joins again goes on with larger ones."""
    serving: Target
    ready: Target
    """Target whose versions are on its host, or what it serves."""
    failed: int = 0
    """Number of the target that it could not prepare."""
    reason: str = ""


class Order(NamedTuple):
    """Answer to a report: what is served, and what is to be prepared."""

    committed: Target
    proposed: Target | None
    """Target to prepare, if there is one."""
    timeout_s: float
    """Seconds in which it is to be prepared."""
    undecided: bool
    """True if a target that the reader has ready may have been committed: it serves nothing meanwhile."""


class SwitchState(enum.Enum):
    """State of a switch."""

    PREPARING = "preparing"
    COMMITTED = "committed"
    ABORTED = "aborted"
    DONE = "done"


class SwitchEvent(enum.Enum):
    """Event of a switch."""

    ALL_READY = enum.auto()
    ALL_SERVE = enum.auto()
    READER_FAILED = enum.auto()
    """A reader died, could not prepare the target, or did not in time."""


TRANSITIONS = StateTable(
    {
        (SwitchState.PREPARING, SwitchEvent.ALL_READY): SwitchState.COMMITTED,
        (SwitchState.PREPARING, SwitchEvent.READER_FAILED): SwitchState.ABORTED,
        (SwitchState.COMMITTED, SwitchEvent.ALL_SERVE): SwitchState.DONE,
        # Once it is committed, a reader that dies is not waited for, and others have nothing to wait for.
        **unchanged(SwitchState.COMMITTED, [SwitchEvent.READER_FAILED]),
        **unchanged(SwitchState.ABORTED, [SwitchEvent.READER_FAILED]),
        **unchanged(SwitchState.DONE, [SwitchEvent.READER_FAILED]),
    }
)


@dataclass
class Switch:
    """A switch to a target, and the readers that take part."""

    target: Target
    members: set[ReaderKey]
    """Readers that had joined when it began; those that join later take what is committed."""
    end_s: float
    """Time until which they may prepare."""
    state: SwitchState = SwitchState.PREPARING
    reasons: list[str] = field(default_factory=list)
    """Why it was aborted."""

    def advance(self, event: SwitchEvent) -> None:
        """Change the state as the table says."""
        self.state = TRANSITIONS[self.state, event]


@dataclass
class _Member:
    report: Report
    heard_s: float


class FleetState:
    """Everything that is known of a fleet. Times are those of any one clock, in seconds."""

    def __init__(self, now_s: float, dropped: int = 0) -> None:
        """Begin to learn of a fleet. Targets up to the number `dropped` are of versions that were dropped."""
        self._dropped = dropped
        self.committed = NO_TARGET
        self.before: Target | None = None
        """Target to which `rollback` goes."""
        self.switch: Switch | None = None
        """The last switch, or the one under way."""
        self._members: dict[ReaderKey, _Member] = {}
        self._left: dict[ReaderKey, int] = {}
        """Turns at which readers have left: reports from before may arrive later."""
        self._began_s = now_s
        self._expected: set[ReaderKey] | None = None
        """Readers of an earlier catalogue that have not reported yet; None until they are known."""

    def expect(self, readers: Iterable[ReaderKey]) -> None:
        """Note the readers of the names that live, when they are known: others have nothing to report."""
        self._expected = set(readers)

    def is_decided(self, now_s: float) -> bool:
        """Return True if nothing is left to learn of what an earlier catalogue has committed."""
        reported = self._expected is not None and self._expected <= self._members.keys()
        return reported or now_s - self._began_s >= CONTACT_S

    def report(self, key: ReaderKey, report: Report, now_s: float) -> bool:
        """Take in what a reader says, which joins with its first report. Return True if others have to hear of it."""
        known = self._members.get(key)
        if max(self._left.get(key, -1), -1 if known is None else known.report.turn) > report.turn:
            return False
        self._members[key] = _Member(report, now_s)
        if report.serving.number > max(self.committed.number, self._dropped):  # an earlier catalogue has committed it
            self.committed, self.before = report.serving, None
        if report.failed and self._preparing(report.failed):
            self._fail(f"{key.label}: {report.reason}")
        self.decide(now_s)
        return known is None or known.report[1:] != report[1:]

    def order(self, key: ReaderKey, now_s: float) -> Order:
        """Return what a reader is to do."""
        member, switch = self._members[key], self.switch
        proposed, left_s = None, 0.0
        if switch is not None and switch.state is SwitchState.PREPARING and key in switch.members:
            proposed, left_s = switch.target, max(0.0, switch.end_s - now_s)
        undecided = member.report.ready.number > self.newest() and not self.is_decided(now_s)
        return Order(self.committed, proposed, left_s, undecided)

    def gone(self, key: ReaderKey) -> bool:
        """Note that a reader has left, or that its process or host has ended. Return True if it was a member."""
        self._expected = None if self._expected is None else self._expected - {key}
        if self._members.pop(key, None) is None:
            return False
        if self.switch is not None and key in self.switch.members and self._preparing(self.switch.target.number):
            self._fail(f"{key.label} has ended")
        return True

    def leave(self, key: ReaderKey, turn: int) -> None:
        """Note that a reader leaves of its own will: a switch goes on without it."""
        self._left[key] = turn
        if len(self._left) > MOST_LEFT:
            del self._left[next(iter(self._left))]
        if self.switch is not None:
            self.switch.members.discard(key)
        self.gone(key)

    def propose(self, versions: Mapping[str, VersionKey], timeout_s: float, now_s: float, stamp: int = 0) -> Switch:
        """Begin a switch to these versions, with the readers that have joined. No other may be preparing.

        `stamp` is larger than those of earlier catalogues, whose targets may be unknown here.
        """
        assert self.switch is None or self.switch.state is not SwitchState.PREPARING, "a switch is being prepared"
        number = 1 + max(self.newest(), stamp, *(each.report.ready.number for each in self._members.values()))
        target = Target(number, tuple(sorted(versions.items())))
        self.switch = Switch(target, set(self._members), now_s + timeout_s)
        self.decide(now_s)
        return self.switch

    def newest(self) -> int:
        """Return the largest number of a target that this state knows."""
        return max(self.committed.number, self._dropped, 0 if self.switch is None else self.switch.target.number)

    def decide(self, now_s: float) -> None:
        """Commit or end the switch under way, if that can be decided now."""
        switch = self.switch
        if switch is None:
            return
        members = {key: self._members[key] for key in switch.members & self._members.keys()}
        if switch.state is SwitchState.PREPARING:
            if all(each.report.ready == switch.target for each in members.values()):
                self.before = self.committed if self.committed.number else None
                self.committed = switch.target
                switch.advance(SwitchEvent.ALL_READY)
            elif now_s >= switch.end_s:
                late = [key for key, each in members.items() if each.report.ready != switch.target]
                self._fail(*(f"{key.label} was not ready in time" for key in late))
        if switch.state is SwitchState.COMMITTED and not self.unsettled(now_s):
            switch.advance(SwitchEvent.ALL_SERVE)

    def unsettled(self, now_s: float) -> list[str]:
        """Return the labels of the readers that may still serve something else than what is committed."""
        return [
            key.label
            for key, each in self._members.items()
            if each.report.serving != self.committed and now_s - each.heard_s < CONTACT_S
        ]

    def members(self) -> dict[ReaderKey, Report]:
        """Return the last reports."""
        return {key: each.report for key, each in self._members.items()}

    def _preparing(self, number: int) -> bool:
        switch = self.switch
        return switch is not None and switch.target.number == number and switch.state is SwitchState.PREPARING

    def _fail(self, *reasons: str) -> None:
        assert self.switch is not None
        self.switch.reasons += reasons
        self.switch.advance(SwitchEvent.READER_FAILED)

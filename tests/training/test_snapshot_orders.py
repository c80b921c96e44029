"""Snapshots of two ranks in memory, as a model: every order of steps, copies, reads and deaths up to a bound.

The ledger of versions, the choice of the snapshot and the number of versions are those of the product.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
from tests.weights.test_ledger import registration

from raylane.training.run.snapshots import HELD_SNAPSHOTS, Snapshot, usable, versions_to_keep
from raylane.weights.service.answers import version_info
from raylane.weights.state.ledger import Ledger
from raylane.weights.state.readers import NamedReaders

RANKS = (0, 1)
DEPTH = 18
"""Number of events in each order, the deaths included."""
DEATHS = 2


class Run:
    """A run of two ranks, which takes a snapshot every so many steps."""

    def __init__(self, every: int, in_flight: int) -> None:
        self.every, self.in_flight = every, in_flight
        self.ledger = Ledger("snapshots")
        self.sent = self.ran = self.read = self.deaths = self.taken = 0
        self.copying: dict[int, int] = {}
        """Version that each rank is copying."""
        self.after, self.used = 0, None
        self.held: int | None = None
        self.best = 0
        """Largest step to which the run could have gone back."""
        self._register()

    def _register(self) -> None:
        start = self.ledger.start
        ended = [] if start is None else [each.publisher.token for each in start.members.values()]
        keep = versions_to_keep(self.in_flight, self.every)
        for rank in RANKS:
            self.ledger.register(registration(rank, 2, f"start {self.deaths}")._replace(keep=keep), ended, 1)

    def infos(self) -> list[Any]:
        return [version_info(self.ledger, version, NamedReaders(), 0.0) for version in self.ledger.versions]

    def usable(self) -> Snapshot | None:
        return usable(self.infos(), self.read, self.after, self.used)

    def events(self) -> list[str]:
        """Return what may happen next."""
        possible = [f"copied {rank}" for rank in self.copying]
        possible += ["send"] if self.sent - self.read < self.in_flight else []
        # The update waits for the copies of the rank, and every step needs both ranks.
        possible += ["run"] if self.ran < self.sent and not self.copying else []
        possible += ["read"] if self.read < self.ran else []
        return possible + (["death"] if self.deaths < DEATHS else [])

    def happen(self, event: str) -> None:
        kind, *of_rank = event.split()
        if kind == "send":
            self.sent += 1
        elif kind == "read":
            self.read += 1
        elif kind == "copied":
            rank = int(of_rank[0])
            self.ledger.done(self.copying.pop(rank), rank)
        elif kind == "run":
            self.ran += 1
            if self.ran % self.every == 0:
                self._take()
        else:
            self._go_back()

    def _take(self) -> None:
        self.taken += 1
        if self.held is not None and self.taken == 1:
            self.ledger.hold(self.held, "run")
        elif self.held is not None and self.taken > HELD_SNAPSHOTS:
            self.ledger.release(self.held, "run")
            self.held = None
        assert self.ledger.start is not None
        begun = [self.ledger.begin(self.ledger.start, rank, self.ran) for rank in RANKS]
        self.copying = {rank: version.number for rank, version in enumerate(begun) if version is not None}
        assert len(self.copying) == 2

    def _go_back(self) -> None:
        """A rank dies: all copies end, and both ranks register again."""
        self.deaths += 1
        self.copying = {}
        snapshot = self.usable()
        self._register()
        self.after = max((each.number for each in self.infos()), default=0)
        self.used = None if snapshot is None else snapshot.version
        self.held, self.taken = self.used, 0
        self.sent = self.ran = self.read = 0 if snapshot is None else snapshot.step

    def check(self) -> None:
        found = self.usable()
        step = 0 if found is None else found.step
        assert step <= self.read, "only steps whose metrics are recorded"
        assert step >= self.best, "a snapshot to which the run could go back is lost"
        if not self.copying and self.ran == self.read:
            assert step == self.read - self.read % self.every, "the newest snapshot is used"
        self.best = step


class Order(NamedTuple):
    """State after an order of events; orders with equal states go on equally."""

    counts: tuple[int, ...]
    versions: tuple[tuple[int, int, str], ...]
    copying: tuple[tuple[int, int], ...]
    held: int | None


def order_of(run: Run) -> Order:
    """Return what decides how a run goes on."""
    versions = tuple((each.number, each.step, each.state) for each in run.infos())
    counts = run.sent, run.ran, run.read, run.deaths, run.taken, run.after, run.used or 0, run.best
    return Order(counts, versions, tuple(sorted(run.copying.items())), run.held)


@pytest.mark.parametrize(("every", "in_flight"), [(1, 1), (1, 2), (2, 2), (1, 3), (3, 2)])
def test_no_order_of_events_loses_a_usable_snapshot(every: int, in_flight: int) -> None:
    seen: set[Order] = set()
    reached = [Run(every, in_flight)]
    for _ in range(DEPTH):
        following = []
        for run in reached:
            for event in run.events():
                then = copy.deepcopy(run)
                then.happen(event)
                then.check()
                if order_of(then) not in seen:
                    seen.add(order_of(then))
                    following.append(then)
        reached = following
    assert any(run.deaths == DEATHS and run.best for run in reached)

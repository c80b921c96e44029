"""Fleets of a catalogue: waits for readers and for callers of a switch. All decisions are those of `state.fleet`.

reader's thread    report ──> catalogue ... waits for a change, at most ANSWER_S ... order ──> reader's thread
driver             switch ──> catalogue ... until all serve the target ...           result ──> driver
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from raylane.core.deadline import Deadline
from raylane.errors import WeightsLostError, WeightsSwitchError, WeightsTimeoutError
from raylane.weights.state.fleet import CONTACT_S, FleetState, Order, Report, SwitchState, Target
from raylane.weights.state.readers import ReaderKey, VersionKey

ANSWER_S = 4.0
"""Seconds after which a reader that waits for an order is answered: well before `CONTACT_S`."""
Names = tuple[str, ...]
"""Names of the weights of a fleet, sorted."""


class Versions(Protocol):
    """Methods of the catalogue that fleets call."""

    def living(self, names: Names) -> set[ReaderKey]:
        """Return the readers of these names."""

    def have(self, versions: Mapping[str, VersionKey]) -> bool:
        """Return True if all these versions are there still."""

    async def survivors(self, names: Names) -> set[ReaderKey]:
        """Wait until the readers of an earlier catalogue are known; return them."""

    async def hold_exactly(self, versions: Mapping[str, int], holder: str, deadline: Deadline) -> dict[str, VersionKey]:
        """Wait for these versions and hold them. WeightsVersionError if one is gone, and none is held then."""

    async def let_go(self, versions: Mapping[str, int], holder: str) -> None:
        """Let versions go."""


class _Fleet:
    """One fleet, and the event for which its readers and callers wait."""

    def __init__(self, dropped: int = 0) -> None:
        self.state = FleetState(time.monotonic(), dropped)
        self.replaced = False
        """True if one of its names was dropped: another state takes its place."""
        self.changed = asyncio.Condition()
        self.switching = asyncio.Lock()
        """Held during a switch."""
        self.holders: dict[Target, str] = {}
        """Under which text the versions of each target are held."""

    async def notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def wait(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until the condition is true; return False if it is not within the timeout. Looks again each second."""
        deadline = Deadline(timeout_s)
        async with self.changed:
            while not condition():
                left_s = deadline.left_s()
                if left_s == 0:
                    return False
                try:  # states change with the time, too
                    async with asyncio.timeout(1.0 if left_s is None else min(left_s, 1.0)):
                        await self.changed.wait()
                except TimeoutError:
                    self.state.decide(time.monotonic())
        return True


class Fleets:
    """Fleets of all names of a catalogue. Belongs to its event loop."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._fleets: dict[Names, _Fleet] = {}
        self._tasks: set[Any] = set()
        self._ended = False

    def _fleet(self, names: Names) -> _Fleet:
        if names not in self._fleets:
            self._fleets[names] = fleet = _Fleet()
            task = asyncio.ensure_future(self._expect(names, fleet))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return self._fleets[names]

    async def _expect(self, names: Names, fleet: _Fleet) -> None:
        fleet.state.expect(await self._versions.survivors(names[:1]))  # a member has the key of its first reader
        await fleet.notify()

    async def report(self, names: Names, key: ReaderKey, report: Report, seen: Order | None) -> Order:
        """Take in what a reader says; return its order as soon as that is another one than it has `seen`."""
        await self.tell(names, key, report)
        fleet = self._fleet(names)

        def order() -> Order:
            return fleet.state.order(key, time.monotonic())

        def other() -> bool:
            return (
                self._ended
                or fleet.replaced
                or key not in fleet.state.members()
                or seen is None
                or _differ(order(), seen)
            )

        await fleet.wait(other, ANSWER_S)
        if fleet.replaced or key not in fleet.state.members():  # nobody waits for the answer, unless its host came back
            raise WeightsLostError(f"the reader {key.label} counted as ended. Report again")
        return order()

    async def tell(self, names: Names, key: ReaderKey, report: Report) -> None:
        """Take in what a reader says, without an answer."""
        fleet = self._fleet(names)
        if fleet.state.report(key, report, time.monotonic()):
            await fleet.notify()

    async def leave(self, names: Names, key: ReaderKey, turn: int) -> None:
        """Forget a reader that has left at this turn."""
        fleet = self._fleet(names)
        fleet.state.leave(key, turn)
        fleet.state.decide(time.monotonic())
        await fleet.notify()

    async def end(self) -> None:
        """Answer all readers: the catalogue ends."""
        self._ended = True
        for fleet in self._fleets.values():
            await fleet.notify()

    async def dropped(self, name: str) -> None:
        """Begin anew with the fleets of a name: the numbers of its versions begin anew."""
        for names, fleet in list(self._fleets.items()):
            if name in names:
                highest = max([fleet.state.newest(), *(each.ready.number for each in fleet.state.members().values())])
                self._fleets[names] = _Fleet(highest)
                self._fleets[names].state.expect([])
                fleet.replaced = True
                for target, holder in fleet.holders.items():  # versions of the other names
                    await self._versions.let_go(target.numbers, holder)
                await fleet.notify()

    async def readers_ended(self) -> None:
        """Look which readers have ended."""
        for names, fleet in list(self._fleets.items()):
            living = self._versions.living(names)
            await self._gone(fleet, [key for key in fleet.state.members() if key not in living])

    @staticmethod
    async def _gone(fleet: _Fleet, keys: Iterable[ReaderKey]) -> None:
        members = [key for key in keys if fleet.state.gone(key)]
        if members:
            fleet.state.decide(time.monotonic())
            await fleet.notify()

    async def state(self, names: Names) -> tuple[Target, Target | None, dict[str, Report]]:
        """Return what is committed, what was before, and the last report of each reader by its label."""
        state = self._fleet(names).state
        return state.committed, state.before, {key.label: each for key, each in state.members().items()}

    async def switch(
        self, names: Names, versions: dict[str, int] | None, readers: int, timeout_s: float | None
    ) -> Target:
        """Let all readers switch to these versions (None: to those before), or none; return the target.

        Waits for so many readers to join, and for a switch under way.
        """
        fleet, deadline = self._fleet(names), Deadline(timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await fleet.switching.acquire()
        except TimeoutError:
            raise WeightsTimeoutError(
                f"another switch of {_listed(names)} has not ended in {timeout_s:.1f} s"
            ) from None
        try:
            return await self._switch(names, fleet, versions, readers, deadline)
        finally:
            fleet.switching.release()

    async def _switch(
        self, names: Names, fleet: _Fleet, versions: dict[str, int] | None, readers: int, deadline: Deadline
    ) -> Target:
        state = fleet.state
        if not await fleet.wait(lambda: state.is_decided(time.monotonic()), max(deadline.left_s() or 0, CONTACT_S)):
            raise WeightsTimeoutError(
                f"the readers of {_listed(names)} have not come back after a restart of the service"
            )
        if versions is None:
            if state.before is None:
                raise WeightsSwitchError(
                    f"{_listed(names)} cannot go back: no target before {_text(state.committed)} is held"
                )
            versions = state.before.numbers
        if not await fleet.wait(lambda: len(state.members()) >= readers, deadline.left_s()):
            raise WeightsTimeoutError(
                f"{len(state.members())} of {readers} readers of {_listed(names)} have joined the fleet within "
                f"{deadline.timeout_s:.1f} s. Start them, or ask for fewer"
            )
        if state.committed.numbers != versions or not self._versions.have(dict(state.committed.versions)):
            await self._prepare(names, fleet, versions, deadline)
        if not await fleet.wait(lambda: not state.unsettled(time.monotonic()), deadline.left_s()):
            late = ", ".join(state.unsettled(time.monotonic()))
            raise WeightsTimeoutError(
                f"{_listed(names)} switched to {_text(state.committed)}, but these readers have not come to the end of "
                f"their step within {deadline.timeout_s:.1f} s, and switch there: {late}"
            )
        state.decide(time.monotonic())
        return state.committed

    async def _prepare(self, names: Names, fleet: _Fleet, versions: dict[str, int], deadline: Deadline) -> None:
        """Let all readers prepare these versions, and commit; or raise the reason why not."""
        state = fleet.state
        holder = f"fleet {secrets.token_hex(4)}"
        keys = await self._versions.hold_exactly(versions, holder, deadline)
        if fleet.replaced:
            await self._versions.let_go(versions, holder)
            raise _dropped(names)
        left_s = deadline.left_s()
        switch = state.propose(keys, 1e9 if left_s is None else left_s, time.monotonic(), time.time_ns())
        fleet.holders[switch.target] = holder
        await fleet.notify()
        await fleet.wait(lambda: fleet.replaced or switch.state is not SwitchState.PREPARING, None)
        if fleet.replaced:
            raise _dropped(names)
        kept = {state.committed, state.before}
        for target in [each for each in fleet.holders if each not in kept]:
            await self._versions.let_go(target.numbers, fleet.holders.pop(target))
        await fleet.notify()
        if switch.state is SwitchState.ABORTED:
            raise WeightsSwitchError(
                f"{_listed(names)} did not switch to {_text(switch.target)}: {'; '.join(switch.reasons)}. All readers "
                f"go on with {_text(state.committed)}; try again"
            )


def _differ(order: Order, seen: Order) -> bool:
    return order._replace(timeout_s=0) != seen._replace(timeout_s=0)


def _listed(names: Names) -> str:
    return ", ".join(map(repr, names))


def _dropped(names: Names) -> WeightsLostError:
    return WeightsLostError(f"a name of the fleet of {_listed(names)} was dropped during the switch. Publish again")


def _text(target: Target) -> str:
    if not target.number:
        return "what each has"
    return ", ".join(f"version {number} of {name!r}" for name, number in target.numbers.items())

"""The catalogue: one Ray actor for the names of a job. It keeps the ledgers, and waits on behalf of its callers.

All decisions are those of `ledger`; this actor adds deadlines, the keepers, and the end of the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raylane import _ray
from raylane.core.deadline import Deadline
from raylane.errors import WeightsLostError, WeightsTimeoutError
from raylane.weights.layout.boxes import host_of
from raylane.weights.memory.slots import SlotPlace
from raylane.weights.service.actors import NAMESPACE, actor_names, own_error, start_actor
from raylane.weights.service.answers import GenerationKey, VersionInfo, VersionOffer, WriteOrder, version_info
from raylane.weights.service.copies import PAUSE_S, Copies, answered, copy_further
from raylane.weights.service.fleets import Fleets, Names
from raylane.weights.service.keeper import Incarnation, Keeper, PartKind, Turn, when_job_ends
from raylane.weights.service.lag_metrics import report_lags
from raylane.weights.service.reader_watch import ANSWER_S, CatalogueEnded, Leases, host_lives
from raylane.weights.state.ledger import Generation, Ledger, Version, VersionState
from raylane.weights.state.readers import LeaseEvent, NamedReaders, ReaderInfo, ReaderKey, VersionKey
from raylane.weights.state.starts import PublisherKey, RankKey, RankRegistration, StartKey, StartState

KEEPER_NAME = "keeper of "
"""Beginning of the name of a keeper's actor; the rest is its job, or "all", and its host."""
END_S = 10.0
"""Seconds in which keepers must have ended."""
POLL_S = 0.05
"""Seconds between two looks whether they have."""
_T = TypeVar("_T")


@dataclass
class _NamedWeights:
    """One name: its ledger, its readers, and the event that callers wait for."""

    ledger: Ledger
    copies: Copies
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    making: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    """Locks by host, held while slots are made there."""
    used_parts: dict[str, list[PartKind]] = field(default_factory=dict)
    """Parts in use that the keeper of each host was told last."""
    readers: NamedReaders = field(default_factory=NamedReaders)
    registering: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a registration is decided."""
    dropped: bool = False


def _kind(generation: Generation, part: str) -> PartKind:
    nbytes = 0 if generation.stored.on_device else generation.part_bytes(part)
    return PartKind(part, len(generation.ranks_of(part)), nbytes, generation.boxes_digest(part))


async def _answered(call: Any) -> None:
    """Wait for a call of a keeper, which may die meanwhile."""
    with contextlib.suppress(ray.exceptions.RayError):
        await call


class Catalogue:
    """Actor with the ledgers of all names. Its methods are coroutines of one event loop, so they need no lock."""

    def __init__(self, job: str | None) -> None:
        """Belong to a job (hexadecimal id), and end with it; None for names that outlive their job."""
        self._entries: dict[str, _NamedWeights] = {}
        self._keepers: dict[str, Any] = {}
        self._job = job
        self._incarnation = Incarnation(time.time_ns(), secrets.token_hex(8))
        self._turns = 0
        """Number of calls of keepers whose order matters."""
        self._tasks: set[Any] = set()
        """Tasks that wait for the end of keepers; an event loop keeps no tasks."""
        self._leases = Leases(self._keeper, host_lives, self._reader_keys, self._join, self._advance)
        self._fleets = Fleets(self)
        self._recovery: asyncio.Task[None] | None = None
        """Search for the readers of an earlier catalogue, which the first name begins."""
        self._has_predecessor = False
        self._ended = False
        if job is not None:
            when_job_ends(job, self._end)

    # Trainers

    async def register(self, name: str, registration: RankRegistration, max_lag: int | None) -> StartKey:
        """Take a rank in; return the start of the trainer to which it belongs. The last rank decides on `max_lag`."""
        entry = self._named(name)
        async with entry.registering:
            asked = [] if entry.ledger.start is None else entry.ledger.start.asked(registration)
            hosts = {publisher.host for publisher in asked}
            answers = [self._ended_publishers(host, [each for each in asked if each.host == host]) for host in hosts]
            ended = {token for tokens in await asyncio.gather(*answers) for token in tokens}
            self._check_dropped(entry)
            start = entry.ledger.register(registration, ended, time.time_ns())
        entry.readers.max_lag = max_lag
        await self._notify(entry)
        return start.key

    async def _ended_publishers(self, host: str, publishers: list[PublisherKey]) -> list[str]:
        """Return the tokens of publishers whose processes have ended. Those of a silent host count as living."""
        with contextlib.suppress(TimeoutError, ray.exceptions.RayError):
            ended: list[str] = await asyncio.wait_for(self._keeper(host).ended.remote(publishers), ANSWER_S)
            return ended
        return [] if await host_lives(host) else [publisher.token for publisher in publishers]

    async def close_publisher(self, name: str, token: str) -> None:
        """Note that a publisher publishes no more, so that another one may take its place."""
        if entry := self._entries.get(name):
            entry.ledger.close(token)
            await self._notify(entry)

    async def begin(
        self, name: str, key: RankKey, known: GenerationKey | None, step: int, timeout_s: float | None
    ) -> WriteOrder:
        """Wait until all ranks have registered and have published the steps before; return what this rank writes."""
        entry, deadline = self._entry(name), Deadline(timeout_s)
        ledger, start, rank = entry.ledger, entry.ledger.current(key), key.rank

        def unregistered() -> str:
            return f"ranks {start.missing()} of {start.world} have not registered for {name!r}"

        def missing() -> str:
            version = ledger.open_version()
            ranks = version.missing() if version is not None else []
            return f"ranks {ranks} have not published step {version.step if version else step} of {name!r}"

        opened = functools.partial(start.of_open, key)
        await self._wait(entry, lambda: opened().state is not StartState.FORMING, deadline.left_s(), unregistered)
        host, part = start.members[rank].host, start.members[rank].part
        if start is ledger.start:  # an earlier catalogue may have counted further
            await self._slots(entry, ledger.generations[-1], host, part, 0)
        version = await self._wait(entry, lambda: ledger.begin(opened(), rank, step), deadline.left_s(), missing)
        generation = version.generation
        paths = await self._slots(entry, generation, host, part, version.slot)
        ranks = generation.ranks_of(part)
        generation_key = ledger.life, generation.number
        return WriteOrder(
            VersionKey(ledger.life, version.number),
            SlotPlace(paths[version.slot], len(ranks), ranks.index(rank)),
            generation_key,
            None if known == generation_key else generation.stored,
            tuple(paths),
        )

    async def done(self, name: str, key: VersionKey, rank: int, digests: bytes | None = None) -> None:
        """Note that a rank has written its boxes of a version; `digests` as for `Ledger.done`."""
        entry, number = self._entry(name), key.number
        if entry.ledger.life != key.life:
            raise WeightsLostError(f"{name!r} was dropped while version {number} was written. Publish again")
        if entry.ledger.done(number, rank, digests):
            entry.readers.commit(number, time.monotonic())
            for host, keeper in self._keepers.items():
                used = [_kind(*each) for each in entry.ledger.parts_in_use(host)]
                if entry.used_parts.get(host) != used:
                    entry.used_parts[host] = used
                    keeper.drop.remote(self._turn(), name, used)
            if (version := entry.ledger.find(number)) is not None:
                entry.copies.make_patches(version)
                self._start(copy_further(self.copy, name, version))
            entry.copies.give_back(entry.ledger)
        await self._notify(entry)

    async def hold(self, name: str, number: int, life: str | None, holder: str) -> None:
        """Keep a version of a life (None: the present one) until its holder releases it."""
        ledger = self._entry(name).ledger
        if life not in (None, ledger.life):
            raise WeightsLostError(f"{name!r} was dropped, and version {number} with it. Publish again")
        ledger.hold(number, holder)

    async def release(self, name: str, number: int, life: str | None, holder: str) -> None:
        """Let a version go; ignores what is not held."""
        entry = self._entries.get(name)
        if entry is not None and life in (None, entry.ledger.life):
            entry.ledger.release(number, holder)
            entry.copies.give_back(entry.ledger)

    async def wait_for_readers(
        self, name: str, number: int, life: str | None, readers: int | None, timeout_s: float | None
    ) -> None:
        """Wait until so many readers (None: all that hold a lease) use this version or a later one of the same life.

        A life of None is the present one.
        """
        deadline = Deadline(timeout_s)
        await self.recovered()
        entry = self._entry(name)
        version = VersionKey(entry.ledger.life if life is None else life, number)

        def enough() -> bool:
            behind = len(entry.readers.behind(version))
            return not behind if readers is None else len(entry.readers.counted()) - behind >= readers

        def missing() -> str:
            behind = entry.readers.behind(version)
            return f"of {len(entry.readers.counted())} readers of {name!r}, {behind} have not taken version {number}"

        await self._wait(entry, enough, deadline.left_s(), missing)

    # Readers

    async def join(self, key: ReaderKey) -> None:
        """Take a reader in, until it leaves, or its process or host ends."""
        self._join(key)
        self._keeper(key.host)  # begins to start now, not with the first call that renews leases

    async def leave(self, key: ReaderKey) -> None:
        """Forget a reader."""
        if self._ended:
            return
        await self.recovered()  # first: the keeper would bring the reader back
        if key in self._reader_keys(key.host):
            self._leases.change(key.host)
            await self._advance([key], LeaseEvent.LEFT)

    async def applied(self, key: ReaderKey, version: VersionKey, turn: int) -> None:
        """Note that a reader uses a version, unless a call of a later turn has said so."""
        entry = self._entry(key.name)
        if entry.readers.apply(key, version, turn, time.monotonic()):
            self._leases.change(key.host)
        await self._notify(entry)

    async def readers(self, name: str | None) -> list[ReaderInfo]:
        """Return the readers of a name (None: of all names), those that are furthest behind first."""
        await self.recovered()
        return self._reader_infos(self._entries_of(name))

    async def offer(
        self,
        key: ReaderKey,
        used: VersionKey,
        number: int,
        exact: bool,
        known: GenerationKey | None,
        timeout_s: float | None,
    ) -> VersionOffer:
        """Wait until the version of this number is committed (`exact`), or one from it on; return it, or the newest.

        `used` is the version that the reader uses. One that is not known here had joined an earlier catalogue, and
        joins again.
        """
        name, host, entry = key.name, key.host, self._entry(key.name)
        if self._join(key, used):
            await self._notify(entry)

        def wanted() -> Version | None:
            if exact:
                return entry.ledger.exactly(number)
            version = entry.ledger.newest()
            return version if version is not None and version.number >= number else None

        def missing() -> str:
            opened = entry.ledger.open_version()
            state = "no rank has begun it" if opened is None else f"ranks {opened.missing()} have not published it"
            lost = [version.number for version in entry.ledger.versions if version.state is VersionState.LOST]
            others = [other for other, each in self._entries.items() if not each.ledger.is_empty()]
            if name not in others:
                state += f"; published are {', '.join(map(repr, others)) or 'no other weights'}"
            return f"version {number} of {name!r} is not there: {state}" + (f"; lost: {lost}" if lost else "")

        version = await self._wait(entry, wanted, timeout_s, missing)
        generation = version.generation
        ranks = {part: len(generation.ranks_of(part)) for part in set(generation.parts)}
        generation_key = entry.ledger.life, generation.number
        stored = None if known == generation_key else generation.stored
        paths, digests = version.own_paths(host), version.tensor_digests()
        return VersionOffer(version.number, version.step, generation_key, stored, ranks, paths, digests)

    async def copy(
        self, name: str, number: int, host: str, wanted: dict[str, list[int]], timeout_s: float | None
    ) -> dict[str, str] | None:
        """Wait until chunks of parts of a version are on a host; return the slot of each part there.

        None if the version was replaced or lost meanwhile. `wanted` has the numbers of the chunks by part.
        """
        entry = self._entry(name)
        deadline = Deadline(timeout_s)
        version = entry.ledger.find(number)
        if version is None:
            return None
        slots: dict[str, list[str]] = {}
        try:
            for part, chunks in wanted.items():
                slots[part] = await self._slots(entry, version.generation, host, part, version.slot)
                if not await entry.copies.prepare(version, part, host, chunks, deadline.left_s()):
                    return None
        except ray.exceptions.RayTaskError as error:  # of `begin_copy`
            raise own_error(error) from None
        except ray.exceptions.RayActorError as error:
            raise WeightsLostError(f"a keeper of {name!r} died: {error}. Update again") from error
        spreads = [version.spread(part) for part in wanted]
        failed: list[str] = []

        def arrived() -> bool:
            # A version that newer ones have retired meanwhile is held until its copies have arrived: else readers of a
            # slow link would never get one from a fast trainer.
            failed[:] = [reason for spread in spreads if (reason := spread.reason(host))]
            lost, missing = version.state is VersionState.LOST, any(spread.missing(host) for spread in spreads)
            return bool(failed) or lost or not missing

        def missing() -> str:
            counts = [f"{len(spread.missing(host))} of {spread.chunks} from {spread.source}" for spread in spreads]
            return f"chunks of version {number} of {name!r} have not come to node {host}: {', '.join(counts)}"

        await self._wait(entry, arrived, deadline.left_s(), missing)
        if failed:
            raise WeightsLostError(f"version {number} of {name!r} cannot be copied to node {host}: {failed[0]}")
        if version.state is VersionState.LOST:
            return None
        # Compared by identity: a keeper that has died may have a successor by now, whose slots are empty.
        if any(version.generation.slots.get((host, part)) is not paths for part, paths in slots.items()):
            raise WeightsLostError(f"the keeper of node {host} died. Update again")
        return {part: paths[version.slot] for part, paths in slots.items()}

    async def users(self, name: str, number: int) -> list[str]:
        """Return the readers that use a version of this number, of any life."""
        return self._entry(name).readers.users(number)

    async def newest(self, name: str) -> int | None:
        """Return the number of the newest committed version."""
        version = self._entry(name).ledger.newest()
        return None if version is None else version.number

    # Fleets

    async def fleet(self, method: str, names: Names, *args: Any) -> Any:
        """Call a method of `Fleets`. A reader that reports joins, as with `offer`."""
        self._check_ended()
        if method in ("report", "tell"):
            key: ReaderKey = args[0]
            if self._named(key.name).readers.has_left(key):
                raise WeightsLostError(f"the reader {key.label} was closed. Make a new one")
            self._join(key)
        return await getattr(self._fleets, method)(names, *args)

    def living(self, names: Names) -> set[ReaderKey]:
        """Return the readers of these names that are waited for."""
        entries = [self._entries[name] for name in names if name in self._entries]
        return {reader.key for entry in entries for reader in entry.readers.counted()}

    async def survivors(self, names: Names) -> set[ReaderKey]:
        """Return the readers of these names that joined an earlier catalogue, when they are known."""
        await self.recovered()
        return self.living(names) if self._has_predecessor else set()

    def have(self, versions: Mapping[str, VersionKey]) -> bool:
        """Return True if all these versions are there still."""
        ledgers = {name: self._entries[name].ledger for name in versions if name in self._entries}
        return all(name in ledgers and ledgers[name].has(key) for name, key in versions.items())

    async def hold_exactly(self, versions: Mapping[str, int], holder: str, deadline: Deadline) -> dict[str, VersionKey]:
        """Wait for these versions, hold and return them. WeightsVersionError if one is gone; then none is held."""
        held = {}
        try:
            for name, number in versions.items():
                ledger, missing = self._entry(name).ledger, f"version {number} of {name!r} is not there"
                exactly = functools.partial(ledger.exactly, number)
                await self._wait(self._entry(name), exactly, deadline.left_s(), functools.partial(str, missing))
                ledger.hold(number, holder)
                held[name] = VersionKey(ledger.life, number)
        except BaseException:
            await self.let_go(versions, holder)
            raise
        return held

    async def let_go(self, versions: Mapping[str, int], holder: str) -> None:
        """Let versions go; ignores what is not held."""
        for name, number in versions.items():
            await self.release(name, number, None, holder)

    # Names

    async def versions(self, name: str | None, *, digests: bool = False) -> list[VersionInfo]:
        """Return all versions of a name (None: of all names), the oldest first; committed ones with their digests."""
        entries = self._entries_of(name)
        if digests:
            found = [(entry, version) for entry in entries for version in entry.ledger.versions]
            await asyncio.gather(*(entry.copies.find_digest(version) for entry, version in found))
        now_s = time.monotonic()
        return [
            version_info(entry.ledger, version, entry.readers, now_s)
            for entry in entries
            for version in entry.ledger.versions
        ]

    async def memory(self) -> list[tuple[str, str, int]]:
        """Return the host, name and bytes of all shared memory that keeps weights now."""
        taken = []
        for host, keeper in list(self._keepers.items()):
            with contextlib.suppress(ray.exceptions.RayActorError):
                taken += [(host, name, nbytes) for name, nbytes in (await keeper.memory.remote()).items()]
        return taken

    async def drop(self, name: str) -> None:
        """Forget a name and free its slots. The last name ends the keepers, and this actor."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            entry.dropped = True
            await self._fleets.dropped(name)
            dropping = [keeper.drop.remote(self._turn(), name) for keeper in self._keepers.values()]
            await self._notify(entry)
            if dropping:  # readers that have prefetched a version see that it was dropped when this call returns
                await asyncio.wait([asyncio.ensure_future(_answered(each)) for each in dropping], timeout=ANSWER_S)
        if not self._entries:
            await self._fleets.end()
            await asyncio.to_thread(self._end)

    # Parts of the above

    @staticmethod
    def _check_dropped(entry: _NamedWeights) -> None:
        if entry.dropped:
            raise WeightsLostError(f"{entry.ledger.name!r} was dropped during this call. Try again")

    def _named(self, name: str) -> _NamedWeights:
        """Return what is known of a name; nothing yet if it is new."""
        self._check_ended()
        self._begin_recovery()
        if name not in self._entries:
            copies = Copies(self._keeper, self._turn, lambda: self._notify(entry))
            entry = self._entries[name] = _NamedWeights(Ledger(name), copies)
            entry.readers.life = entry.ledger.life
        return self._entries[name]

    def _join(self, key: ReaderKey, version: VersionKey | None = None) -> bool:
        """Take a reader in. Return True if it, or its version, was not known."""
        changed = self._named(key.name).readers.join(key, time.monotonic(), version)
        if changed:
            self._leases.change(key.host)
        return changed

    @staticmethod
    def _reader_infos(entries: Iterable[_NamedWeights]) -> list[ReaderInfo]:
        return [info for entry in entries for info in entry.readers.infos(time.monotonic())]

    def _reader_keys(self, host: str) -> list[ReaderKey]:
        return [key for entry in self._entries.values() for key in entry.readers.keys(host)]

    async def _advance(self, keys: Iterable[ReaderKey], event: LeaseEvent) -> None:
        """Change the leases of readers."""
        keys = list(keys)
        for name in {key.name for key in keys}:
            entry, own = self._entries.get(name), [key for key in keys if key.name == name]
            if entry is not None and entry.readers.advance(own, event, time.monotonic()):
                await self._notify(entry)
                await self._fleets.readers_ended()
                if not entry.readers and entry.ledger.is_empty():  # a name that nobody publishes
                    await self.drop(name)

    def _begin_recovery(self) -> asyncio.Task[None]:
        if self._recovery is None:
            self._recovery = asyncio.ensure_future(self._recover())
            self._start(report_lags(lambda: self._reader_infos(self._entries.values())))
        return self._recovery

    async def _recover(self) -> None:
        """Ask the keepers that are there for the readers of an earlier catalogue. Waits a few seconds at most."""
        begin = f"{KEEPER_NAME}{self._job or 'all'} on "
        names = await asyncio.to_thread(actor_names, begin)
        questions = [self._leases.recover(name.removeprefix(begin)) for name in names]
        self._has_predecessor = bool(questions)
        if questions:
            await asyncio.wait(questions, timeout=ANSWER_S)

    async def recovered(self) -> None:
        """Wait until the readers of an earlier catalogue are known."""
        self._check_ended()
        await self._begin_recovery()

    def _check_ended(self) -> None:
        if self._ended:
            raise CatalogueEnded

    def _entry(self, name: str) -> _NamedWeights:
        self._check_ended()
        entry = self._entries.get(name)
        if entry is None:
            known = ", ".join(map(repr, self._entries)) or "none"
            raise WeightsLostError(f"there are no weights of the name {name!r}; there are: {known}")
        return entry

    def _entries_of(self, name: str | None) -> list[_NamedWeights]:
        """Return the entry of a name, or all of them for None."""
        return list(self._entries.values()) if name is None else [self._entry(name)]

    @staticmethod
    async def _notify(entry: _NamedWeights) -> None:
        async with entry.changed:
            entry.changed.notify_all()

    @staticmethod
    async def _wait(
        entry: _NamedWeights, condition: Callable[[], _T | None], timeout_s: float | None, missing: Callable[[], str]
    ) -> _T:
        """Return what the condition returns as soon as that is true. WeightsTimeoutError names what is missing."""
        try:
            async with asyncio.timeout(timeout_s), entry.changed:
                while True:
                    Catalogue._check_dropped(entry)
                    if result := condition():
                        return result
                    await entry.changed.wait()
        except TimeoutError:
            raise WeightsTimeoutError(
                f"after {timeout_s or 0:.1f} s {missing()}. Raise the timeout if that is expected"
            ) from None

    async def _slots(self, entry: _NamedWeights, generation: Generation, host: str, part: str, slot: int) -> list[str]:
        """Return the paths of a host's slots for a part, which the first call makes: all up to this one at least."""
        async with entry.making[host]:
            count = max(slot + 1, entry.ledger.slots_needed(generation))
            if len(generation.slots.get((host, part), ())) >= count:
                return generation.slots[host, part]
            self._check_dropped(entry)  # else the slots would have no name that could be dropped
            keeper = self._keeper(host)
            name, kind = entry.ledger.name, _kind(generation, part)

            def make() -> Awaitable[Any]:
                return answered(keeper, host, keeper.make.remote(self._turn(), name, kind, count))

            generation.being_made.add((host, part))
            try:
                try:
                    paths, number = await make()
                except ray.exceptions.ActorUnavailableError:  # of a living actor on a busy machine
                    await asyncio.sleep(PAUSE_S)
                    paths, number = await make()
            except ray.exceptions.RayActorError as error:
                await self._keeper_died(host, keeper)
                raise WeightsLostError(f"the keeper of node {host} died. Try again") from error
            except ray.exceptions.RayTaskError as error:
                raise own_error(error) from None
            finally:
                generation.being_made.discard((host, part))
            known = generation.slots.setdefault((host, part), paths)
            known += paths[len(known) :]  # the same list, by which copies know that it is of the same keeper
            if host == host_of(part):
                entry.ledger.resume_after(number)  # of an earlier catalogue
            return generation.slots[host, part]

    def _keeper(self, host: str) -> Any:
        """Return the keeper of a host, which the first call starts."""
        self._check_ended()
        keeper = self._keepers.get(host)
        if keeper is None:
            there = NodeAffinitySchedulingStrategy(host, soft=False)
            name = f"{KEEPER_NAME}{self._job or 'all'} on {host}"
            keeper = self._keepers[host] = start_actor(Keeper, name, self._job, scheduling_strategy=there)
            self._start(self._watch(host, keeper))
        return keeper

    def _turn(self) -> Turn:
        self._turns += 1
        return Turn(self._incarnation, self._turns)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, host: str, keeper: Any) -> None:
        """Note the death of a keeper."""
        with contextlib.suppress(ray.exceptions.RayActorError):
            await keeper.wait.remote()
        await self._keeper_died(host, keeper)

    async def _keeper_died(self, host: str, keeper: Any) -> None:
        if self._keepers.get(host) is not keeper:  # noted already
            return
        del self._keepers[host]
        for entry in self._entries.values():
            entry.used_parts.pop(host, None)
            entry.ledger.keeper_died(host)
        for entry in list(self._entries.values()):
            await self._notify(entry)

    def _end(self) -> None:
        """End all keepers of the job, also those of an earlier catalogue, and this actor. Waits for their ends."""
        self._ended = True
        begin, deadline = f"{KEEPER_NAME}{self._job or 'all'} on ", time.monotonic() + END_S
        while names := actor_names(begin):
            for name in names:
                with contextlib.suppress(ValueError):  # it has ended
                    ray.kill(ray.get_actor(name, NAMESPACE))
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        _ray.exit_this_actor()

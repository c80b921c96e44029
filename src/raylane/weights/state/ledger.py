"""Ledger of published weights: which ranks, which versions, where each version lies. Pure: the catalogue's decisions.

    version     OPEN ──all ranks done──> COMMITTED ──newer ones──> RETIRED
                  └──a writer begins anew──> SUPERSEDED            (a keeper that dies makes any of them LOST)

A *generation* is the layouts of all ranks of a start (see `starts`). A start with the layouts of the one before goes on
in the same generation; another world size or layout begins the next one, and versions go on counting.

Numbers of versions and generations never repeat within the *life* of a name, which `drop` and the end of the catalogue
end. So the life and a number together identify a version, and everybody who compares versions compares both.

Every host of a generation has `keep` slots, and one more for each version that is held. A version takes the slot of the
oldest version that is neither held nor among the newest `keep - 1` of the other committed ones. A writer then waits for
the readers of that slot, by its lock (`memory.slots`). Slots that are free when a version is let go stay, without their
memory. Called by `catalogue`.
"""

from __future__ import annotations

import enum
import hashlib
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from raylane.core.state_table import StateTable, unchanged
from raylane.errors import WeightsError, WeightsLayoutError, WeightsLostError, WeightsVersionError
from raylane.weights.chunks.delta import DeltaOptions, Run, runs_of
from raylane.weights.chunks.spread import Spread
from raylane.weights.layout.boxes import Layout, StoredLayout, host_of, store
from raylane.weights.state.options import MOST_KEEP
from raylane.weights.state.readers import VersionKey
from raylane.weights.state.starts import (
    Decision,
    RankKey,
    RankRegistration,
    Start,
    StartEvent,
    StartKey,
    StartState,
    decide,
)


class VersionState(enum.Enum):
    """State of a version."""

    OPEN = "open"
    COMMITTED = "committed"
    RETIRED = "retired"
    SUPERSEDED = "superseded"
    LOST = "lost"


class VersionEvent(enum.Enum):
    """Event of a version."""

    ALL_DONE = enum.auto()
    SLOT_TAKEN = enum.auto()
    OTHER_STEP = enum.auto()
    KEEPER_DIED = enum.auto()


TRANSITIONS = StateTable(
    {
        (VersionState.OPEN, VersionEvent.ALL_DONE): VersionState.COMMITTED,
        (VersionState.OPEN, VersionEvent.OTHER_STEP): VersionState.SUPERSEDED,
        (VersionState.COMMITTED, VersionEvent.SLOT_TAKEN): VersionState.RETIRED,
        **{
            (state, VersionEvent.KEEPER_DIED): VersionState.LOST
            for state in (VersionState.OPEN, VersionState.COMMITTED)
        },
        # Versions that have ended stay listed until the next one begins.
        **unchanged(VersionState.SUPERSEDED, [VersionEvent.KEEPER_DIED]),
        **unchanged(VersionState.LOST, [VersionEvent.KEEPER_DIED]),
    }
)


KEPT = (VersionState.OPEN, VersionState.COMMITTED)
"""States of versions that have their slots."""


@dataclass
class Generation:
    """Layouts of all ranks of a start, and where their versions lie."""

    number: int
    keep: int
    delta: DeltaOptions
    layouts: tuple[Layout, ...]
    """Layout of each rank."""
    parts: tuple[str, ...]
    """Part that each rank writes."""
    same: Mapping[str, str]
    stored: StoredLayout
    copies: int = 1
    """Number of hosts that are to have each part."""
    slots: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """Paths of slots by the host that has them, and the part that is in them."""
    being_made: set[tuple[str, str]] = field(default_factory=set)
    """Keys of slots that a keeper is making."""

    _runs: dict[str, tuple[Run, ...]] = field(default_factory=dict)
    _digests: dict[str, str] = field(default_factory=dict)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.layouts)

    def ranks_of(self, part: str) -> list[int]:
        """Return the ranks that write a part, in the order of their words in a slot."""
        return [rank for rank, written in enumerate(self.parts) if written == part]

    def own_parts(self, host: str) -> list[str]:
        """Return the parts that ranks of a host write, and for which it has slots."""
        return [part for part in dict.fromkeys(self.parts) if host_of(part) == host and (host, part) in self.slots]

    def further_parts(self) -> dict[str, list[str]]:
        """Return the parts that hosts are to have besides their own: each part is on the next hosts of ranks too."""
        hosts = list(dict.fromkeys(map(host_of, self.parts)))
        parts = defaultdict[str, list[str]](list)
        for part in dict.fromkeys(self.parts):
            after = hosts.index(host_of(part)) + 1
            for place in range(after, after + min(self.copies, len(hosts)) - 1):
                parts[hosts[place % len(hosts)]].append(part)
        return parts

    def part_bytes(self, part: str) -> int:
        """Return the size of a part."""
        return self.stored.nbytes[self.stored.parts.index(part)]

    def runs(self, part: str) -> tuple[Run, ...]:
        """Return the runs of elements of one size in a part; found once."""
        if part not in self._runs:
            self._runs[part] = runs_of(self.stored, self.stored.parts.index(part))
        return self._runs[part]

    def boxes_digest(self, part: str) -> str:
        """Return a digest of the bytes of a part that each of its ranks writes; found once."""
        if part not in self._digests:
            digest, ranks = hashlib.sha256(), self.ranks_of(part)
            for tensor in self.stored.tensors.values():
                for room in tensor.boxes:
                    for rank, box in room.writes:
                        if rank in ranks:
                            digest.update(repr((ranks.index(rank), room.offset, room.box, box)).encode())
            self._digests[part] = digest.hexdigest()
        return self._digests[part]


@dataclass
class Version:
    """One version, and its slot on every host of its generation."""

    number: int
    step: int
    generation: Generation
    slot: int
    state: VersionState = VersionState.OPEN
    writers: set[int] = field(default_factory=set)
    """Ranks that have begun to write their boxes."""
    restarted: set[int] = field(default_factory=set)
    """Ranks that have come back since it was opened; they may not publish its step again."""
    done: set[int] = field(default_factory=set)
    """Ranks whose boxes are written."""
    began_s: float = field(default_factory=time.monotonic)
    digest: str | None = None
    """Digest of the stored bytes, when somebody has asked for it."""
    digests: list[bytes] = field(default_factory=list)
    """Digests of what each rank that is done has written, if the ranks compute them."""
    spreads: dict[str, Spread] = field(default_factory=dict)
    """Copies of parts on other hosts, by part."""
    base: Version | None = None
    """Earlier version that other hosts have, from which this one may be made with patches."""
    copied_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes that were copied between hosts: `dense` as whole chunks, `delta` as patches."""
    mismatches: int = 0
    """Number of transfers whose patches did not make what they were to make."""

    def advance(self, event: VersionEvent) -> None:
        """Change the state as the table says."""
        self.state = TRANSITIONS[self.state, event]

    def missing(self) -> list[int]:
        """Return the ranks that have not written their boxes."""
        return [rank for rank in range(self.generation.world) if rank not in self.done]

    def tensor_digests(self) -> bytes | None:
        """Return the digest of each tensor, in the order of the stored layout, 8 bytes each; None if there are none."""
        if len(self.digests) > 1:
            import numpy as np

            sums = np.sum([np.frombuffer(each, dtype="<u8") for each in self.digests], axis=0, dtype=np.uint64)
            self.digests = [sums.tobytes()]  # all ranks are done: added up once
        return self.digests[0] if self.digests else None

    def spread(self, part: str) -> Spread:
        """Return the copies of a part, which the first call begins to count."""
        if part not in self.spreads:
            parts = len(set(self.generation.parts))
            self.spreads[part] = Spread(part, self.generation.part_bytes(part), parts)
        return self.spreads[part]

    def readers_of(self, part: str) -> set[str]:
        """Return the other hosts that have a part, or chunks of it."""
        spread = self.spreads.get(part)
        return set() if spread is None else spread.holders.keys() - {part}

    def own_paths(self, host: str) -> dict[str, str]:
        """Return the slot of each part that ranks of a host wrote, and that is still there."""
        slots, spreads = self.generation.slots, self.spreads
        return {
            part: slots[host, part][self.slot]
            for part in self.generation.own_parts(host)
            if part not in spreads or host in spreads[part].holders
        }

    def holders(self, part: str) -> list[str]:
        """Return the hosts that have a part whole, the one of its ranks first."""
        spread = self.spreads.get(part)
        if spread is None:
            return [host_of(part)] if part in self.own_paths(host_of(part)) else []
        whole = [host for host, has in spread.holders.items() if len(has) == spread.chunks]
        return sorted(map(host_of, whole), key=host_of(part).__ne__)

    def copies(self) -> int:
        """Return the least number of hosts that have a part whole."""
        return min(len(self.holders(part)) for part in set(self.generation.parts))

    def hosts(self) -> list[str]:
        """Return the hosts that have a part, or chunks of one."""
        own = [host for host in set(map(host_of, self.generation.parts)) if self.own_paths(host)]
        return sorted({*own, *(host for spread in self.spreads.values() for host in spread.holders)})


class Ledger:
    """Everything that is known of one name during one life."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.life = secrets.token_hex(8)
        """Identity of this life of the name."""
        self.start: Start | None = None
        """Current start of the trainer."""
        self.generations: list[Generation] = []
        self.versions: list[Version] = []
        """Versions from the oldest to the newest; those without a slot are dropped."""
        self._holders: dict[int, set[str]] = {}
        """Holders of each held version, by its number."""
        self._numbers = 0
        self._generation_numbers = 0
        self._replaced_trainers: set[str] = set()

    def register(self, registration: RankRegistration, ended: Collection[str], now_ns: int) -> Start:
        """Take a rank into the current start, or begin a new one, as `starts.DECISIONS` says.

        `ended` has the tokens of those of `Start.asked` that have ended.

        WeightsLayoutError if the ranks do not fit together; the last rank to register gets it. WeightsError if a later
        start has replaced that of the rank.
        """
        if self.start is not None:
            self.start.ended.update(ended)
            if self.start.missing() == [registration.rank]:
                self.start.forget_ended()  # a trainer that died while it started leaves its places to the next one
        decision = decide(self.start, registration, self._replaced_trainers)
        if decision is Decision.REFUSE:
            raise self._replaced(registration.rank)
        if decision is Decision.RETURN:
            assert self.start is not None
            self._return(self.start, registration)
            return self.start
        if decision is Decision.BEGIN:
            self._begin_start(registration, now_ns)
        assert self.start is not None
        self.start.members[registration.rank] = registration
        self._complete(self.start)
        return self.start

    def current(self, key: RankKey) -> Start:
        """Return the start of a rank. WeightsLostError if it has to register (again)."""
        if self.start is None or not self.start.has(key):
            raise WeightsLostError(f"rank {key.rank} of {self.name!r} is not registered. Register again")
        return self.start

    def close(self, token: str) -> None:
        """Note that a publisher was closed, is garbage, or was never made."""
        if self.start is not None:
            self.start.ended.add(token)

    def is_empty(self) -> bool:
        """Return True if nobody has registered or published."""
        return self.start is None and not self.versions

    def _begin_start(self, registration: RankRegistration, now_ns: int) -> None:
        before = self.start
        if before is not None:
            before.advance(StartEvent.NEWER_START)
            trainer = before.options[-1]
            if trainer is not None and trainer != registration.trainer:
                self._replaced_trainers.add(trainer)
            now_ns = max(now_ns, before.key.began_ns + 1)
        key = registration.start or StartKey(now_ns, registration.publisher.token)
        self.start = Start(key, registration.options())
        self._give_up_open_version()

    def _return(self, start: Start, registration: RankRegistration) -> None:
        """Let a rank take its place again, with its present layout and host."""
        rank = registration.rank
        members = {**start.members, rank: registration}
        if start.state is StartState.COMPLETE:
            generation = self._generation_of(members)
            version = self.open_version()
            if version is not None and (rank in version.writers or version.generation is not generation):
                self._give_up_open_version()  # its writer has begun anew, so nobody will complete it
            elif version is not None:
                version.restarted.add(rank)
        start.members = members

    def _complete(self, start: Start) -> None:
        if start.state is not StartState.FORMING or start.missing():
            return
        try:
            self._generation_of(start.members)
        except WeightsLayoutError:
            start.advance(StartEvent.MISFIT)
            self.start = None
            raise
        start.advance(StartEvent.ALL_REGISTERED)

    def _generation_of(self, members: Mapping[int, RankRegistration]) -> Generation:
        """Return the newest generation if it has the layouts of these ranks, or a new one. WeightsLayoutError."""
        ranks = [members[rank] for rank in range(len(members))]
        keep, delta, copies = ranks[0].keep, ranks[0].delta, ranks[0].copies
        layouts, parts = tuple(rank.layout for rank in ranks), tuple(rank.part for rank in ranks)
        same = {name: first for rank in ranks for name, first in rank.same.items()}
        newest = self.generations[-1] if self.generations else None
        if newest is not None:
            known = newest.keep, newest.delta, newest.copies, newest.parts, newest.same, newest.layouts
            if known == (keep, delta, copies, parts, same, layouts):
                return newest
        stored = store(layouts, parts, same, on_device=ranks[0].on_device)
        self._generation_numbers += 1
        self.generations.append(Generation(self._generation_numbers, keep, delta, layouts, parts, same, stored, copies))
        return self.generations[-1]

    def _replaced(self, rank: int) -> WeightsError:
        newer = "another one" if self.start is None else f"one of {self.start.world} ranks that registered later"
        members = () if self.start is None else self.start.members.values()
        places = "".join(f", process {each.publisher.pid} on node {each.host}" for each in list(members)[:1])
        return WeightsError(
            f"rank {rank} of {self.name!r} cannot publish: its trainer was replaced by {newer}{places}. End this "
            "process, or publish under another name"
        )

    def _give_up_open_version(self) -> None:
        version = self.open_version()
        if version is not None:
            version.advance(VersionEvent.OTHER_STEP)

    def begin(self, start: Start, rank: int, step: int) -> Version | None:
        """Return the version that a rank is to write for a step: the open one, or the next.

        None if the rank has to wait, because other ranks have not registered, or still write the version before.

        WeightsError if a rank publishes an earlier step than the others, if its start was replaced, or if the ranks of
        its start do not fit together.
        """
        if start.state is StartState.REFUSED:
            raise WeightsError(f"the ranks of {self.name!r} do not fit together; the error is that of another rank")
        if start is not self.start:
            raise self._replaced(rank)
        if start.state is StartState.FORMING:
            return None
        generation = self.generations[-1]
        version = self.open_version()
        if version is not None and rank in version.done:
            return None
        if version is not None and step < version.step and rank not in version.writers | version.restarted:
            raise WeightsError(
                f"rank {rank} publishes step {step} of {self.name!r}, but rank {min(version.writers)} publishes step "
                f"{version.step}. All ranks must publish the same steps in the same order"
            )
        if version is not None and version.step != step:
            # This rank has given the other step up: its publication has failed, or it was restarted. If the ranks
            # waited for each other's steps here, the name would hang.
            version.advance(VersionEvent.OTHER_STEP)
            version = None
        if version is None:
            self._numbers += 1
            version = Version(self._numbers, step, generation, self._free_slot(generation))
            self.versions.append(version)
        version.writers.add(rank)
        return version

    def resume_after(self, number: int) -> None:
        """Give later versions higher numbers than this one."""
        self._numbers = max(self._numbers, number)

    def open_version(self) -> Version | None:
        """Return the version that ranks write at present."""
        newest = self.versions[-1] if self.versions else None
        return newest if newest is not None and newest.state is VersionState.OPEN else None

    def _free_slot(self, generation: Generation) -> int:
        """Return the slot for the next version, and retire the committed one that it belonged to."""
        let_go = [version for version in self.committed() if not self.is_held(version.number)]
        # One slot of `keep` is for the version that is being written.
        for version in let_go[: max(0, len(let_go) - (generation.keep - 1))]:
            version.advance(VersionEvent.SLOT_TAKEN)
        self.versions = self.committed()
        kept = {version.number for version in self.versions}
        self._holders = {number: holders for number, holders in self._holders.items() if number in kept}
        # Also those of other generations: a part of the same size has the same slots.
        used = {version.slot for version in self.versions}
        # Generations without a version have slots that nobody needs any more.
        needed = [generation, *(version.generation for version in self.versions)]
        self.generations = [each for each in self.generations if each in needed]
        return next(slot for slot in range(self.slots_needed(generation)) if slot not in used)

    def slots_needed(self, generation: Generation) -> int:
        """Return the number of slots that each host of a generation needs for each part."""
        return generation.keep + len(self._holders)

    def surplus(self, generation: Generation, slots: int) -> list[int]:
        """Return which of so many slots of a generation are beyond what it needs, and have no version."""
        used = {version.slot for version in self.versions}
        return [slot for slot in range(self.slots_needed(generation), slots) if slot not in used]

    def hold(self, number: int, holder: str) -> None:
        """Keep a version that is committed or being written, until each holder has released it.

        WeightsVersionError if there is no such version. WeightsError if too many are kept already.
        """
        version = self._version(number)
        if version is None or version.state not in KEPT:
            raise WeightsVersionError(f"version {number} of {self.name!r} cannot be held: {self._present()}")
        keep = self.generations[-1].keep
        if not self.is_held(number) and keep + len(self._holders) >= MOST_KEEP:
            raise WeightsError(
                f"version {number} of {self.name!r} cannot be held: at most {MOST_KEEP} versions are kept, with keep="
                f"{keep} and those that are held: {sorted(self._holders)}. Release one of them"
            )
        self._holders.setdefault(number, set()).add(holder)

    def release(self, number: int, holder: str) -> None:
        """Let a version go; it is kept as long as others hold it, or as one of the newest. May be repeated."""
        holders = self._holders.get(number, set()) - {holder}
        if holders:
            self._holders[number] = holders
        else:
            self._holders.pop(number, None)

    def is_held(self, number: int) -> bool:
        """Return True if somebody holds a version."""
        return number in self._holders

    def exactly(self, number: int) -> Version | None:
        """Return this version; None if it may be committed yet. WeightsVersionError if it is gone."""
        version = self._version(number)
        if version is not None and version.state is VersionState.COMMITTED:
            return version
        if number > self._numbers or (version is not None and version.state is VersionState.OPEN):
            return None
        raise WeightsVersionError(
            f"version {number} of {self.name!r} cannot be taken: {self._present()}. Take one of these; versions stay "
            "longer with a larger keep, or with Publisher.hold(version)"
        )

    def _present(self) -> str:
        """Return what is there, as the end of an error."""
        numbers = [version.number for version in self.committed()]
        lost = [version.number for version in self.versions if version.state is VersionState.LOST]
        there = f"there are {', '.join(map(str, numbers))}" if numbers else "there is none"
        return there + (f"; {', '.join(map(str, lost))} died with a keeper" if lost else "")

    def done(self, number: int, rank: int, digests: bytes | None = None) -> bool:
        """Note that a rank has written its boxes. Return True if that committed the version.

        `digests` are those of its boxes for each tensor, in the order of the stored layout, 8 bytes each.

        WeightsLostError if the version was superseded, or its memory is gone.
        """
        version = self._version(number)
        if version is None or version.state in (VersionState.SUPERSEDED, VersionState.LOST):
            is_lost = version is not None and version.state is VersionState.LOST
            why = "is lost" if is_lost else "was given up by another rank"
            raise WeightsLostError(f"version {number} of {self.name!r} {why} while rank {rank} wrote it. Publish again")
        if digests is not None and rank not in version.done:
            version.digests.append(digests)
        version.done.add(rank)
        if version.state is VersionState.OPEN and not version.missing():
            version.base = self._base_of(version)
            version.advance(VersionEvent.ALL_DONE)
            return True
        return False

    def _base_of(self, version: Version) -> Version | None:
        """Return the newest version in the same slots that another host has; None if this one is to be copied whole."""
        if not version.generation.delta.allow(version.number):
            return None
        for earlier in reversed(self.versions):
            same = earlier.generation is version.generation and earlier.state is VersionState.COMMITTED
            if same and any(earlier.readers_of(part) for part in earlier.spreads):
                if earlier.base is not None:
                    earlier.base.base = None  # else all earlier versions would stay in memory
                return earlier
        return None

    def committed(self) -> list[Version]:
        """Return the versions that readers may take, the oldest first."""
        return [version for version in self.versions if version.state is VersionState.COMMITTED]

    def find(self, number: int) -> Version | None:
        """Return a version if it is committed and has a slot."""
        version = self._version(number)
        return version if version is not None and version.state is VersionState.COMMITTED else None

    def _version(self, number: int) -> Version | None:
        """Return a version that is listed, in whatever state."""
        return next((version for version in self.versions if version.number == number), None)

    def has(self, key: VersionKey) -> bool:
        """Return True if a version is committed and has a slot."""
        return key.life == self.life and self.find(key.number) is not None

    def newest(self) -> Version | None:
        """Return the newest committed version."""
        committed = self.committed()
        return committed[-1] if committed else None

    def parts_in_use(self, host: str) -> list[tuple[Generation, str]]:
        """Return the parts for which a host must keep its slots, also those that it is making."""
        return [
            (generation, part)
            for generation in self.generations
            for keeping, part in sorted(generation.slots.keys() | generation.being_made)
            if keeping == host
        ]

    def keeper_died(self, host: str) -> None:
        """Note that the slots of a host are gone. Its part of a version lives on in copies that are together whole."""
        for version in self.versions:
            own = version.generation.own_parts(host)
            if version.state is VersionState.COMMITTED:
                for part in own:
                    version.spread(part)
            for spread in version.spreads.values():
                for gone in {host, *own}:  # a part on a device is a holder of its own
                    spread.remove(gone)
            lost = any(not spread.is_whole() for spread in version.spreads.values())
            if lost or (version.state is VersionState.OPEN and own):
                version.advance(VersionEvent.KEEPER_DIED)
        for generation in self.generations:
            for key in [key for key in generation.slots if key[0] == host]:
                del generation.slots[key]

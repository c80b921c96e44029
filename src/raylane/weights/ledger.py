"""Ledger of published weights: which ranks, which versions, where each version lies. Pure: the catalogue's decisions.

    version     OPEN ──all ranks done──> COMMITTED ──newer ones──> RETIRED
                  └──a writer begins anew──> SUPERSEDED            (a keeper that dies makes any of them LOST)

A *generation* is one set of ranks with their layouts. Ranks that come back with the same layout belong to the same
generation; ranks with another world size or layout begin the next one, and versions go on counting.

Every host of a generation has `keep` slots. A version takes the slot of the oldest version that is not among the newest
`keep - 1` committed ones. Called by `catalogue`.
"""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from raylane.errors import WeightsError, WeightsLayoutError, WeightsLostError
from raylane.weights.delta import DeltaOptions, Run, runs_of
from raylane.weights.layout import Layout, StoredLayout, store
from raylane.weights.spread import Spread


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


TRANSITIONS = {
    (VersionState.OPEN, VersionEvent.ALL_DONE): VersionState.COMMITTED,
    (VersionState.OPEN, VersionEvent.OTHER_STEP): VersionState.SUPERSEDED,
    (VersionState.OPEN, VersionEvent.KEEPER_DIED): VersionState.LOST,
    (VersionState.COMMITTED, VersionEvent.SLOT_TAKEN): VersionState.RETIRED,
    (VersionState.COMMITTED, VersionEvent.KEEPER_DIED): VersionState.LOST,
}
"""Next state by state and event; a pair that is missing does not change the state."""


class RankRegistration(NamedTuple):
    """Description of a rank, its tensors and its place."""

    rank: int
    world: int
    """Number of ranks."""
    layout: Layout
    same: Mapping[str, str]
    """Further names of tied tensors, and the name of each in the layout."""
    host: str
    keep: int
    delta: DeltaOptions = DeltaOptions()


@dataclass
class Generation:
    """One set of ranks. `stored` and `slots` are known when all ranks have registered."""

    number: int
    world: int
    keep: int
    delta: DeltaOptions
    layouts: dict[int, Layout] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    """Host of each rank."""
    same: dict[str, str] = field(default_factory=dict)
    stored: StoredLayout | None = None
    slots: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """Paths of slots by the host that has them, and the host whose ranks write what is in them: its part."""
    being_made: set[tuple[str, str]] = field(default_factory=set)
    """Keys of slots that a keeper is making."""

    _runs: dict[str, tuple[Run, ...]] = field(default_factory=dict)

    def ranks_of(self, host: str) -> list[int]:
        """Return the ranks of a host, in the order of their words in a slot."""
        return sorted(rank for rank, where in self.hosts.items() if where == host)

    def missing(self) -> list[int]:
        """Return the ranks that have not registered."""
        return [rank for rank in range(self.world) if rank not in self.layouts]

    def part_bytes(self, host: str) -> int:
        """Return the size of the part that the ranks of a host write."""
        assert self.stored is not None, "not all ranks have registered"
        return self.stored.nbytes[self.stored.hosts.index(host)]

    def runs(self, host: str) -> tuple[Run, ...]:
        """Return the runs of elements of one size in the part of a host; found once."""
        assert self.stored is not None, "not all ranks have registered"
        if host not in self._runs:
            self._runs[host] = runs_of(self.stored, self.stored.hosts.index(host))
        return self._runs[host]


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
    spreads: dict[str, Spread] = field(default_factory=dict)
    """Copies of parts on other hosts, by the host whose ranks wrote the part."""
    base: Version | None = None
    """Earlier version that other hosts have, from which this one may be made with patches."""
    copied_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes that were copied between hosts: `dense` as whole chunks, `delta` as patches."""
    mismatches: int = 0
    """Number of transfers whose patches did not make what they were to make."""

    def advance(self, event: VersionEvent) -> None:
        """Change the state as the table says."""
        self.state = TRANSITIONS.get((self.state, event), self.state)

    def missing(self) -> list[int]:
        """Return the ranks that have not written their boxes."""
        return [rank for rank in range(self.generation.world) if rank not in self.done]

    def spread(self, part: str) -> Spread:
        """Return the copies of a part, which the first call begins to count."""
        if part not in self.spreads:
            parts = len(set(self.generation.hosts.values()))
            self.spreads[part] = Spread(part, self.generation.part_bytes(part), parts)
        return self.spreads[part]

    def readers_of(self, part: str) -> set[str]:
        """Return the other hosts that have a part, or chunks of it."""
        spread = self.spreads.get(part)
        return set() if spread is None else spread.holders.keys() - {part}

    def has_own_part(self, host: str) -> bool:
        """Return True if the ranks of a host wrote a part, and it is still there."""
        spread = self.spreads.get(host)
        return (host, host) in self.generation.slots and (spread is None or host in spread.holders)

    def holder(self, part: str) -> str | None:
        """Return a host that has a part whole."""
        if self.has_own_part(part):
            return part
        spread = self.spreads.get(part)
        whole = [] if spread is None else [host for host, has in spread.holders.items() if len(has) == spread.chunks]
        return whole[0] if whole else None

    def hosts(self) -> list[str]:
        """Return the hosts that have a part, or chunks of one."""
        own = [host for host in set(self.generation.hosts.values()) if self.has_own_part(host)]
        return sorted({*own, *(host for spread in self.spreads.values() for host in spread.holders)})


class Ledger:
    """Everything that is known of one name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.generations: list[Generation] = []
        self.versions: list[Version] = []
        """Versions from the oldest to the newest; those without a slot are dropped."""
        self._numbers = 0

    def register(self, registration: RankRegistration) -> Generation:
        """Take a rank into the current generation, or into a new one if it does not fit the current one.

        WeightsLayoutError if the ranks do not fit together; the last rank to register gets it.
        """
        rank, world, layout, same, host, keep, delta = registration
        generation = self.generations[-1] if self.generations else None
        fits = generation is not None and (generation.world, generation.keep, generation.delta) == (world, keep, delta)
        if fits and generation is not None and rank in generation.layouts:  # it has come back
            fits = generation.hosts[rank] == host and generation.layouts[rank] == layout
        if generation is None or not fits:
            number = 0 if generation is None else generation.number + 1
            generation = Generation(number, world, keep, delta)
            self.generations.append(generation)
        version = self.open_version()
        if version is not None and (rank in version.writers or version.generation is not generation):
            version.advance(VersionEvent.OTHER_STEP)  # its writer has begun anew, so nobody will complete it
        elif version is not None:
            version.restarted.add(rank)
        generation.layouts[rank] = layout
        generation.hosts[rank] = host
        generation.same.update(same)
        if generation.stored is None and not generation.missing():
            layouts = [generation.layouts[number] for number in range(world)]
            hosts = [generation.hosts[number] for number in range(world)]
            try:
                generation.stored = store(layouts, hosts, generation.same)
            except WeightsLayoutError:
                self.generations.remove(generation)
                raise
        return generation

    def begin(self, generation: Generation, rank: int, step: int) -> Version | None:
        """Return the version that a rank is to write for a step: the open one, or the next.

        None if the rank has to wait, because other ranks still write the version before.

        WeightsError if a rank publishes an earlier step than the others, or if a newer generation has begun: then this
        rank belongs to a trainer that was replaced.
        """
        if generation is not self.generations[-1]:
            raise WeightsError(
                f"rank {rank} of {self.name!r} belongs to a trainer of {generation.world} ranks that was replaced by "
                f"one of {self.generations[-1].world}. End this process"
            )
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
        committed = [version for version in self.versions if version.state is VersionState.COMMITTED]
        # One slot of `keep` is for the version that is being written.
        for version in committed[: max(0, len(committed) - (generation.keep - 1))]:
            version.advance(VersionEvent.SLOT_TAKEN)
        self.versions = [version for version in self.versions if version.state is VersionState.COMMITTED]
        used = {version.slot for version in self.versions if version.generation is generation}
        # Generations without a version have slots that nobody needs any more.
        needed = [generation, *(version.generation for version in self.versions)]
        self.generations = [each for each in self.generations if each in needed]
        return next(slot for slot in range(generation.keep) if slot not in used)

    def done(self, number: int, rank: int) -> bool:
        """Note that a rank has written its boxes. Return True if that committed the version.

        WeightsLostError if the version was superseded, or its memory is gone.
        """
        version = next((version for version in self.versions if version.number == number), None)
        if version is None or version.state in (VersionState.SUPERSEDED, VersionState.LOST):
            why = (
                "was given up by another rank"
                if version is None or version.state is VersionState.SUPERSEDED
                else "is lost"
            )
            raise WeightsLostError(f"version {number} of {self.name!r} {why} while rank {rank} wrote it. Publish again")
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

    def committed(self, number: int) -> Version | None:
        """Return a version if it is committed and has a slot."""
        versions = [version for version in self.versions if version.number == number]
        return versions[0] if versions and versions[0].state is VersionState.COMMITTED else None

    def newest(self) -> Version | None:
        """Return the newest committed version."""
        committed = [version for version in self.versions if version.state is VersionState.COMMITTED]
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
            if (host, host) in version.generation.slots and version.state is VersionState.COMMITTED:
                version.spread(host)
            for spread in version.spreads.values():
                spread.remove(host)
            lost = any(not spread.is_whole() for spread in version.spreads.values())
            if lost or (version.state is VersionState.OPEN and (host, host) in version.generation.slots):
                version.advance(VersionEvent.KEEPER_DIED)
        for generation in self.generations:
            for key in [key for key in generation.slots if key[0] == host]:
                del generation.slots[key]

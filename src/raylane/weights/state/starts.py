"""Starts of a trainer: which publishers of a name belong together. Pure: decisions of the catalogue.

A *start* is the set of publishers of all ranks that were made together; a version has the ranks of one start only. The
key of a start never repeats, and its publishers keep it when the name is dropped or the catalogue is started again:

    start   FORMING ──all ranks have registered──> COMPLETE ──a newer start──> REPLACED
                └──the ranks do not fit together──> REFUSED         (a newer start replaces a forming one too)

What a registration does follows from its age and from the place of its rank in the current start, see `DECISIONS`.
Called by `ledger`.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from raylane.core.state_table import StateTable
from raylane.errors import WeightsError
from raylane.weights.chunks.delta import DeltaOptions
from raylane.weights.layout.boxes import Layout, part_name


class PublisherKey(NamedTuple):
    """Identity of one `Publisher` object, and of its process."""

    token: str
    """Random text."""
    host: str
    """Ray's id of its node."""
    pid: int
    start_ticks: int


class StartKey(NamedTuple):
    """Identity of a start; a start that began later has a larger key."""

    began_ns: int
    """Time of the catalogue's clock at the first registration."""
    token: str
    """Token of the publisher that began it."""


class RankKey(NamedTuple):
    """Identity of a rank, which it sends with its calls."""

    start: StartKey
    rank: int
    token: str


class RankRegistration(NamedTuple):
    """Description of a rank, its tensors and its place."""

    rank: int
    world: int
    """Number of ranks."""
    layout: Layout
    same: Mapping[str, str]
    """Further names of tied tensors, and the name of each in the layout."""
    publisher: PublisherKey
    keep: int
    delta: DeltaOptions = DeltaOptions()
    digests: bool = False
    """True if the rank computes digests of what it publishes."""
    on_device: bool = False
    """True if the rank keeps what it publishes in memory of its CUDA device."""
    copies: int = 1
    """Number of hosts that are to have each part of a version."""
    trainer: str | None = None
    """Text of the user that is the same for all ranks of one start, and of no other start."""
    start: StartKey | None = None
    """Start to which the rank belongs, if it has registered before."""

    @property
    def host(self) -> str:
        """Ray's id of the rank's node."""
        return self.publisher.host

    @property
    def part(self) -> str:
        """Name of the part that the rank writes."""
        return part_name(self.host, self.rank, self.on_device)

    def options(self) -> tuple[int, int, DeltaOptions, bool, bool, int, str | None]:
        """Return what all ranks of a start have in common."""
        return self.world, self.keep, self.delta, self.digests, self.on_device, self.copies, self.trainer


class StartState(enum.Enum):
    """State of a start."""

    FORMING = "forming"
    """Ranks have not registered yet."""
    COMPLETE = "complete"
    REPLACED = "replaced"
    REFUSED = "refused"


class StartEvent(enum.Enum):
    """Event of a start."""

    ALL_REGISTERED = enum.auto()
    MISFIT = enum.auto()
    """The layouts of the ranks do not fit together."""
    NEWER_START = enum.auto()


START_TRANSITIONS = StateTable(
    {
        (StartState.FORMING, StartEvent.ALL_REGISTERED): StartState.COMPLETE,
        (StartState.FORMING, StartEvent.MISFIT): StartState.REFUSED,
        (StartState.FORMING, StartEvent.NEWER_START): StartState.REPLACED,
        (StartState.COMPLETE, StartEvent.NEWER_START): StartState.REPLACED,
    }
)


class Age(enum.Enum):
    """Age of a registration, compared with the current start."""

    FIRST = enum.auto()
    """The publisher registers for the first time."""
    OLDER = enum.auto()
    """It belongs to a start that began before the current one."""
    CURRENT = enum.auto()
    NEWER = enum.auto()


class Place(enum.Enum):
    """Place of a registering rank in the current start."""

    NONE = enum.auto()
    """There is no start."""
    OTHER_OPTIONS = enum.auto()
    """The start has other options, so it is another trainer."""
    VACANT = enum.auto()
    """The rank has not registered."""
    SAME = enum.auto()
    """The same publisher has it."""
    LIVING = enum.auto()
    """Another publisher has it, which can still publish."""
    ENDED = enum.auto()
    """Another publisher had it, whose process has ended or which was closed; other ranks can still publish."""
    ALL_ENDED = enum.auto()
    """No rank of the start can publish any more."""


class Decision(enum.Enum):
    """Effect of a registration."""

    BEGIN = enum.auto()
    """It begins a start, which replaces the current one as a whole."""
    JOIN = enum.auto()
    """It takes a vacant place."""
    RETURN = enum.auto()
    """It takes the place of a publisher that has ended: the rank was started again alone."""
    REFUSE = enum.auto()
    """It gets an error: a later start has replaced its own."""


DECISIONS: dict[tuple[Age, Place], Decision] = {
    **{(age, Place.NONE): Decision.BEGIN for age in Age},
    **{(Age.OLDER, place): Decision.REFUSE for place in Place if place is not Place.NONE},
    **{(Age.NEWER, place): Decision.BEGIN for place in Place},
    (Age.FIRST, Place.OTHER_OPTIONS): Decision.BEGIN,
    (Age.FIRST, Place.VACANT): Decision.JOIN,
    (Age.FIRST, Place.SAME): Decision.RETURN,
    (Age.FIRST, Place.LIVING): Decision.BEGIN,
    (Age.FIRST, Place.ENDED): Decision.RETURN,
    (Age.FIRST, Place.ALL_ENDED): Decision.BEGIN,
    (Age.CURRENT, Place.OTHER_OPTIONS): Decision.REFUSE,
    (Age.CURRENT, Place.VACANT): Decision.JOIN,
    (Age.CURRENT, Place.SAME): Decision.RETURN,
    (Age.CURRENT, Place.LIVING): Decision.REFUSE,
    (Age.CURRENT, Place.ENDED): Decision.REFUSE,
    (Age.CURRENT, Place.ALL_ENDED): Decision.REFUSE,
}
"""Effect of a registration, by its age and the place of its rank."""


@dataclass
class Start:
    """One start of a trainer."""

    key: StartKey
    options: tuple[int, int, DeltaOptions, bool, bool, int, str | None]
    members: dict[int, RankRegistration] = field(default_factory=dict)
    """Registrations by rank."""
    ended: set[str] = field(default_factory=set)
    """Tokens of publishers that were closed, or whose process has ended."""
    state: StartState = StartState.FORMING

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.options[0]

    def missing(self) -> list[int]:
        """Return the ranks that have not registered."""
        return [rank for rank in range(self.world) if rank not in self.members]

    def has(self, key: RankKey) -> bool:
        """Return True if a rank belongs to this start."""
        member = self.members.get(key.rank)
        return self.key == key.start and member is not None and member.publisher.token == key.token

    def of_open(self, key: RankKey) -> Start:
        """Return this start, for a rank that waits. WeightsError if its publisher was closed meanwhile."""
        if key.token in self.ended:
            raise WeightsError(f"the publisher of rank {key.rank} was closed while it waited for other ranks")
        return self

    def advance(self, event: StartEvent) -> None:
        """Change the state as the table says."""
        self.state = START_TRANSITIONS[self.state, event]

    def asked(self, registration: RankRegistration) -> list[PublisherKey]:
        """Return the publishers of which the catalogue must know whether they have ended, before it decides."""
        others = [each.publisher for rank, each in self.members.items() if rank != registration.rank]
        holder = self.members.get(registration.rank)
        if holder is not None and holder.publisher != registration.publisher:
            others.append(holder.publisher)
        elif self.missing() != [registration.rank]:  # it does not complete the start
            return []
        return [publisher for publisher in others if publisher.token not in self.ended]

    def forget_ended(self) -> None:
        """Let the places of publishers that have ended become vacant."""
        self.members = {rank: each for rank, each in self.members.items() if each.publisher.token not in self.ended}


def decide(start: Start | None, registration: RankRegistration, replaced: Collection[str]) -> Decision:
    """Return what a registration does. `replaced` has the texts of trainers that were replaced."""
    return DECISIONS[_age(start, registration, replaced), _place(start, registration)]


def _age(start: Start | None, registration: RankRegistration, replaced: Collection[str]) -> Age:
    named = start is not None and registration.trainer is not None and registration.trainer == start.options[-1]
    # Ranks of one trainer have different keys if the catalogue was started again between their registrations.
    if registration.start is None or start is None or named:
        return Age.OLDER if registration.trainer in replaced else Age.FIRST
    if registration.start == start.key:
        return Age.CURRENT
    return Age.NEWER if registration.start > start.key else Age.OLDER


def _place(start: Start | None, registration: RankRegistration) -> Place:
    if start is None:
        return Place.NONE
    if start.options != registration.options():
        return Place.OTHER_OPTIONS
    holder = start.members.get(registration.rank)
    if holder is None:
        return Place.VACANT
    if holder.publisher.token == registration.publisher.token:
        return Place.SAME
    if holder.publisher.token not in start.ended:
        return Place.LIVING
    living = [each for each in start.members.values() if each.publisher.token not in start.ended]
    return Place.ENDED if living else Place.ALL_ENDED

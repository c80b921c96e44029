"""What one actor is told of a graph, and what it answers. Pure records; they travel by cloudpickle, because constants
of a graph may be anything that an argument of an ordinary call may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from raylane.core.place import Place
from raylane.graph.channels.ring import RingSpec
from raylane.graph.plan.ir import Plan
from raylane.transport.source import Source

HOST_VARIABLE = "RAYLANE_HOST"
"""Processes with different values of this environment variable are treated as if on different hosts: for containers
that share a kernel but not /proc, and for tests."""
CONTROL_SLOTS = 4
"""Orders to one actor that may be unanswered."""
TROUBLE, EXITED = "trouble", "exited"
"""The words of reports that answer no question: the lane cannot go on with the graph; a method has ended its actor."""


def report_slots(max_inflight: int) -> int:
    """Slots of the line from an actor to the driver: answers, one failure for each execution in flight, two last words.

    The failure of an execution is read before the execution is over: it is written before the messages that the failed
    call owes, and these are read last."""
    return CONTROL_SLOTS + max_inflight + 2


@dataclass(frozen=True)
class Hello:
    """An actor's answer to the first question of `compile`."""

    place: Place
    who: str
    bell: str
    """Path of its doorbell."""
    host: str
    """RAYLANE_HOST of its environment: processes with different values are on different hosts."""
    gpus: bool
    """Whether torch there sees a GPU."""


@dataclass(frozen=True)
class Outbound:
    """How a member sends along one edge: into a ring of its own host, over hops to others, or both."""

    ring: RingSpec | None
    bells: tuple[str, ...]
    hops: tuple[tuple[int, int], ...] = ()
    """Member and level of each."""


@dataclass(frozen=True)
class Directions:
    """What every process of a graph that spans hosts knows of it."""

    key: bytes
    """Names the graph to listeners."""
    member: int
    names: tuple[str, ...]
    """How messages call each member."""
    alarm: int
    """The channel over which a member tells the driver why it gave up."""
    timeout_s: float | None
    max_lent_bytes: int


@dataclass(frozen=True)
class RingOrder:
    """A ring that this process shall make, because it writes it."""

    channel: int
    readers: tuple[str, ...]
    slots: int


@dataclass(frozen=True)
class Relayed:
    """A channel that arrives over a hop, and where this process passes its messages on."""

    channel: int
    source: tuple[int, int]
    """Member and level of the hop."""
    onward: Outbound
    slots: int


@dataclass(frozen=True)
class Posting:
    """The first part of what a member of a graph that spans hosts is told: what to have ready."""

    directions: Directions
    peers: tuple[tuple[int, int], ...]
    """Who will connect: member and level."""
    rings: tuple[RingOrder, ...]
    relayed: tuple[Relayed, ...]


@dataclass(frozen=True)
class Posted:
    """The answer to a `Posting`."""

    source: Source
    rings: Mapping[int, RingSpec]
    """By channel."""


@dataclass(frozen=True)
class HopTo:
    member: int
    level: int
    source: Source


@dataclass(frozen=True)
class Program:
    """One member's share of a graph."""

    graph: str
    member: int
    plan: Plan
    owner: Place | None
    """Its place if it is of this host: else a hop tells when it is gone."""
    owner_who: str
    inbound: Mapping[int, tuple[RingSpec, int]]
    """Edge to its ring here and this member's index among the readers."""
    outbound: Mapping[int, Outbound]
    control: tuple[RingSpec, int]
    report: Outbound
    max_inflight: int
    timeout_s: float | None
    max_lent_bytes: int
    exclusive: bool
    wake: tuple[int, int] | None
    """Process and descriptor of the eventfd that wakes the driver's asyncio loop, if the driver is of this host."""
    report_channel: int
    directions: Directions | None = None
    """If this member sends to other hosts or hears from them."""
    hops: tuple[HopTo, ...] = ()
    """Connections to open."""


def only(plan: Plan, member: int) -> Plan:
    """The plan without the arguments of other members' tasks: constants go only where they are used."""
    return replace(plan, tasks=tuple(t if t.member == member else replace(t, args=(), kwargs=()) for t in plan.tasks))

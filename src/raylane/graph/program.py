"""What one actor is told of a graph, and what it answers. Pure records; they travel by cloudpickle, because constants
of a graph may be anything that an argument of an ordinary call may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from raylane.core.place import Place
from raylane.graph.channels.ring import RingSpec
from raylane.graph.plan import Plan


@dataclass(frozen=True)
class Hello:
    """An actor's answer to the first question of `compile`."""

    place: Place
    who: str
    bell: str
    """Path of its doorbell."""
    node_ip: str
    listener: Any
    """`transport.ticket.Source` of its listener, for members of other hosts."""
    asynchronous: bool
    """Whether it is an asyncio actor."""
    gpus: bool
    """Whether torch there sees a GPU."""


@dataclass(frozen=True)
class Outbound:
    """How a member sends along one edge: into a ring of its own host, over hops to others, or both."""

    ring: RingSpec | None
    bells: tuple[str, ...]
    hops: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Program:
    """One member's share of a graph."""

    graph: str
    member: int
    plan: Plan
    owner: Place
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
    relays: Mapping[int, Outbound] = field(default_factory=dict)
    """Edges that arrive here over a hop, and where this member writes them to."""


def only(plan: Plan, member: int) -> Plan:
    """The plan without the arguments of other members' tasks: constants go only where they are used."""
    return replace(plan, tasks=tuple(t if t.member == member else replace(t, args=(), kwargs=()) for t in plan.tasks))

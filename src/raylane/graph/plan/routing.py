"""Which way messages take to readers on other hosts: rings, relays and hops, decided from who is where. Pure.

A *host* is a set of members that can share memory. On every host with readers of a channel there is one ring. On the
writer's own host the writer fills it; on another one a *relay* does, the first reader there, which gets each message
over a *hop* (`channels.hop`). So a value is serialised once and crosses to each host once. Up to ARITY hosts are served
by the writer itself; above, the relays form a tree, and relay i sends on to relays 4i+4 to 4i+7:

    writer -> 0 1 2 3         0 -> 4 5 6 7       1 -> 8 9 10 11  ...

Every step away from the writer has a *level*: 1 from the writer, 2 from its relays, and so on. Connections of different
levels are kept apart, so that one that waits (for memory that readers keep) can only ever wait for a deeper one: no
circle of processes that wait for each other's connections can come about. Level 0 is kept for the control lines, which
so never wait for anything else.

Called by `building`; `show` prints what `kinds` says.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from raylane.graph.plan.ir import DRIVER, Plan

ARITY = 4
LINES = 0
"""The level of control lines."""


@dataclass(frozen=True)
class Relay:
    """The member that receives a channel's messages for its host."""

    member: int
    readers: tuple[int, ...]
    """On its host, itself first."""
    source: int
    """Who sends to it: the writer, or another relay."""
    level: int


@dataclass(frozen=True)
class Route:
    """How the messages of one channel reach their readers."""

    channel: int
    writer: int
    local: tuple[int, ...]
    """Readers on the writer's own host."""
    relays: tuple[Relay, ...] = ()
    """One for each other host with readers."""

    def onward(self, member: int) -> tuple[tuple[int, int], ...]:
        """To whom this member sends over hops, with the level."""
        return tuple((relay.member, relay.level) for relay in self.relays if relay.source == member)

    def readers_beside(self, member: int) -> tuple[int, ...]:
        """The readers that share a ring with this one, itself included, in the order of the ring's semaphores."""
        groups = (self.local, *(relay.readers for relay in self.relays))
        return next(group for group in groups if member in group)


def fanout(count: int, arity: int = ARITY) -> list[int]:
    """For each of `count` relays who sends to it: another relay's index, or -1 for the writer."""
    return [-1 if index < arity else index // arity - 1 for index in range(count)]


def route(
    channel: int, writer: int, readers: Sequence[int], hosts: Sequence[Hashable], *, lines: bool = False
) -> Route:
    """The way of one channel. `hosts` says for every member where it is; `lines` marks a control line."""
    groups: dict[Hashable, list[int]] = {}
    for reader in readers:
        groups.setdefault(hosts[reader], []).append(reader)
    local = groups.pop(hosts[writer], [])
    parents = fanout(len(groups))
    relays: list[Relay] = []
    for members, parent in zip(groups.values(), parents, strict=True):
        source, level = (writer, 1) if parent < 0 else (relays[parent].member, relays[parent].level + 1)
        relays.append(Relay(members[0], tuple(members), source, LINES if lines else level))
    return Route(channel, writer, tuple(local), tuple(relays))


@dataclass(frozen=True)
class Lines:
    """The two channels between the driver and one actor, for orders and for answers."""

    control: Route
    report: Route


@dataclass(frozen=True)
class Routes:
    """All channels of a graph. The numbers of edges are their channels'; those of the lines come after them."""

    edges: tuple[Route, ...]
    lines: tuple[Lines, ...]
    """Of members 1, 2, ..."""
    hops: frozenset[tuple[int, int, int]]
    """(from, to, level) for each connection that is needed."""

    @property
    def all(self) -> tuple[Route, ...]:
        return (*self.edges, *(route for line in self.lines for route in (line.control, line.report)))

    @property
    def alarm(self) -> int:
        """The channel over which members tell the driver why they gave up: one after all others."""
        return len(self.edges) + 2 * len(self.lines)


def routes(plan: Plan, hosts: Sequence[Hashable]) -> Routes:
    """The ways of all channels of a plan, `hosts` being where each member is, the driver first."""
    count = len(plan.edges)
    edges = tuple(route(edge.index, edge.writer, edge.readers, hosts) for edge in plan.edges)
    lines = tuple(
        Lines(
            route(count + 2 * member - 2, DRIVER, (member,), hosts, lines=True),
            route(count + 2 * member - 1, member, (DRIVER,), hosts, lines=True),
        )
        for member in range(1, len(plan.members))
    )
    every = (*edges, *(route for line in lines for route in (line.control, line.report)))
    hops = {(relay.source, relay.member, relay.level) for found in every for relay in found.relays}
    # Whoever has a hop tells the driver when it cannot go on: those beside the driver need a connection for that alone.
    hops |= {(member, DRIVER, LINES) for hop in hops for member in hop[:2] if member != DRIVER}
    return Routes(edges, lines, frozenset(hops))


def kind(found: Route) -> str:
    """The kind of an edge's channel, for `show`: `shared memory`, `hop to 1 host`, `shared memory, hops to 2 hosts`."""
    parts = ["shared memory"] if found.local else []
    count = len(found.relays)
    if count:
        parts.append("hop to 1 host" if count == 1 else f"hops to {count} hosts")
    return ", ".join(parts)


def note(found: Route, names: Sequence[str]) -> str:
    """Who relays, for `show`; empty where nothing crosses."""
    if not found.relays:
        return ""
    ways = [
        names[relay.member] + ("" if relay.source == found.writer else f" (from {names[relay.source]})")
        for relay in found.relays
    ]
    return "relayed by " + ", ".join(ways)

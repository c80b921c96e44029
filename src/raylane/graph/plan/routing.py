"""Routes of messages to readers on other hosts: rings, relays and links, decided from the host of each member. Pure.

A *host* is a set of members that can share memory. Each host with readers of a channel has one ring. On the writer's
own host the writer fills that ring; on any other host a *relay* does, the first reader there, which gets each message
over a *link* (`channels.peer_link`). So a value is serialised once and crosses to each host once. The writer itself
serves up to ARITY hosts; above that the relays form a tree, in which relay i forwards to relays 4i+4 to 4i+7:

    writer -> 0 1 2 3         0 -> 4 5 6 7       1 -> 8 9 10 11  ...

Every link has a *level*: 1 from the writer, 2 from its relays, and so on. Links of different levels are separate
connections, so a link that waits (for memory that readers keep) can only wait for a link of a higher level: no cycle of
processes that wait for each other's links can arise. Level 0 belongs to the control channels, which therefore wait for
no other link.

Called by `driver.channel_setup`; `show` prints the result of `kind` and `note`.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from raylane.graph.plan.ir import DRIVER, Plan

ARITY = 4
CONTROL_LEVEL = 0
"""Level of the links that carry control channels and alarms."""


@dataclass(frozen=True)
class Relay:
    """Member that receives a channel's messages for its host."""

    member: int
    readers: tuple[int, ...]
    """Readers on the relay's host, the relay first."""
    source: int
    """Member that sends to the relay: the writer or another relay."""
    level: int


@dataclass(frozen=True)
class Route:
    """Route of one channel's messages to their readers."""

    channel: int
    writer: int
    local: tuple[int, ...]
    """Readers on the writer's own host."""
    relays: tuple[Relay, ...] = ()
    """One relay for each other host with readers."""

    def onward(self, member: int) -> tuple[tuple[int, int], ...]:
        """Return (member, level) of each link over which `member` sends."""
        return tuple((relay.member, relay.level) for relay in self.relays if relay.source == member)

    def ring_readers(self, member: int) -> tuple[int, ...]:
        """Return the readers of the ring that `member` reads, in the order of the ring's semaphores."""
        groups = (self.local, *(relay.readers for relay in self.relays))
        return next(group for group in groups if member in group)


def fanout(count: int, arity: int = ARITY) -> list[int]:
    """Return the sender to each of `count` relays: the index of another relay, or -1 for the writer."""
    return [-1 if index < arity else index // arity - 1 for index in range(count)]


def route(
    channel: int, writer: int, readers: Sequence[int], hosts: Sequence[Hashable], *, control: bool = False
) -> Route:
    """Return the route of one channel. `hosts` has the host of every member; `control` marks a control channel."""
    groups: dict[Hashable, list[int]] = {}
    for reader in readers:
        groups.setdefault(hosts[reader], []).append(reader)
    local = groups.pop(hosts[writer], [])
    parents = fanout(len(groups))
    relays: list[Relay] = []
    for members, parent in zip(groups.values(), parents, strict=True):
        source, level = (writer, 1) if parent < 0 else (relays[parent].member, relays[parent].level + 1)
        relays.append(Relay(members[0], tuple(members), source, CONTROL_LEVEL if control else level))
    return Route(channel, writer, tuple(local), tuple(relays))


@dataclass(frozen=True)
class ControlRoutes:
    """Routes of the two control channels of one actor: orders from the driver, reports to the driver."""

    orders: Route
    reports: Route


@dataclass(frozen=True)
class Routes:
    """Routes of all channels of a graph. Channel numbers of edges are edge indices; control channels follow them."""

    edges: tuple[Route, ...]
    control: tuple[ControlRoutes, ...]
    """Control channels of members 1, 2, ..."""

    @property
    def all(self) -> tuple[Route, ...]:
        """Routes of all edges and control channels."""
        return (*self.edges, *(route for pair in self.control for route in (pair.orders, pair.reports)))

    @functools.cached_property
    def links(self) -> frozenset[tuple[int, int, int]]:
        """(from, to, level) of each link that is needed."""
        links = {(relay.source, relay.member, relay.level) for found in self.all for relay in found.relays}
        # Both ends of a link raise alarms when the link is lost. Members on the driver's host have no other link to
        # the driver, so they get one for that purpose.
        alarms = {(member, DRIVER, CONTROL_LEVEL) for link in links for member in link[:2] if member != DRIVER}
        return frozenset(links | alarms)

    @property
    def alarm_channel(self) -> int:
        """Channel on which members report to the driver why they left: one after all others."""
        return len(self.edges) + 2 * len(self.control)


def routes(plan: Plan, hosts: Sequence[Hashable]) -> Routes:
    """Return the routes of all channels of a plan. `hosts` has the host of each member, the driver's first."""
    count = len(plan.edges)
    edges = tuple(route(edge.index, edge.writer, edge.readers, hosts) for edge in plan.edges)
    control = tuple(
        ControlRoutes(
            route(count + 2 * member - 2, DRIVER, (member,), hosts, control=True),
            route(count + 2 * member - 1, member, (DRIVER,), hosts, control=True),
        )
        for member in range(1, len(plan.members))
    )
    return Routes(edges, control)


def kind(found: Route) -> str:
    """Return the kind of a channel for `show`: `shared memory`, `link to 1 host`, `shared memory, links to 2 hosts`."""
    parts = ["shared memory"] if found.local else []
    count = len(found.relays)
    if count:
        parts.append("link to 1 host" if count == 1 else f"links to {count} hosts")
    return ", ".join(parts)


def note(found: Route, names: Sequence[str]) -> str:
    """Return the names of the relays for `show`; empty if no message leaves the host."""
    if not found.relays:
        return ""
    parts = [
        names[relay.member] + ("" if relay.source == found.writer else f" (from {names[relay.source]})")
        for relay in found.relays
    ]
    return "relayed by " + ", ".join(parts)

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
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from raylane.core.process.place import Place
from raylane.errors import GraphPlanError
from raylane.graph.nodes import connects_hosts
from raylane.graph.plan.ir import DRIVER, Edge, Plan

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

    @property
    def rings(self) -> dict[int, tuple[int, ...]]:
        """Readers of each ring, in the order of its semaphores, by the member that writes the ring."""
        local = {self.writer: self.local} if self.local else {}
        return local | {relay.member: relay.readers for relay in self.relays}

    def ring_of(self, reader: int) -> int:
        """Return the member that writes the ring which `reader` reads."""
        return next(writer for writer, readers in self.rings.items() if reader in readers)

    def onward(self, member: int) -> tuple[tuple[int, int], ...]:
        """Return (member, level) of each link over which `member` sends."""
        return tuple((relay.member, relay.level) for relay in self.relays if relay.source == member)

    @property
    def members(self) -> set[int]:
        """The writer, all readers and all relays, which are readers too."""
        return {self.writer}.union(*self.rings.values())


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
class Routes:
    """Routes of all channels of a graph, by channel number: the edges, then orders and reports of each actor in turn.

    The number after them belongs to alarms, which travel over links alone.
    """

    edges: tuple[Route, ...]
    """Channel numbers of edges are edge indices."""
    orders: tuple[Route, ...] = ()
    """Channels of the driver's orders to members 1, 2, ..."""
    reports: tuple[Route, ...] = ()
    """Channels of the reports of members 1, 2, ..."""

    @property
    def all(self) -> tuple[Route, ...]:
        """Routes of all edges and control channels; each stands at the position of its number."""
        return (*self.edges, *(route for pair in zip(self.orders, self.reports, strict=True) for route in pair))

    @functools.cached_property
    def links(self) -> frozenset[tuple[int, int, int]]:
        """(from, to, level) of each link that is needed."""
        links = {(relay.source, relay.member, relay.level) for route in self.all for relay in route.relays}
        # Both ends of a link raise alarms when the link is lost. Members on the driver's host have no other link to
        # the driver, so they get one for that purpose.
        alarms = {(member, DRIVER, CONTROL_LEVEL) for link in links for member in link[:2] if member != DRIVER}
        return frozenset(links | alarms)


def routes(plan: Plan, hosts: Sequence[Hashable]) -> Routes:
    """Return the routes of all channels of a plan. `hosts` has the host of each member, the driver's first."""
    edges = []
    for edge in plan.edges:
        # Over tcp every member is a host of its own. Ring and doorbell of a reader stay as they are.
        apart = [(host, member) for member, host in enumerate(hosts)] if edge.transport == "tcp" else hosts
        edge_route = route(edge.index, edge.writer, edge.readers, apart)
        if edge_route.relays and not connects_hosts(edge.transport):
            writer, reader = plan.members[edge.writer], plan.members[edge_route.relays[0].member]
            raise GraphPlanError(
                f"{plan.source_label(edge.value)} has the transport {edge.transport!r}, but {writer} and {reader} are "
                "on different hosts, which share no memory. Use 'auto' or 'tcp'"
            )
        edges.append(edge_route)
    count = len(plan.edges) - 2
    actors = range(1, len(plan.members))
    return Routes(
        edges=tuple(edges),
        orders=tuple(route(count + 2 * actor, DRIVER, (actor,), hosts, control=True) for actor in actors),
        reports=tuple(route(count + 2 * actor + 1, actor, (DRIVER,), hosts, control=True) for actor in actors),
    )


def kind(channel_route: Route) -> str:
    """Return the kind of a channel for `show`: `shared memory`, `link to 1 host`, `shared memory, links to 2 hosts`."""
    parts = ["shared memory"] if channel_route.local else []
    count = len(channel_route.relays)
    if count:
        parts.append("link to 1 host" if count == 1 else f"links to {count} hosts")
    return ", ".join(parts)


def note(channel_route: Route, names: Sequence[str]) -> str:
    """Return the names of the relays for `show`; empty if no message leaves the host."""
    if not channel_route.relays:
        return ""
    parts = [
        names[relay.member] + ("" if relay.source == channel_route.writer else f" (from {names[relay.source]})")
        for relay in channel_route.relays
    ]
    return "relayed by " + ", ".join(parts)


def publishing_cuda(plan: Plan, with_gpus: Mapping[int, Place]) -> Plan:
    """Return a plan in which edges with `auto` between actors with GPUs on one host may publish large CUDA tensors.

    `with_gpus` has the places of the members that see a GPU.
    """
    if not with_gpus:
        return plan

    def on_one_host(edge: Edge) -> bool:
        places = [with_gpus.get(member) for member in (edge.writer, *edge.readers)]
        first = places[0]
        return first is not None and all(place is not None and place.same_host(first) for place in places)

    edges = [replace(e, publishes_cuda=e.transport == "auto" and on_one_host(e)) for e in plan.edges]
    return replace(plan, edges=tuple(edges))

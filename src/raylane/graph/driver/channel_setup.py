"""Setup of a graph's channels: which process creates which ring, which member relays, what each actor is sent.

Within one host (the usual case) the driver creates all rings. Where a graph spans hosts, the rings of another host are
created by their writer there, before the programs are sent (`peer_setups`), and links are opened in between. Called by
`deploy`, which talks to the actors.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Hashable, Iterable, Mapping

from raylane import _ray
from raylane.core.deadline import Deadline
from raylane.core.place import Place, here
from raylane.core.portable import FLAGS
from raylane.core.semaphore import Segment
from raylane.errors import GraphPlanError
from raylane.graph.channels import ring
from raylane.graph.channels.lease import LeasePool
from raylane.graph.channels.peer_link import Writer
from raylane.graph.channels.peer_network import PeerNetwork, open_shared
from raylane.graph.channels.ring import RingReader, RingSpec, RingWriter
from raylane.graph.channels.specs import (
    LinkSpec,
    NetworkSpec,
    OutboundSpec,
    PeerEndpoint,
    PeerSetup,
    RelaySpec,
)
from raylane.graph.driver.connections import Connections
from raylane.graph.plan import routing
from raylane.graph.plan.ir import DRIVER
from raylane.graph.plan.routing import Route
from raylane.graph.values import message as messages
from raylane.graph.worker.program import CONTROL_SLOTS, HOST_VARIABLE, Program, graph_flag, report_slots, share_of
from raylane.transport import endpoint as endpoints
from raylane.transport.source import Source


def host_of(place: Place, named: str) -> Hashable:
    """Return a key that is equal for members that can share memory through /proc/PID/fd."""
    return place.boot_id, place.pid_namespace, place.uid, named


class ChannelSetup:
    """Steps from a plan to open channels. The driver's ends go into `connections`."""

    def __init__(
        self,
        connections: Connections,
        *,
        max_inflight: int,
        timeout_s: float | None,
        max_lent_bytes: int,
        exclusive: bool,
    ) -> None:
        self.graph = uuid.uuid4().hex
        """Name of the graph, unique everywhere."""
        self._connections = connections
        self._plan = connections.plan
        self._slots = max_inflight
        self._timeout_s = timeout_s
        self._max_lent_bytes = max_lent_bytes
        self._exclusive = exclusive
        infos = connections.infos
        self._names = tuple(
            f"{name} ({who})"
            for name, who in zip(self._plan.members, [str(here()), *(info.name for info in infos)], strict=True)
        )
        """Name of each member for messages."""
        # Compare hosts by kernel, pid namespace and user, not by name: two containers of one machine differ.
        self._hosts = [host_of(here(), os.environ.get(HOST_VARIABLE, ""))]
        self._hosts += [host_of(info.place, info.host) for info in infos]
        self._routes = connections.routes = routing.routes(self._plan, self._hosts)
        # An edge has a slot for each execution in flight; control channels have their own, smaller bounds.
        self._slots_of = {route.channel: CONTROL_SLOTS for route in self._routes.all}
        self._slots_of |= {route.channel: self._slots for route in self._routes.edges}
        self._slots_of |= {pair.reports.channel: report_slots(self._slots) for pair in self._routes.control}
        self._specs: dict[tuple[int, int], RingSpec] = {}
        """Rings by (channel, member that writes there: the writer itself or a relay)."""
        self._segments: dict[tuple[int, int], Segment] = {}
        """Segments of the rings that the driver has created."""
        self._doorbells: dict[int, Segment] = {DRIVER: connections.doorbell.segment}
        self._sources: dict[int, Source] = {}
        """Address of each process with a link."""
        inputs = [edge for edge in self._plan.edges if edge.writer == DRIVER]
        # Inputs of `max_inflight` executions may be unread; each execution leases at most once for each input edge.
        connections.pool = LeasePool(
            max_lent_bytes, timeout_s, max_inflight * len(inputs), lifecycle=connections.lifecycle
        )

    # Who writes which ring

    def _rings(self, route: Route) -> Iterable[tuple[int, tuple[int, ...]]]:
        """Yield (writer, readers) of each ring of a channel."""
        if route.local:
            yield route.writer, route.local
        for relay in route.relays:
            yield relay.member, relay.readers

    def _creator(self, writer: int) -> int:
        """Return the member that creates the rings of `writer`."""
        return DRIVER if self._hosts[writer] == self._hosts[DRIVER] else writer

    def _ring_of(self, route: Route, reader: int) -> tuple[int, int]:
        """Return (writer, index of the reader) of the ring from which a member reads a channel."""
        for writer, readers in self._rings(route):
            if reader in readers:
                return writer, readers.index(reader)
        raise AssertionError(f"member {reader} does not read channel {route.channel}")

    def _doorbell_path(self, member: int) -> str:
        connections = self._connections
        return connections.doorbell.segment.path if member == DRIVER else connections.infos[member - 1].doorbell

    def _new_ring(self, route: Route, writer: int, readers: tuple[int, ...]) -> RingSpec:
        # In the driver each ring has a flag of its own (as long as there are enough); in an actor each graph has one.
        flags = tuple(route.channel % FLAGS if reader == DRIVER else graph_flag(self.graph) for reader in readers)
        names = tuple(self._names[reader] for reader in readers)
        return RingSpec(names, self._slots_of[route.channel], flags, writer)

    # Step 1: rings of the driver's host

    def create_rings(self) -> None:
        """Create all rings of the driver's host."""
        wanted = {
            (route.channel, writer): self._new_ring(route, writer, readers)
            for route in self._routes.all
            for writer, readers in self._rings(route)
            if self._creator(writer) == DRIVER
        }
        # One segment for all rings: a descriptor for each edge would exhaust `ulimit -n` in large graphs.
        for at, made in zip(wanted, ring.make_rings(list(wanted.values())), strict=True):
            self._specs[at], self._segments[at] = made

    # Step 2, if the graph spans hosts: every process gets ready for links

    def peer_setups(self) -> dict[int, PeerSetup]:
        """Return what each member with a link, the driver included, must prepare. Empty within one host."""
        members = sorted({member for link in self._routes.links for member in link[:2]})
        return {member: self._peer_setup(member) for member in members}

    def _peer_setup(self, member: int) -> PeerSetup:
        rings, relays = [], []
        for route in self._routes.all:
            for writer, readers in self._rings(route):
                # Rings of the driver's host exist already; this member creates those of its own host that it writes.
                if writer == member and self._creator(writer) == member != DRIVER:
                    rings.append((route.channel, self._new_ring(route, writer, readers)))
            for relay in route.relays:
                if relay.member == member:
                    onward = OutboundSpec(
                        self._specs.get((route.channel, member)),
                        tuple(self._doorbell_path(reader) for reader in relay.readers),
                        route.onward(member),
                    )
                    source = relay.source, relay.level
                    relays.append(RelaySpec(route.channel, source, onward, self._slots_of[route.channel]))
        # Only these may connect: the listener refuses any other member and level.
        peers = tuple(sorted((source, level) for source, to, level in self._routes.links if to == member))
        return PeerSetup(self._network_spec(member), peers, tuple(rings), tuple(relays))

    def _network_spec(self, member: int) -> NetworkSpec:
        return NetworkSpec(
            key=bytes.fromhex(self.graph),
            member=member,
            names=self._names,
            alarm_channel=self._routes.alarm_channel,
            timeout_s=self._timeout_s,
            max_lent_bytes=self._max_lent_bytes,
        )

    def prepare_own_network(self, setup: PeerSetup) -> None:
        """Prepare the driver's own process for links."""
        network = self._connections.network = PeerNetwork(setup.network, self._connections.lifecycle)
        # The driver relays into rings that it has created before.
        for (channel, writer), segment in self._segments.items():
            if writer == DRIVER:
                network.rings[channel] = self._specs[channel, writer], segment
        network.prepare(setup)
        self._sources[DRIVER] = endpoints.endpoint().source()

    def add_endpoints(self, answers: Mapping[int, PeerEndpoint]) -> None:
        """Add the addresses and rings of the actors that have prepared for links."""
        for member, answer in answers.items():
            self._sources[member] = answer.source
            self._specs |= {(channel, member): spec for channel, spec in answer.rings.items()}

    def _links_from(self, member: int) -> tuple[LinkSpec, ...]:
        return tuple(
            LinkSpec(to, level, self._sources[to])
            for source, to, level in sorted(self._routes.links)
            if source == member
        )

    # Step 3: the driver's ends, and the programs of the actors

    def open_own_ends(self, deadline: Deadline) -> None:
        """Open the driver's ends of all channels. Waits until the driver's links are open."""
        connections = self._connections
        if connections.network is not None:
            connections.network.connect(self._links_from(DRIVER), deadline)
        for edge in self._plan.edges_to(DRIVER):
            connections.readers[edge.index] = self._reader(self._routes.edges[edge.index])
        for edge in self._plan.edges_from(DRIVER):
            connections.inputs.append((self._writer(self._routes.edges[edge.index]), edge.value))
        for pair in self._routes.control:
            connections.control.add(self._writer(pair.orders), self._reader(pair.reports))

    def _reader(self, route: Route) -> RingReader:
        writer, index = self._ring_of(route, DRIVER)
        at = route.channel, writer
        return RingReader(
            self._segments[at], self._specs[at], index, self._connections.leases, self._connections.doorbell
        )

    def _writer(self, route: Route) -> Writer:
        connections = self._connections
        own = None
        if route.local:
            at = route.channel, DRIVER
            doorbells = [self._doorbell(reader) for reader in route.local]
            assert connections.pool is not None
            own = RingWriter(self._segments[at], self._specs[at], doorbells, connections.pool)
        onward = route.onward(DRIVER)
        if onward:
            assert connections.network is not None
            return connections.network.writer(own, route.channel, onward, self._slots_of[route.channel])
        assert own is not None
        return own

    def _doorbell(self, member: int) -> Segment:
        if member not in self._doorbells:
            self._doorbells[member] = open_shared(self._doorbell_path(member), self._names[member])
        return self._doorbells[member]

    def programs(self) -> list[bytes]:
        """Return the pickled programs of members 1, 2, ... GraphPlanError if a constant cannot be pickled."""
        with_links = {member for link in self._routes.links for member in link[:2]}
        packed = []
        for member in range(1, len(self._plan.members)):
            try:
                packed.append(_ray.dumps(self._program(member, member in with_links)))
            except Exception as error:
                raise GraphPlanError(
                    f"a constant in the calls of {self._plan.members[member]} cannot be pickled: "
                    f"{messages.error_text(error)}. Pass a value that can, or create it in the actor"
                ) from error
        return packed

    def _program(self, member: int, has_links: bool) -> Program:
        control = self._routes.control[member - 1]
        edges = self._routes.edges
        same_host = self._hosts[member] == self._hosts[DRIVER]
        return Program(
            graph=self.graph,
            member=member,
            plan=share_of(self._plan, member),
            # A driver on another host has another pid namespace or kernel: its link notices its end.
            owner=here() if same_host else None,
            owner_name=_ray.describe_self(),
            inbound={edge.index: self._inbound(edges[edge.index], member) for edge in self._plan.edges_to(member)},
            outbound={edge.index: self._outbound(edges[edge.index], member) for edge in self._plan.edges_from(member)},
            orders=self._inbound(control.orders, member),
            reports=self._outbound(control.reports, member),
            reports_channel=control.reports.channel,
            max_inflight=self._slots,
            timeout_s=self._timeout_s,
            max_lent_bytes=self._max_lent_bytes,
            exclusive=self._exclusive,
            wake=(os.getpid(), self._connections.wake_fd) if same_host else None,
            network=self._network_spec(member) if has_links else None,
            links=self._links_from(member) if has_links else (),
        )

    def _inbound(self, route: Route, member: int) -> tuple[RingSpec, int]:
        writer, index = self._ring_of(route, member)
        return self._specs[route.channel, writer], index

    def _outbound(self, route: Route, member: int) -> OutboundSpec:
        doorbells = tuple(self._doorbell_path(reader) for reader in route.local)
        return OutboundSpec(self._specs.get((route.channel, member)), doorbells, route.onward(member))

    def close_descriptors(self) -> None:
        """Close the file descriptors of rings: by now every process has opened them, or the compilation has failed."""
        for segment in (*self._segments.values(), self._connections.doorbell.segment):
            segment.close_fd()

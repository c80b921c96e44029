"""Setup of a graph's channels: which process creates which ring, which member relays, what each actor is sent.

Within one host (the usual case) the driver creates all rings. Where a graph spans hosts, the rings of another host are
created by their writer there, before the programs are sent, and links are opened in between. Called by `deploy`, which
talks to the actors.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Collection, Hashable, Mapping
from typing import Any

from raylane import _ray
from raylane.core import settings
from raylane.core.deadline import Deadline
from raylane.core.memory.segment import Segment
from raylane.core.process.place import Place, here
from raylane.core.signals import semaphore
from raylane.core.signals.semaphore import SEMAPHORE_BYTES
from raylane.errors import GraphPlanError
from raylane.graph.channels import ring
from raylane.graph.channels.deadlines import ExecutionDeadlines
from raylane.graph.channels.ends import ChannelEnds, notify_new_readers
from raylane.graph.channels.layout import GraphLayout, GraphOptions
from raylane.graph.channels.lease import LeasePool
from raylane.graph.channels.peer_link import Writer
from raylane.graph.channels.peer_network import NetworkEvents, PeerNetwork
from raylane.graph.channels.published import check_available
from raylane.graph.channels.ring import RingReader, RingSpec
from raylane.graph.driver.connections import Connections
from raylane.graph.plan import routing
from raylane.graph.plan.ir import DRIVER
from raylane.graph.plan.routing import Route
from raylane.graph.values import message as messages
from raylane.graph.values import references
from raylane.graph.worker.program import ActorInfo, Program, share_of
from raylane.transport.link import endpoint as endpoints
from raylane.transport.value.source import Source


def host_of(place: Place, named: str) -> Hashable:
    """Return a key that is equal for members that can share memory through /proc/PID/fd."""
    return place.boot_id, place.pid_namespace, place.uid, named


class ChannelSetup:
    """Steps from a plan to open channels. The driver's ends go into `connections`."""

    def __init__(self, connections: Connections, options: GraphOptions) -> None:
        self.graph = uuid.uuid4().hex
        self._connections = connections
        self._plan = connections.plan
        self.options = options
        infos = connections.infos
        self._names = tuple(
            f"{name} ({who})"
            for name, who in zip(self._plan.members, [str(here()), *(info.name for info in infos)], strict=True)
        )
        # Compare hosts by kernel, pid namespace and user, not by name: two containers of one machine differ.
        self._hosts = [host_of(here(), settings.HOST.read())]
        self._hosts += [host_of(info.place, info.host) for info in infos]
        self._doorbells = [connections.doorbell.segment.path, *(info.doorbell for info in infos)]
        connections.routes = routing.routes(self._plan, self._hosts)
        self._routes: list[dict[int, Route]] = [{} for _ in self._names]
        """Routes by channel, for each member that has to do with them."""
        for route in connections.routes.all:
            for member in route.members:
                self._routes[member][route.channel] = route
        self._links: list[list[tuple[int, int, int]]] = [[] for _ in self._names]
        """(from, to, level) of each link of each member."""
        for link in sorted(connections.routes.links):
            for member in link[:2]:
                self._links[member].append(link)
        self._rings: dict[tuple[int, int], RingSpec] = {}
        """Rings by (channel, member that writes there: the writer itself or a relay)."""
        self._deadlines_path = ""
        self._made: list[Segment] = [connections.doorbell.segment]
        """Segments of this process that other processes open."""
        self._sources: dict[int, Source] = {}
        """Address of each process with a link."""

    def _layout(self, member: int, first_execution: int = 0) -> GraphLayout:
        """Return what a member must know of the channels, as far as it is known yet."""
        routes, links = self._routes[member], self._links[member]
        used = (
            (channel, writer)
            for channel, route in routes.items()
            for writer, readers in route.rings.items()
            if member == writer or member in readers
        )
        ring_readers = {reader for route in routes.values() for reader in route.rings.get(member, ())}
        return GraphLayout(
            graph=self.graph,
            member=member,
            names=self._names,
            edge_count=len(self._plan.edges),
            options=self.options,
            near_driver=self._hosts[member] == self._hosts[DRIVER],
            routes=routes,
            doorbells={reader: self._doorbells[reader] for reader in ring_readers},
            links=tuple(links),
            rings={at: self._rings[at] for at in used if at in self._rings},
            sources={to: self._sources[to] for _, to, _ in links if to in self._sources},
            deadlines=self._deadlines_path if self._hosts[member] == self._hosts[DRIVER] else "",
            first_execution=first_execution,
        )

    def create_rings(self) -> None:
        """Create all rings of the driver's host, and the deadlines. Writers on other hosts create theirs."""
        slots = self.options.max_inflight
        deadlines = Segment.make(ExecutionDeadlines.size_of(slots))
        self._made.append(deadlines)
        self._deadlines_path = deadlines.path
        self._connections.deadlines = ExecutionDeadlines(deadlines, slots)
        routes = self._connections.routes.all
        driver_layout = self._layout(DRIVER)
        sizes = {
            (route.channel, writer): driver_layout.new_ring(route.channel, writer, readers)
            for route in routes
            for writer, readers in route.rings.items()
            if self._hosts[writer] == self._hosts[DRIVER]
        }
        # One segment for all rings: a descriptor for each edge would exhaust `ulimit -n` in large graphs.
        for at, (spec, segment) in zip(sizes, ring.make_rings(list(sizes.values())), strict=True):
            self._rings[at] = spec
            self._made.append(segment)

    def peer_layouts(self) -> dict[int, GraphLayout]:
        """Return the layout for each actor with a link, which must get ready for links. Empty within one host."""
        return {member: self._layout(member) for member, links in enumerate(self._links) if links and member != DRIVER}

    def prepare_own_network(self) -> None:
        """Prepare the driver's own process for links."""
        connections = self._connections
        events = NetworkEvents(connections.ended, connections.broken, connections.failed)
        connections.network = PeerNetwork(self._layout(DRIVER), connections.lifecycle, events)
        connections.network.prepare(self._made)
        self._sources[DRIVER] = endpoints.endpoint().source()

    def add_peers(self, answers: Mapping[int, tuple[Source, dict[tuple[int, int], RingSpec]]]) -> None:
        """Add the addresses and rings of the actors that have prepared for links."""
        for member, (source, rings) in answers.items():
            self._sources[member] = source
            self._rings |= rings

    def open_own_ends(self, deadline: Deadline) -> None:
        """Open the driver's ends of all channels. Waits until the driver's links are open."""
        connections, plan, layout = self._connections, self._plan, self._layout(DRIVER)
        network = connections.network
        if network is not None:
            network.connect(layout, deadline)
        ends = ChannelEnds(layout, self._made, {} if network is None else network.links)
        inputs = plan.edges_from(DRIVER)
        # Inputs of `max_inflight` executions may be unread; each execution leases at most once for each input edge.
        read_within = self.options.max_inflight * len(inputs)
        connections.pool = pool = LeasePool(
            self.options.max_lent_bytes, self.options.timeout_s, read_within, lifecycle=connections.lifecycle
        )
        for edge in plan.edges_to(DRIVER):
            connections.readers[edge.index] = ends.reader(edge.index, connections.leases, connections.doorbell)
        check_available(plan, DRIVER)
        connections.inputs = [
            (ends.edge_writer(edge, plan.source_label(edge.value), pool), edge.value) for edge in inputs
        ]
        for orders, reports in zip(connections.routes.orders, connections.routes.reports, strict=True):
            reader = ends.reader(reports.channel, connections.leases, connections.doorbell)
            connections.control.add(ends.writer(orders.channel, pool), reader)

    def programs(self) -> list[tuple[bytes, list[Any]]]:
        """Return the programs of members 1, 2, ..., packed by `values.references`.

        GraphPlanError if a constant cannot be pickled.
        """
        return [self.program(member) for member in range(1, len(self._plan.members))]

    def program(self, member: int, first_execution: int = 0) -> tuple[bytes, list[Any]]:
        """Return the program of a member, packed. GraphPlanError if a constant cannot be pickled."""
        program = Program(
            layout=self._layout(member, first_execution),
            plan=share_of(self._plan, member),
            owner=here(),
            owner_name=_ray.describe_self(),
            wake_fd=self._connections.wake_fd,
        )
        try:
            return references.pack(program)
        except Exception as error:
            raise GraphPlanError(
                f"a constant in the calls of {self._plan.members[member]} cannot be pickled: "
                f"{messages.error_text(error)}. Pass a value that can, or create it in the actor"
            ) from error

    def check_repairable(self) -> None:
        """Raise GraphPlanError if the channels cannot be opened anew after the death of an actor."""
        for edge in self._plan.edges:
            if edge.transport not in ("auto", "shm"):
                raise GraphPlanError(
                    f"on_death='repair' needs edges with the transport 'auto' or 'shm', but "
                    f"{self._plan.source_label(edge.value)} has {edge.transport!r}. Change it, or compile with "
                    "on_death='end' and call recompile() after a death"
                )
        for member, host in enumerate(self._hosts):
            if host != self._hosts[DRIVER]:
                raise GraphPlanError(
                    f"on_death='repair' needs all actors on the driver's host, but {self._names[member]} is on "
                    "another one. Compile with on_death='end' and call recompile() after a death"
                )

    def name_of(self, member: int) -> str:
        """Return the name of a member as a reader of leased memory."""
        return self._names[member]

    def neighbours(self, member: int) -> set[int]:
        """Return the actors that exchange messages of edges with a member."""
        readers = {reader for edge in self._plan.edges_from(member) for reader in edge.readers}
        writers = {edge.writer for edge in self._plan.edges_to(member)}
        return (readers | writers) - {DRIVER}

    def shares_memory(self, info: ActorInfo) -> bool:
        """Return True if a process can share memory with the driver."""
        return host_of(info.place, info.host) == self._hosts[DRIVER]

    def doorbell_of(self, member: int) -> str:
        """Return the path of a member's doorbell."""
        return self._doorbells[member]

    def reopen_own_ends(self, members: Collection[int]) -> None:
        """Open the driver's ends of the channels to members whose processes are new. No execution is in flight.

        GraphPlanError if a new process has ended too.
        """
        connections, layout = self._connections, self._layout(DRIVER)
        ends = ChannelEnds(layout, self._made)
        doorbells = {member: ends.doorbell(member) for member in members}
        edges = zip(self._plan.edges_from(DRIVER), connections.inputs, strict=True)
        notify_new_readers(layout, ((edge.index, writer) for edge, (writer, _) in edges), doorbells)
        for member in members:
            connections.control.replace(
                member,
                connections.infos[member - 1].name,
                _ray.actor_id_of(connections.actors[member - 1]),
                functools.partial(self._reopen_control, member, ends),
            )

    def _reopen_control(self, member: int, ends: ChannelEnds) -> tuple[Writer, RingReader]:
        """Empty the rings of orders to a member and those that it has written. Return the ends of its control channel.

        Together: an order that was sent in between would remain in the ring, and shift all later answers.
        """
        connections, routes, pool = self._connections, self._connections.routes, self._connections.pool
        assert pool is not None
        orders, reports = routes.orders[member - 1], routes.reports[member - 1]
        for route in (orders, *(route for route in routes.all if route.writer == member)):
            self._empty_ring(route)
        reader = ends.reader(reports.channel, connections.leases, connections.doorbell)
        return ends.writer(orders.channel, pool), reader

    def _empty_ring(self, route: Route) -> None:
        """Drop the unread messages of a ring that a dead process has written or read alone.

        The readers that live have read every message.
        """
        spec = self._rings[route.channel, route.writer]
        segment = next(segment for segment in self._made if segment.path == spec.path)
        for index in range(len(spec.readers)):
            while not semaphore.try_wait(segment.address + spec.offset + index * SEMAPHORE_BYTES):
                continue

    def replace_member(self, member: int, info: ActorInfo) -> None:
        """Note the process that takes the place of a member's dead one."""
        self._connections.infos[member - 1] = info
        self._doorbells[member] = info.doorbell

    def keep_descriptors(self) -> None:
        """Leave the file descriptors of rings open until the graph ends."""
        self._connections.kept_segments = self._made

    def close_descriptors(self) -> None:
        """Close the file descriptors of rings: by now every process has opened them, or the compilation has failed."""
        if not self._connections.kept_segments:
            for segment in self._made:
                segment.close_fd()

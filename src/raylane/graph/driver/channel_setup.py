"""From a plan and the places of its members to open channels: who makes which ring, who relays, who is told what.

Within one host (the usual case) the driver makes all rings. Where a graph spans hosts, the rings of another host are
made by whoever writes them there, before the programs are sent (`postings`), and hops are opened in between. Called by
`setup.wire`, which talks to the actors.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING

from raylane import _ray
from raylane.core.deadline import Deadline
from raylane.core.place import Place, here
from raylane.core.semaphore import Segment
from raylane.errors import GraphPlanError
from raylane.graph.channels import ring
from raylane.graph.channels.lease import LeasePool
from raylane.graph.channels.peer_link import Writer
from raylane.graph.channels.peer_network import Station, open_shared
from raylane.graph.channels.ring import RingReader, RingSpec, RingWriter
from raylane.graph.plan import routing
from raylane.graph.plan.ir import DRIVER
from raylane.graph.plan.routing import Route
from raylane.graph.values import message as m
from raylane.graph.worker.program import (
    CONTROL_SLOTS,
    HOST_VARIABLE,
    Directions,
    HopTo,
    Outbound,
    Posted,
    Posting,
    Program,
    Relayed,
    RingOrder,
    only,
    report_slots,
)
from raylane.transport import endpoint as endpoints
from raylane.transport.source import Source

if TYPE_CHECKING:
    from raylane.graph.driver.deploy import Wiring


def host_of(place: Place, named: str) -> Hashable:
    """Members with the same answer can share memory through /proc/PID/fd."""
    return place.boot_id, place.pid_namespace, place.uid, named


class Builder:
    """Opens the driver's ends as it goes: they are the `Wiring`'s."""

    def __init__(
        self, wiring: Wiring, *, max_inflight: int, timeout_s: float | None, max_lent_bytes: int, exclusive: bool
    ) -> None:
        self.wiring = wiring
        self.plan = wiring.plan
        self.slots = max_inflight
        self.timeout_s = timeout_s
        self.max_lent_bytes = max_lent_bytes
        self.exclusive = exclusive
        self.graph = uuid.uuid4().hex
        hellos = wiring.hellos
        self.names = tuple(
            f"{name} ({who})"
            for name, who in zip(self.plan.members, [str(here()), *(hello.who for hello in hellos)], strict=True)
        )
        self.hosts = [host_of(here(), os.environ.get(HOST_VARIABLE, ""))]
        self.hosts += [host_of(hello.place, hello.host) for hello in hellos]
        self.routes = wiring.routes = routing.routes(self.plan, self.hosts)
        self._slots_of = {route.channel: CONTROL_SLOTS for route in self.routes.all}
        self._slots_of |= {route.channel: self.slots for route in self.routes.edges}
        self._slots_of |= {lines.report.channel: report_slots(self.slots) for lines in self.routes.lines}
        self._specs: dict[tuple[int, int], RingSpec] = {}
        """By channel and the member that writes there: the writer itself or a relay."""
        self._segments: dict[tuple[int, int], Segment] = {}
        """Of the rings that the driver has made."""
        self._bells: dict[int, Segment] = {DRIVER: wiring.bell}
        self._sources: dict[int, Source] = {}
        inputs = [edge for edge in self.plan.edges if edge.writer == DRIVER]
        wiring.pool = LeasePool(max_lent_bytes, timeout_s, max_inflight * len(inputs))

    # What is where

    def _fillers(self, route: Route) -> Iterable[tuple[int, tuple[int, ...]]]:
        """Who writes each ring of a channel, and who reads it there."""
        if route.local:
            yield route.writer, route.local
        for relay in route.relays:
            yield relay.member, relay.readers

    def _maker(self, filler: int) -> int:
        return DRIVER if self.hosts[filler] == self.hosts[DRIVER] else filler

    def _ring_of(self, route: Route, reader: int) -> tuple[int, int]:
        """(who writes the ring from which a member reads a channel, the reader's index there)."""
        for filler, readers in self._fillers(route):
            if reader in readers:
                return filler, readers.index(reader)
        raise AssertionError(f"member {reader} does not read channel {route.channel}")

    def _bell_path(self, member: int) -> str:
        return self.wiring.bell.path if member == DRIVER else self.wiring.hellos[member - 1].bell

    # First: rings of the driver's host

    def make_rings(self) -> None:
        wanted = {
            (route.channel, filler): ([self.names[reader] for reader in readers], self._slots_of[route.channel], filler)
            for route in self.routes.all
            for filler, readers in self._fillers(route)
            if self._maker(filler) == DRIVER
        }
        for at, made in zip(wanted, ring.make_all(list(wanted.values())), strict=True):
            self._specs[at], self._segments[at] = made

    # Second, if the graph spans hosts: everybody's ends of the hops

    def postings(self) -> dict[int, Posting]:
        """For each member with a hop, the driver included, what it shall have ready. Empty within one host."""
        members = sorted({member for hop in self.routes.hops for member in hop[:2]})
        return {member: self._posting(member) for member in members}

    def _posting(self, member: int) -> Posting:
        rings, relayed = [], []
        for route in self.routes.all:
            for filler, readers in self._fillers(route):
                if filler == member and self._maker(filler) == member != DRIVER:
                    names = tuple(self.names[reader] for reader in readers)
                    rings.append(RingOrder(route.channel, names, self._slots_of[route.channel]))
            for relay in route.relays:
                if relay.member == member:
                    onward = Outbound(
                        self._specs.get((route.channel, member)),
                        tuple(self._bell_path(reader) for reader in relay.readers),
                        route.onward(member),
                    )
                    source = relay.source, relay.level
                    relayed.append(Relayed(route.channel, source, onward, self._slots_of[route.channel]))
        peers = tuple(sorted((source, level) for source, to, level in self.routes.hops if to == member))
        return Posting(self._directions(member), peers, tuple(rings), tuple(relayed))

    def _directions(self, member: int) -> Directions:
        return Directions(
            key=bytes.fromhex(self.graph),
            member=member,
            names=self.names,
            alarm=self.routes.alarm,
            timeout_s=self.timeout_s,
            max_lent_bytes=self.max_lent_bytes,
        )

    def post(self, posting: Posting) -> None:
        """The driver's own."""
        station = self.wiring.station = Station(posting.directions)
        for (channel, filler), segment in self._segments.items():
            if filler == DRIVER:
                station.rings[channel] = self._specs[channel, filler], segment
        station.post(posting)
        self._sources[DRIVER] = endpoints.endpoint().source()

    def posted(self, answers: Mapping[int, Posted]) -> None:
        for member, answer in answers.items():
            self._sources[member] = answer.source
            self._specs |= {(channel, member): spec for channel, spec in answer.rings.items()}

    def _hops_from(self, member: int) -> tuple[HopTo, ...]:
        return tuple(
            HopTo(to, level, self._sources[to]) for source, to, level in sorted(self.routes.hops) if source == member
        )

    # Third: the driver's ends, and the programs of the others

    def open_own(self, deadline: Deadline) -> None:
        wiring = self.wiring
        if wiring.station is not None:
            wiring.station.connect(self._hops_from(DRIVER), deadline)
        for edge in self.plan.edges_to(DRIVER):
            wiring.readers[edge.index] = self._reader(self.routes.edges[edge.index])
        for edge in self.plan.edges_from(DRIVER):
            wiring.inputs.append((self._writer(self.routes.edges[edge.index]), edge.value))
        for lines in self.routes.lines:
            wiring.add_line(self._writer(lines.control), self._reader(lines.report))

    def _reader(self, route: Route) -> RingReader:
        filler, index = self._ring_of(route, DRIVER)
        at = route.channel, filler
        return RingReader(self._segments[at], self._specs[at], index, self.wiring.leases)

    def _writer(self, route: Route) -> Writer:
        own = None
        if route.local:
            at = route.channel, DRIVER
            bells = [self._bell(reader) for reader in route.local]
            assert self.wiring.pool is not None
            own = RingWriter(self._segments[at], self._specs[at], bells, self.wiring.pool)
        onward = route.onward(DRIVER)
        if onward:
            assert self.wiring.station is not None
            return self.wiring.station.writer(own, route.channel, onward, self._slots_of[route.channel])
        assert own is not None
        return own

    def _bell(self, member: int) -> Segment:
        if member not in self._bells:
            self._bells[member] = open_shared(self._bell_path(member), self.names[member])
        return self._bells[member]

    def programs(self) -> list[bytes]:
        """For members 1, 2, ..."""
        spanning = {member for hop in self.routes.hops for member in hop[:2]}
        return [self._packed(member, member in spanning) for member in range(1, len(self.plan.members))]

    def _packed(self, member: int, spans: bool) -> bytes:
        try:
            return _ray.dumps(self._program(member, spans))
        except Exception as error:
            raise GraphPlanError(
                f"a constant in the calls of {self.plan.members[member]} cannot be pickled: {m.shown(error)}"
            ) from error

    def _program(self, member: int, spans: bool) -> Program:
        lines = self.routes.lines[member - 1]
        edges = self.routes.edges
        return Program(
            graph=self.graph,
            member=member,
            plan=only(self.plan, member),
            owner=here() if self.hosts[member] == self.hosts[DRIVER] else None,
            owner_who=_ray.describe_self(),
            inbound={edge.index: self._inbound(edges[edge.index], member) for edge in self.plan.edges_to(member)},
            outbound={edge.index: self._outbound(edges[edge.index], member) for edge in self.plan.edges_from(member)},
            control=self._inbound(lines.control, member),
            report=self._outbound(lines.report, member),
            report_channel=lines.report.channel,
            max_inflight=self.slots,
            timeout_s=self.timeout_s,
            max_lent_bytes=self.max_lent_bytes,
            exclusive=self.exclusive,
            wake=(os.getpid(), self.wiring.wake_fd) if self.hosts[member] == self.hosts[DRIVER] else None,
            directions=self._directions(member) if spans else None,
            hops=self._hops_from(member) if spans else (),
        )

    def _inbound(self, route: Route, member: int) -> tuple[RingSpec, int]:
        filler, index = self._ring_of(route, member)
        return self._specs[route.channel, filler], index

    def _outbound(self, route: Route, member: int) -> Outbound:
        bells = tuple(self._bell_path(reader) for reader in route.local)
        return Outbound(self._specs.get((route.channel, member)), bells, route.onward(member))

    def close_descriptors(self) -> None:
        """All who need the driver's rings have opened them by now, or never will."""
        for segment in (*self._segments.values(), self.wiring.bell):
            segment.close_fd()

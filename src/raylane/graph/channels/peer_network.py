"""All connections of one process for one graph that spans hosts: links that it opens, and receivers of peers.

The driver has a `PeerNetwork`, and so has every actor that sends to another host or receives from one; a graph within
one host has none. It is set up in two steps, because every process must be ready before the first link is opened:

    driver                                      every actor with a link
    GraphLayout                              --->    `prepare`: create rings, register the graph with the listener
    addresses and rings of all          <---
    GraphLayout with these                   --->    `connect`: open links
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from raylane.core.deadline import Deadline
from raylane.core.memory.segment import Segment
from raylane.errors import GraphClosedError, GraphPlanError, GraphTimeoutError, TransportError
from raylane.graph.channels import ring
from raylane.graph.channels.ends import ChannelEnds
from raylane.graph.channels.layout import GraphLayout
from raylane.graph.channels.lease import LeasePool
from raylane.graph.channels.peer_link import PeerLink, PeerRefused
from raylane.graph.channels.receiver import JOIN_S, MAX_REPORT_BYTES, InboundChannel, Receiver
from raylane.graph.channels.ring import RingSpec, RingWriter
from raylane.graph.lifecycle import Event, Lifecycle
from raylane.graph.plan.ir import DRIVER
from raylane.graph.plan.routing import CONTROL_LEVEL
from raylane.graph.values import message as messages
from raylane.graph.values.message import Message
from raylane.transport.link import endpoint as endpoints


@dataclass(frozen=True)
class NetworkEvents:
    """Callbacks of the driver for events of its network. Called on any thread."""

    on_gone: Callable[[int], None]
    """Called with a member whose process has ended."""
    on_alarm: Callable[[str], None]
    """Called with the reason why the graph cannot continue."""
    on_failure: Callable[[int, Any], None]
    """Called with the number of a failed execution and its pickled error."""


class PeerNetwork:
    """Links and receivers of this process for one graph. Thread-safe after `connect`."""

    def __init__(
        self, layout: GraphLayout, lifecycle: Lifecycle | None = None, events: NetworkEvents | None = None
    ) -> None:
        """Create without connections. The driver passes its `events`."""
        self.layout = layout
        self.lifecycle = lifecycle or Lifecycle()
        """State of the graph in this process. ORPHANED in an actor: the driver has ended or has dropped the graph."""
        self._compiled_by = Deadline(layout.options.timeout_s)
        self._events = events
        self._lock = threading.RLock()  # guards _receivers; reentrant: a finalizer may `close`
        self._receivers: dict[tuple[int, int], Receiver] = {}
        self.links: dict[tuple[int, int], PeerLink] = {}
        """Open links by (member, level)."""
        self._made: list[Segment] = []
        """Segments of the rings that this process has created; other processes open them."""
        self._inbound: dict[int, InboundChannel] = {}
        self._pools: dict[tuple[int, int], LeasePool] = {}
        """Pool for the messages of each announced peer and level."""

    # Setting up

    def prepare(self, segments: Iterable[Segment] = ()) -> dict[tuple[int, int], RingSpec]:
        """Create the rings that this process writes, and accept connections of the graph. Return the new rings.

        `segments` are those of this process with rings that the layout names already.
        """
        layout, member = self.layout, self.layout.member
        # One pool for each peer and level: a receiver that waits for memory must not hold up another one. Only these
        # peers may connect: the listener refuses any other member and level.
        self._pools = {
            (source, level): LeasePool(
                layout.options.max_lent_bytes, layout.options.timeout_s, lifecycle=self.lifecycle
            )
            for source, to, level in layout.links
            if to == member
        }
        missing_rings = [
            at for at in ((c, member) for c in layout.routes if layout.readers_here(c)) if at not in layout.rings
        ]
        rings = ring.make_rings(
            [layout.new_ring(channel, member, layout.readers_here(channel)) for channel, _ in missing_rings]
        )
        new = {at: spec for at, (spec, _) in zip(missing_rings, rings, strict=True)}
        self._made = [segment for _, segment in rings]
        self.layout = dataclasses.replace(layout, rings={**layout.rings, **new})
        ends = ChannelEnds(self.layout, [*segments, *self._made])
        for channel, route in layout.routes.items():
            for relay in route.relays:
                if relay.member == member:
                    pool = self._pools[relay.source, relay.level]
                    self._inbound[channel] = InboundChannel(ends.ring_writer(channel, pool))
        endpoints.endpoint().streams[layout.key] = self._accept  # last: from now on peers may connect
        return new

    def connect(self, layout: GraphLayout, deadline: Deadline) -> None:
        """Open every link of this process, to the addresses in `layout`. Waits until all are open.

        GraphClosedError if a peer has gone, GraphTimeoutError after the deadline, GraphPlanError if a peer cannot be
        reached; each names both ends.
        """
        self.layout = layout
        endpoint = endpoints.endpoint()
        for source, to, level in layout.links:
            if source != layout.member:
                continue
            own_name, name, address = layout.names[source], layout.names[to], endpoint.address_of(layout.sources[to])
            link = self.links[to, level] = PeerLink(layout, to, level, address, endpoint.secret(), self._on_break)
            try:
                link.open(deadline)
            except (PeerRefused, TransportError) as error:
                # A peer that fails to join closes its connections. That is a consequence: its own error is the cause,
                # and the driver prefers any other error to GraphClosedError.
                if isinstance(error, PeerRefused) or isinstance(error.__cause__, ConnectionError):
                    raise GraphClosedError(
                        f"{own_name} cannot connect to {name}, which ended or left the graph while it "
                        f"was compiled: {error}. If it did not, check that TCP connections between all ports of Ray's "
                        "worker processes are allowed"
                    ) from error
                kind = GraphTimeoutError if isinstance(error, TimeoutError) else GraphPlanError
                raise kind(
                    f"{own_name} cannot connect to {name} at {address}: {error}. The hosts of a "
                    "graph need TCP connections between all ports of Ray's worker processes"
                ) from error
            if self.lifecycle.disconnecting:  # a finalizer has closed this network within this very call
                link.close()
        ends = ChannelEnds(layout, links=self.links)
        for channel, inbound in self._inbound.items():
            inbound.onward = ends.fan_out(channel, None)

    # Events

    def _accept(self, sock: socket.socket, member: int, level: int) -> None:
        """Hand a new connection to its receiver. Called on the listener's thread."""
        with self._lock:
            # Only announced peers may connect, and only once: each receiver costs a thread.
            announced = (member, level) in self._pools and (member, level) not in self._receivers
            if not announced or self.lifecycle.disconnecting:
                sock.close()
                return
            self._receivers[member, level] = Receiver(
                sock,
                f"link of level {level} from {self.layout.names[member]}",
                self._inbound,
                self.layout.alarm_channel,
                self.raise_alarm,
                self._on_failure,
                functools.partial(self._on_inbound_end, member),
                self.layout.options.timeout_s,
            )

    def _on_break(self, link: PeerLink, why: str, *, inbound: bool = False) -> None:
        """Handle that the connection of a link has broken, or with `inbound` one from its peer. May wait."""
        # When the graph ends, its processes leave one after the other.
        if self.lifecycle.disconnecting:
            return
        member, own_member = link.member, self.layout.member
        if member == DRIVER:  # it has ended, has dropped the graph, or notices the break too
            self.lifecycle.advance(Event.OWNER_GONE)
        elif not link.peer_ended():
            names = [self.layout.names[end] for end in ((member, own_member) if inbound else (own_member, member))]
            self.raise_alarm(f"the connection from {names[0]} to {names[1]} broke: {why}")
        elif self._events is not None:  # in an actor only the driver's end matters
            self._events.on_gone(member)

    def _on_inbound_end(self, member: int, why: str) -> None:
        """Handle that a connection from a peer has broken. The driver reports it; else the sender does.

        An actor that has lost the driver leaves the graph, but only after its present method.
        """
        link = self.links.get((member, CONTROL_LEVEL))
        if self._events is not None and link is not None:
            self._on_break(link, why, inbound=True)

    def raise_alarm(self, text: str) -> None:
        """Report to the driver that the graph cannot continue."""
        if self.lifecycle.disconnecting:
            return
        if self._events is not None:
            self._events.on_alarm(text)
        else:
            self.report(Message(messages.VALUE, text.encode()[:MAX_REPORT_BYTES]))

    def report(self, message: Message) -> None:
        """Send an alarm or a failure to the driver. Reports above MAX_REPORT_BYTES are lost."""
        link = self.links.get((DRIVER, CONTROL_LEVEL))  # none once this network is closed
        if link is not None and len(message.body) <= MAX_REPORT_BYTES:
            link.send(self.layout.alarm_channel, 0, message, 0)

    def _on_failure(self, data: bytes) -> None:
        """Handle the report of a member of another host that an execution has failed. Only the driver gets these."""
        if self._events is not None:
            self._events.on_failure(*pickle.loads(data))

    # State

    def stale(self) -> bool:
        """Return True if the compilation that created this network must have ended: its driver died during it."""
        return self._compiled_by.left_s() == 0

    def ring_writer(self, channel: int) -> RingWriter:
        """Return the writer of this host's ring of a channel that arrives over a link."""
        return self._inbound[channel].ring

    def leased_bytes(self) -> int:
        """Return the bytes that readers on this host hold of messages from other hosts."""
        return sum(pool.leased_bytes() for pool in self._pools.values())

    # The end

    def close(self, join_s: float = JOIN_S) -> None:
        """Close every connection, in and out; bytes that were sent still arrive. A second call does nothing more.

        Waits at most `join_s` seconds for receivers.
        """
        self.lifecycle.advance(Event.CLOSE)  # first: from now on no thread waits for memory, and breaks are expected
        endpoint = endpoints.existing()
        if endpoint is not None:
            endpoint.streams.pop(self.layout.key, None)
        for link in self.links.values():
            link.close()
        with self._lock:
            receivers = list(self._receivers.values())
            self._receivers.clear()
        for receiver in receivers:
            receiver.close()
        # A finalizer passes 0: it must not wait for a thread, which may need a lock that this thread holds.
        if join_s:
            deadline = Deadline(join_s)
            for receiver in receivers:
                receiver.join(deadline.left_s() or 0.0)
        for segment in self._made:
            segment.close_fd()
        # Links and receivers refer to this object: cut these cycles, so that memory is freed without a collection.
        self._events = None
        for part in (self.links, self._made, self._inbound, self._pools):
            part.clear()

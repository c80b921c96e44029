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
import logging
import pickle
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from raylane.core.deadline import Deadline
from raylane.core.semaphore import Segment
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

log = logging.getLogger("raylane.graph")

KEPT_REPORTS = 8
"""Number of reports to the driver that are sent again after a reconnection."""


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

    def __init__(self, layout: GraphLayout, lifecycle: Lifecycle | None = None) -> None:
        self.layout = layout
        self.lifecycle = lifecycle or Lifecycle()
        """State of the graph in this process. ORPHANED in an actor: the driver has ended or has dropped the graph."""
        self._compiled_by = Deadline(layout.timeout_s)
        self._events: NetworkEvents | None = None
        self._lock = threading.RLock()  # guards _events and the two below; reentrant: a finalizer may `close`
        self._early: list[Callable[[NetworkEvents], None]] = []
        """Calls of the events before `listen` was called."""
        self._receivers: dict[tuple[int, int], Receiver] = {}
        self._reporting = threading.Lock()  # guards _reports_sent
        self._reports_sent = 0
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
            (source, level): LeasePool(layout.max_lent_bytes, layout.timeout_s, lifecycle=self.lifecycle)
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
            link = self.links[to, level] = PeerLink(layout, to, level, address, endpoint.secret(), self)
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
        ends = ChannelEnds(layout, links=self.links)
        for channel, inbound in self._inbound.items():
            inbound.onward = ends.fan_out(channel, None)

    # Events

    def _accept(self, sock: socket.socket, member: int, level: int) -> None:
        """Hand a new connection to its receiver. Called on the listener's thread."""
        with self._lock:
            receiver = self._receivers.get((member, level))
            announced = (member, level) in self._pools  # only these may connect: each receiver costs a thread
            if receiver is None and announced and not self.lifecycle.disconnecting:
                name = f"link of level {level} from {self.layout.names[member]}"
                receiver = Receiver(name, self._inbound, self.layout.alarm_channel, self.raise_alarm, self._on_failure)
                self._receivers[member, level] = receiver
        if receiver is None:
            sock.close()
        else:
            receiver.serve(sock)

    def listen(self, events: NetworkEvents) -> None:
        """Call these callbacks from now on, and at once for events that have happened before. For the driver."""
        with self._lock:
            self._events = events
            early, self._early = self._early, []
        for call in early:
            call(events)

    def _notify(self, call: Callable[[NetworkEvents], None]) -> bool:
        """Pass an event to the driver's callbacks, or keep it for `listen`. Return True if it was passed."""
        # Under the lock: an event is either in the list when `listen` reads it, or sees the callbacks.
        with self._lock:
            events = self._events
            if events is None:
                self._early.append(call)
                return False
        call(events)
        return True

    def peer_gone(self, member: int) -> None:
        """Handle the end of a peer (an event of `PeerLink`).

        In an actor only the driver's end matters: the driver itself notices that other members end.
        """
        if self.lifecycle.disconnecting:
            return
        if not self._notify(lambda events: events.on_gone(member)) and member == DRIVER:
            self.lifecycle.advance(Event.OWNER_GONE)

    def peer_unreachable(self, member: int, why: str) -> None:
        """Handle that a peer could not be reached again (an event of `PeerLink`)."""
        names, own_member = self.layout.names, self.layout.member
        text = (
            f"the connection from {names[own_member]} to {names[member]} broke and could not be opened again within "
            f"{self.layout.timeout_s} s: {why}"
        )
        if member == DRIVER:
            log.warning("%s: leaving the graph", text)
            self.lifecycle.advance(Event.OWNER_GONE)
            return
        self.raise_alarm(text)

    def raise_alarm(self, text: str) -> None:
        """Report to the driver that the graph cannot continue."""
        if self.lifecycle.disconnecting:
            return
        if self.layout.member != DRIVER:
            if not self.report(Message(messages.VALUE, text.encode()[:MAX_REPORT_BYTES])):
                log.error("%s", text)
            return
        self._notify(lambda events: events.on_alarm(text))

    def report(self, message: Message) -> bool:
        """Send an alarm or a failure to the driver. Return False if there is no link to the driver.

        Reports may be lost: those above MAX_REPORT_BYTES, and the oldest ones when a connection breaks.
        """
        link = self.links.get((DRIVER, CONTROL_LEVEL))
        if link is None:
            return False
        if len(message.body) <= MAX_REPORT_BYTES:
            # Several threads report (receivers, the graph loop); numbers must follow the order of sending.
            with self._reporting:
                link.send(self.layout.alarm_channel, self._reports_sent, message, 0, KEPT_REPORTS)
                self._reports_sent += 1
        return True

    def _on_failure(self, data: bytes) -> None:
        """Handle the report of a member of another host that an execution has failed. Only the driver gets these."""
        execution, error = pickle.loads(data)
        self._notify(lambda events: events.on_failure(execution, error))

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

    @property
    def receivers(self) -> tuple[Receiver, ...]:
        """Receivers of the peers that have connected so far."""
        return tuple(self._receivers.values())

    # The end

    def close(self, join_s: float = JOIN_S) -> None:
        """Close every connection, in and out; bytes that were sent still arrive. A second call does nothing more.

        Waits at most `join_s` seconds for receivers.
        """
        self.lifecycle.advance(Event.CLOSE)  # first: from now on no thread waits for memory or reconnects
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

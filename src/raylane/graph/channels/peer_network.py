"""All connections of one process for one graph that spans hosts: links that it opens, and receivers of peers.

The driver has a `PeerNetwork`, and so has every actor that sends to another host or receives from one; a graph within
one host has none. It is set up in two steps, because every process must be ready before the first link is opened:

    driver                                      every actor with a link
    PeerSetup                           --->    `prepare`: create rings, register the graph with the listener
    PeerEndpoint of all                 <---
    LinkSpecs (within the Program)      --->    `connect`: open links
"""

from __future__ import annotations

import logging
import pickle
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from raylane.core.deadline import Deadline
from raylane.core.semaphore import Segment
from raylane.errors import GraphClosedError, GraphPlanError, GraphTimeoutError, TransportError
from raylane.graph.channels import ring
from raylane.graph.channels.lease import LeasePool
from raylane.graph.channels.peer_link import FanOutWriter, LinkTarget, PeerLink, PeerRefused
from raylane.graph.channels.receiver import JOIN_S, MAX_REPORT_BYTES, InboundChannel, Receiver
from raylane.graph.channels.ring import RingSpec, RingWriter
from raylane.graph.channels.specs import LinkSpec, NetworkSpec, OutboundSpec, PeerSetup
from raylane.graph.lifecycle import Event, Lifecycle
from raylane.graph.plan.ir import DRIVER
from raylane.graph.plan.routing import CONTROL_LEVEL
from raylane.graph.values import message as messages
from raylane.graph.values.message import Message
from raylane.transport import endpoint as endpoints

log = logging.getLogger("raylane.graph")

KEPT_REPORTS = 8
"""Number of reports to the driver that are sent again after a reconnection."""


def open_shared(path: str, owner: str) -> Segment:
    """Map shared memory of another process, called `owner` in messages.

    GraphPlanError if that is impossible: then the two processes are not on one host after all.
    """
    try:
        return Segment.open(path)
    except OSError as error:
        raise GraphPlanError(
            f"cannot open shared memory of {owner} ({path}): {error}. raylane assumes that processes of one kernel, "
            "pid namespace and user share /proc; where they do not, give them different values of the environment "
            "variable RAYLANE_HOST, and they will use the network"
        ) from error


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

    def __init__(self, spec: NetworkSpec, lifecycle: Lifecycle | None = None) -> None:
        self.spec = spec
        self.lifecycle = lifecycle or Lifecycle()
        """State of the graph in this process. ORPHANED in an actor: the driver has ended or has dropped the graph."""
        self._compiled_by = Deadline(spec.timeout_s)
        self._events: NetworkEvents | None = None
        self._lock = threading.RLock()  # guards _events and the three below; reentrant: a finalizer may `close`
        self._early_gone: list[int] = []
        """Members that have gone before `listen` was called."""
        self._early_alarms: list[str] = []
        """Alarms that were raised before `listen` was called."""
        self._receivers: dict[tuple[int, int], Receiver] = {}
        self._reporting = threading.Lock()  # guards _reports_sent
        self._reports_sent = 0
        self.links: dict[tuple[int, int], PeerLink] = {}
        """Open links by (member, level)."""
        self.rings: dict[int, tuple[RingSpec, Segment]] = {}
        """Rings that this process has created, by channel."""
        self._inbound: dict[int, InboundChannel] = {}
        self._pools: dict[tuple[int, int], LeasePool] = {}
        """Pool for the messages of each announced peer and level."""
        self._relays: list[tuple[InboundChannel, int, tuple[tuple[int, int], ...], int]] = []
        """Relayed channels whose onward links are not open yet."""

    # Setting up

    def prepare(self, setup: PeerSetup) -> dict[int, RingSpec]:
        """Create this process's rings and accept connections of the graph. Return the rings by channel."""
        spec = self.spec
        # One pool for each peer and level: a receiver that waits for memory must not hold up another one.
        self._pools = {
            peer: LeasePool(spec.max_lent_bytes, spec.timeout_s, lifecycle=self.lifecycle) for peer in setup.peers
        }
        made = ring.make_rings([wanted for _, wanted in setup.rings])
        self.rings |= {channel: found for (channel, _), found in zip(setup.rings, made, strict=True)}
        for relay in setup.relays:
            ring_spec, segment = self._ring(relay.onward, relay.channel)
            doorbells = [
                open_shared(path, name) for path, name in zip(relay.onward.doorbells, ring_spec.readers, strict=True)
            ]
            channel = InboundChannel(RingWriter(segment, ring_spec, doorbells, self._pools[relay.source]))
            self._inbound[relay.channel] = channel
            # Links are not open yet: the relay gets its onward writer in `connect`.
            if relay.onward.links:
                self._relays.append((channel, relay.channel, relay.onward.links, relay.slots))
        endpoints.endpoint().streams[spec.key] = self._accept  # last: from now on peers may connect
        return {channel: ring_spec for channel, (ring_spec, _) in self.rings.items()}

    def _ring(self, outbound: OutboundSpec, channel: int) -> tuple[RingSpec, Segment]:
        if channel in self.rings:
            return self.rings[channel]
        assert outbound.ring is not None
        return outbound.ring, open_shared(outbound.ring.path, outbound.ring.readers[0])

    def connect(self, links: Sequence[LinkSpec], deadline: Deadline) -> None:
        """Open every link of this process. Waits until all are open.

        GraphClosedError if a peer has gone, GraphTimeoutError after the deadline, GraphPlanError if a peer cannot be
        reached; each names both ends.
        """
        endpoint = endpoints.endpoint()
        spec = self.spec
        for to in links:
            target = LinkTarget(
                member=to.member,
                level=to.level,
                name=spec.names[to.member],
                address=endpoint.address_of(to.source),
                key=spec.key,
                secret=endpoint.secret(),
                own_member=spec.member,
                own_name=spec.names[spec.member],
            )
            link = self.links[to.member, to.level] = PeerLink(target, spec.timeout_s, self)
            try:
                link.open(deadline)
            except (PeerRefused, TransportError) as error:
                # A peer that fails to join closes its connections. That is a consequence: its own error is the cause,
                # and the driver prefers any other error to GraphClosedError.
                if isinstance(error, PeerRefused) or isinstance(error.__cause__, ConnectionError):
                    raise GraphClosedError(
                        f"{target.own_name} cannot connect to {target.name}, which ended or left the graph while it "
                        f"was compiled: {error}. If it did not, check that TCP connections between all ports of Ray's "
                        "worker processes are allowed"
                    ) from error
                kind = GraphTimeoutError if isinstance(error, TimeoutError) else GraphPlanError
                raise kind(
                    f"{target.own_name} cannot connect to {target.name} at {target.address}: {error}. The hosts of a "
                    "graph need TCP connections between all ports of Ray's worker processes"
                ) from error
        for inbound, channel, onward, slots in self._relays:
            inbound.onward = self.writer(None, channel, onward, slots)

    def writer(self, own: RingWriter | None, channel: int, links: Iterable[tuple[int, int]], keep: int) -> FanOutWriter:
        """Return the writer of a channel that has readers on other hosts, over open links."""
        return FanOutWriter(own, [self.links[to] for to in links], channel, keep)

    # Events

    def _accept(self, sock: socket.socket, member: int, level: int) -> None:
        """Hand a new connection to its receiver. Called on the listener's thread."""
        with self._lock:
            receiver = self._receivers.get((member, level))
            announced = (member, level) in self._pools  # only these may connect: each receiver costs a thread
            if receiver is None and announced and not self.lifecycle.disconnecting:
                name = f"link of level {level} from {self.spec.names[member]}"
                receiver = Receiver(name, self._inbound, self.spec.alarm_channel, self.raise_alarm, self._on_failure)
                self._receivers[member, level] = receiver
        if receiver is None:
            sock.close()
        else:
            receiver.serve(sock)

    def listen(self, events: NetworkEvents) -> None:
        """Call these callbacks from now on, and at once for events that have happened before. For the driver."""
        with self._lock:
            self._events = events
            gone, alarms = self._early_gone, self._early_alarms
        for member in gone:
            events.on_gone(member)
        for text in alarms:
            events.on_alarm(text)

    def peer_gone(self, member: int) -> None:
        """Handle the end of a peer (an event of `PeerLink`).

        In an actor only the driver's end matters: the driver itself notices that other members end.
        """
        if self.lifecycle.disconnecting:
            return
        # Under the lock: an event is either in the list when `listen` reads it, or sees the callbacks.
        with self._lock:
            self._early_gone.append(member)
            events = self._events
        if events is not None:
            events.on_gone(member)
        elif member == DRIVER:
            self.lifecycle.advance(Event.OWNER_GONE)

    def peer_unreachable(self, member: int, why: str) -> None:
        """Handle that a peer could not be reached again (an event of `PeerLink`)."""
        names, own = self.spec.names, self.spec.member
        text = (
            f"the connection from {names[own]} to {names[member]} broke and could not be opened again within "
            f"{self.spec.timeout_s} s: {why}"
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
        if self.spec.member != DRIVER:
            if not self.report(Message(messages.VALUE, text.encode()[:MAX_REPORT_BYTES])):
                log.error("%s", text)
            return
        with self._lock:
            self._early_alarms.append(text)
            events = self._events
        if events is not None:
            events.on_alarm(text)

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
                link.send(self.spec.alarm_channel, self._reports_sent, message, 0, KEPT_REPORTS)
                self._reports_sent += 1
        return True

    def _on_failure(self, data: bytes) -> None:
        """Handle the report of a member of another host that an execution has failed. Only the driver gets these."""
        events = self._events
        if events is not None:
            events.on_failure(*pickle.loads(data))

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
            endpoint.streams.pop(self.spec.key, None)
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
        for _, segment in self.rings.values():
            segment.close_fd()
        # Links and receivers refer to this object: cut these cycles, so that memory is freed without a collection.
        self._events = None
        for part in (self.links, self.rings, self._inbound, self._pools, self._relays):
            part.clear()

"""One process's part in what crosses hosts, for one graph: hops that leave, connections that arrive, and their end.

The driver has one, and so has every actor with a hop; a graph within one host has none. Made in two steps, because
every end must be there before the first connection is made: `post` registers with the listener and makes this process's
rings for others to open; `connect` opens the hops.
"""

from __future__ import annotations

import logging
import pickle
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from raylane.core.deadline import Deadline
from raylane.core.semaphore import Segment
from raylane.errors import GraphClosedError, GraphPlanError, GraphTimeoutError, TransportError
from raylane.graph.channels import ring
from raylane.graph.channels.lease import LeasePool
from raylane.graph.channels.peer_link import FanWriter, Hop, Refused, Target
from raylane.graph.channels.receiver import JOIN_S, MAX_TOLD_BYTES, Arrival, Inbound
from raylane.graph.channels.ring import RingSpec, RingWriter
from raylane.graph.plan.ir import DRIVER
from raylane.graph.plan.routing import LINES
from raylane.graph.values import message as m
from raylane.graph.values.message import Message
from raylane.graph.worker.program import Directions, HopTo, Outbound, Posting
from raylane.transport import endpoint as endpoints

log = logging.getLogger("raylane.graph")


def open_shared(path: str, whose: str) -> Segment:
    """Map memory of another process. GraphPlanError if that cannot be: then they are not on one host after all."""
    try:
        return Segment.open(path)
    except OSError as error:
        raise GraphPlanError(
            f"cannot open shared memory of {whose} ({path}): {error}. Processes of one kernel, pid namespace and user "
            "are taken to share /proc; where they do not, give them different values of the environment variable "
            "RAYLANE_HOST, and they will talk over the network"
        ) from error


class Station:
    """See above. `directions` say who is who; `fail` is called (from any thread) with what ends the graph."""

    def __init__(self, directions: Directions) -> None:
        self.directions = directions
        self.closing = threading.Event()
        self._compiled_by = Deadline(directions.timeout_s)
        self.owner_gone = False
        """In an actor: the driver's process has ended, or it has given the graph up."""
        self.on_gone: Callable[[int], None] | None = None
        self.on_alarm: Callable[[str], None] | None = None
        self.on_failure: Callable[[int, Any], None] | None = None
        self._lock = threading.RLock()  # guards on_gone, on_alarm and the three below; a finalizer may `close`
        self._gone: list[int] = []
        """Who is gone, until `listen` is called; what was alarming, likewise."""
        self._alarms: list[str] = []
        self._inbounds: dict[tuple[int, int], Inbound] = {}
        self._alarming = threading.Lock()  # guards _alarms_sent
        self._alarms_sent = 0
        self.hops: dict[tuple[int, int], Hop] = {}
        """By member and level."""
        self.rings: dict[int, tuple[RingSpec, Segment]] = {}
        """By channel those that this process has made."""
        self._arrivals: dict[int, Arrival] = {}
        self._pools: dict[tuple[int, int], LeasePool] = {}
        self._onward: list[tuple[Arrival, int, tuple[tuple[int, int], ...], int]] = []

    # Setting up

    def post(self, posting: Posting) -> dict[int, RingSpec]:
        """Make this process's rings and expect connections. Returns the rings by channel."""
        self._pools = {peer: self._pool() for peer in posting.peers}
        made = ring.make_all([(order.readers, order.slots, self.directions.member) for order in posting.rings])
        self.rings |= {order.channel: found for order, found in zip(posting.rings, made, strict=True)}
        for relayed in posting.relayed:
            spec, segment = self._ring(relayed.onward, relayed.channel)
            bells = [open_shared(path, name) for path, name in zip(relayed.onward.bells, spec.readers, strict=True)]
            arrival = Arrival(RingWriter(segment, spec, bells, self._pools[relayed.source]))
            self._arrivals[relayed.channel] = arrival
            if relayed.onward.hops:
                self._onward.append((arrival, relayed.channel, relayed.onward.hops, relayed.slots))
        endpoint = endpoints.endpoint()
        endpoint.streams[self.directions.key] = self._take
        return {channel: spec for channel, (spec, _) in self.rings.items()}

    def _ring(self, writing: Outbound, channel: int) -> tuple[RingSpec, Segment]:
        if channel in self.rings:
            return self.rings[channel]
        assert writing.ring is not None
        return writing.ring, open_shared(writing.ring.path, writing.ring.readers[0])

    def _pool(self) -> LeasePool:
        return LeasePool(self.directions.max_lent_bytes, self.directions.timeout_s)

    def connect(self, hops: Sequence[HopTo], deadline: Deadline) -> None:
        """Open every hop that leaves here. GraphClosedError, GraphTimeoutError, GraphPlanError; both ends named."""
        endpoint = endpoints.endpoint()
        directions = self.directions
        for to in hops:
            target = Target(
                member=to.member,
                level=to.level,
                who=directions.names[to.member],
                address=endpoint.address_of(to.source),
                key=directions.key,
                secret=endpoint.secret(),
                own_member=directions.member,
                own_who=directions.names[directions.member],
            )
            hop = self.hops[to.member, to.level] = Hop(target, directions.timeout_s, self)
            try:
                hop.open(deadline)
            except Refused as error:
                raise GraphClosedError(
                    f"{target.who} ended, or gave up, while {target.own_who} compiled a graph with it: {error}"
                ) from error
            except TransportError as error:
                kind = GraphTimeoutError if isinstance(error, TimeoutError) else GraphPlanError
                raise kind(
                    f"{target.own_who} cannot connect to {target.who} at {target.address}: {error}. The hosts of a "
                    "graph need TCP connections between all ports of Ray's worker processes"
                ) from error
        for arrival, channel, onward, slots in self._onward:
            arrival.onward = self.writer(None, channel, onward, slots)

    def writer(self, own: RingWriter | None, channel: int, onward: Iterable[tuple[int, int]], keep: int) -> FanWriter:
        """What writes a channel that has readers beyond this host."""
        return FanWriter(own, [self.hops[to] for to in onward], channel, keep)

    # Connections and what they tell

    def _take(self, sock: socket.socket, member: int, level: int) -> None:
        """The listener's thread brings a connection."""
        with self._lock:
            inbound = self._inbounds.get((member, level))
            pool = self._pools.get((member, level))  # of those that were announced: each costs a thread
            if inbound is None and pool is not None and not self.closing.is_set():
                name = f"hop of level {level} from {self.directions.names[member]}"
                inbound = Inbound(name, self._arrivals, pool, self.directions.alarm, self.alarmed, self._failed)
                self._inbounds[member, level] = inbound
        if inbound is None:
            sock.close()
        else:
            inbound.take(sock)

    def listen(
        self, on_gone: Callable[[int], None], on_alarm: Callable[[str], None], on_failure: Callable[[int, Any], None]
    ) -> None:
        """The driver: be told of ends and alarms, those that have been included, and of failed executions."""
        with self._lock:
            self.on_failure = on_failure
            self.on_gone, self.on_alarm = on_gone, on_alarm
            gone, alarms = self._gone, self._alarms
        for member in gone:
            on_gone(member)
        for text in alarms:
            on_alarm(text)

    def gone(self, member: int) -> None:
        """See `hop.Events`. Of an actor's peers only the driver's end matters: it notices the others' itself."""
        if self.closing.is_set():
            return
        with self._lock:
            self._gone.append(member)
            told = self.on_gone
        if told is not None:
            told(member)
        elif member == DRIVER:
            self._leave()

    def lost(self, member: int, why: str) -> None:
        """See `hop.Events`."""
        names, own = self.directions.names, self.directions.member
        text = (
            f"the connection from {names[own]} to {names[member]} broke and could not be opened again within "
            f"{self.directions.timeout_s} s: {why}"
        )
        if member == DRIVER:
            log.warning("%s: leaving the graph", text)
            self._leave()
            return
        self.alarmed(text)

    def alarmed(self, text: str) -> None:
        """Something that ends the graph: the driver must know."""
        if self.closing.is_set():
            return
        if self.directions.member != DRIVER:
            if not self.tell_driver(Message(m.VALUE, text.encode()[:MAX_TOLD_BYTES])):
                log.error("%s", text)
            return
        with self._lock:
            self._alarms.append(text)
            told = self.on_alarm
        if told is not None:
            told(text)

    def tell_driver(self, message: Message) -> bool:
        """Over the channel for alarms and failures, of which some may be lost: the oldest when a connection breaks, and
        those that are too large. False without a connection."""
        hop = self.hops.get((DRIVER, LINES))
        if hop is None:
            return False
        if len(message.body) <= MAX_TOLD_BYTES:
            with self._alarming:
                hop.send(self.directions.alarm, self._alarms_sent, message, 0, 8)
                self._alarms_sent += 1
        return True

    def _failed(self, data: bytes) -> None:
        """A member of another host tells the driver that an execution has failed."""
        told = self.on_failure
        if told is not None:
            told(*pickle.loads(data))

    def _leave(self) -> None:
        """The driver is gone: nothing here shall wait any more, so that the lane can look up and leave."""
        self.owner_gone = True
        self.closing.set()
        for pool in self._pools.values():
            pool.closed = True

    # Looking

    def stale(self) -> bool:
        """Whether a compilation that began with this must have ended: its driver died half way, and told nobody."""
        return self._compiled_by.left_s() == 0

    def ring_writer(self, channel: int) -> RingWriter:
        """Who fills this host's ring of a channel that arrives here."""
        return self._arrivals[channel].ring

    def lent_bytes(self) -> int:
        return sum(pool.lent_bytes() for pool in self._pools.values())

    # The end

    def let_nobody_wait(self) -> None:
        """Connections that break from now on stay so."""
        self.closing.set()

    def close(self, join_s: float = JOIN_S) -> None:
        """Close every connection, in and out. What was sent still arrives. A second call does nothing more."""
        self.closing.set()
        endpoint = endpoints.existing()
        if endpoint is not None:
            endpoint.streams.pop(self.directions.key, None)
        for hop in self.hops.values():
            hop.close()
        with self._lock:
            inbounds = list(self._inbounds.values())
            self._inbounds.clear()
        for inbound in inbounds:
            inbound.close()
        if join_s:
            deadline = Deadline(join_s)
            for inbound in inbounds:
                inbound.join(deadline.left_s() or 0.0)
        for _, segment in self.rings.values():
            segment.close_fd()
        # Hops and connections refer to this station: memory is let go now, not when the garbage collector comes.
        self.on_gone = self.on_alarm = self.on_failure = None
        for part in (self.hops, self.rings, self._arrivals, self._pools, self._onward):
            part.clear()

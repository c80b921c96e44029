"""Channel of NIXL: the source offers its memory over the connection, and the reader takes the bytes by itself.

    reader                                          source
      OfferRequest(epoch, no) ----------------------->
                              <-----------------------  Offer(metadata that the reader lacks, ranges), maybe several
      (NIXL reads the ranges)                           (keeps the value and its registrations, makes progress)
      Taken                   ----------------------->

The source answers Taken, as in any other channel, with the state of the memory (`channels`). If the connection ends
instead, the source releases the value at once.
"""

from __future__ import annotations

import functools
import select
from collections.abc import Callable, Iterator, Sequence

from raylane.core.deadline import Deadline
from raylane.errors import ProtocolError
from raylane.transport.backends.channels import Channel
from raylane.transport.backends.nixl.agent import Agent, NixlError, Peer, Range, merge_ranges
from raylane.transport.backends.nixl.agents import Agents
from raylane.transport.backends.nixl.memory import Registration
from raylane.transport.backends.pieces import HOST, Piece
from raylane.transport.link import wire
from raylane.transport.link.connection import Connection

MAX_OFFERED = 4096
"""Number of ranges, and of registrations, in one Offer: frames are limited (`wire.MAX_FRAME_BYTES`)."""
PROGRESS_MS = 1
"""Time between two calls by which a source makes progress while somebody reads from it."""


class NixlChannel(Channel):
    """One end of a channel, see `channels.Channel`."""

    def __init__(self, agents: Agents, connection: Connection, peer: str) -> None:
        """Use a connection to another process; `peer` is the name of its agent if this is the reader's end."""
        self._agents, self._connection, self._peer = agents, connection, peer

    def send(self, pieces: Sequence[Piece], deadline: Deadline) -> None:
        """Offer the pieces, and wait until the reader has taken them."""
        del deadline  # that of the connection, which every message obeys
        agent, connection = self._agents.offering(), self._connection
        # Asked here and not with the request for the value: the reader holds its lock on this agent from now on.
        want = connection.receive()
        if not isinstance(want, wire.OfferRequest):
            raise ProtocolError(f"expected OfferRequest, got {type(want).__name__}")
        held: list[Registration] = []
        try:
            # All registrations before the first Offer, which tells the reader about the new ones.
            for piece in pieces:
                held.append(agent.offered.hold(piece.memory))
            ranges = [(p.memory.block.start, p.memory.block.nbytes, p.memory.device) for p in pieces]
            for offer in _offers(agent, want, ranges):
                connection.send(offer)
            poll = select.poll()
            poll.register(connection.socket, select.POLLIN | select.POLLRDHUP)
            # Over some networks the source's own calls move the data; NIXL has nothing to wait on for that.
            while not poll.poll(PROGRESS_MS) and connection.deadline.left_s() != 0:
                agent.progress()
            # After the deadline this raises at once, as it does when the reader has closed the connection.
            taken = connection.receive()
            if not isinstance(taken, wire.Taken):
                raise ProtocolError(f"expected Taken, got {type(taken).__name__}")
        finally:
            agent.offered.release(held)

    def expect(self, pieces: Sequence[Piece]) -> Callable[[Deadline], None]:
        """Return a function that reads the pieces; nothing has to be prepared before the source is asked."""
        return functools.partial(self._take, pieces)

    def _take(self, pieces: Sequence[Piece], deadline: Deadline) -> None:
        with self._agents.reading() as agent:
            self._read(agent, pieces, deadline)
        # After the agent and its lock: the next reader of this process need not wait for the source's answer.
        self._connection.send(wire.Taken())

    def _read(self, agent: Agent, pieces: Sequence[Piece], deadline: Deadline) -> None:
        agent.sweep()  # there is no thread that would do it
        peer = agent.peer(self._peer)
        remaining_s = deadline.left_s()
        if not peer.lock.acquire(timeout=-1 if remaining_s is None else remaining_s):
            raise NixlError("the deadline passed")
        held: list[Registration] = []
        begun = False  # True while NIXL may write to the pieces
        try:
            ranges = self._ranges(agent, peer, pieces)
            for piece in pieces:
                held.append(agent.receiving.hold(piece.memory))
            begun = True
            agent.read(peer, ranges, self._connection.socket, deadline)
            begun = False
        finally:
            if begun:
                # NIXL may still write: end the connection to the source, and keep the memory for a while.
                agent.abandon(peer, list(pieces))
            agent.receiving.release(held)
            peer.lock.release()

    def _ranges(self, agent: Agent, peer: Peer, pieces: Sequence[Piece]) -> list[Range]:
        """Ask for the source's memory; return what to read where. The peer's lock is held."""
        connection = self._connection
        connection.send(wire.OfferRequest(peer.epoch, peer.number))
        theirs: list[wire.OfferedRange] = []
        more = True
        while more:
            offer = connection.receive()
            if isinstance(offer, wire.Refusal):
                raise NixlError(offer.reason)
            if not isinstance(offer, wire.Offer):
                raise ProtocolError(f"{connection.peer} answered {type(offer).__name__} instead of Offer")
            agent.learn(peer, offer.epoch, offer.number, offer.metadata)
            theirs += offer.ranges
            more = offer.more
        mine = [piece.memory for piece in pieces if piece.memory.block.nbytes]
        # Compared before the read: the sizes decide how far NIXL writes.
        if [nbytes for _, nbytes, _ in theirs] != [memory.block.nbytes for memory in mine]:
            raise ProtocolError(f"{connection.peer} offered ranges of other sizes than the value has")
        pairs = zip(theirs, mine, strict=True)
        return merge_ranges(
            [Range(address, to.block.start, nbytes, device, to.device) for (address, nbytes, device), to in pairs]
        )


def _offers(agent: Agent, want: wire.OfferRequest, ranges: Sequence[wire.OfferedRange]) -> Iterator[wire.Offer]:
    """Yield the ranges, and the metadata of everything that the reader does not know, in frames of limited size."""
    epoch, unknown = agent.offered.since(want.epoch, want.number)
    # Without new registrations the reader is as far as before; in a new epoch it knows nothing.
    number = max([registration.number for registration in unknown], default=want.number if epoch == want.epoch else 0)
    first = [agent.describe(())] if epoch != want.epoch else []  # how to reach this agent
    # At least one, which ends the answer even if there is nothing new to tell.
    count = max(1, -(-max(len(ranges), len(unknown)) // MAX_OFFERED))
    for i in range(count):
        part = slice(i * MAX_OFFERED, (i + 1) * MAX_OFFERED)
        # NIXL describes memory of one kind at a time.
        kinds = [
            [registration for registration in unknown[part] if (registration.device == HOST) == host]
            for host in (True, False)
        ]
        metadata = [*first, *(agent.describe(some) for some in kinds if some)]
        yield wire.Offer(epoch, number, metadata, list(ranges[part]), i + 1 < count)
        first = []

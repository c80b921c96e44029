"""tcp: the source's listener sends the blocks over TCP, straight from tensor memory into pooled memory. Anything,
anywhere: what `auto` falls back to when nothing closer works."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raylane.core.deadline import Deadline
from raylane.core.place import Place
from raylane.errors import ProtocolError, TensorFreedError
from raylane.transport import wire
from raylane.transport.backends.base import Arrival, Backend, Capability, allocate, freed, moved
from raylane.transport.source import Source
from raylane.transport.ticket import Ticket

if TYPE_CHECKING:
    from raylane.transport.endpoint import Endpoint


class TcpBackend(Backend):
    name = "tcp"
    capability = Capability(summary="sent by the source over TCP", same_process=True, same_host=True, across_hosts=True)

    def refusal(self, source: Source, here: Place) -> str | None:
        return None

    def fetch(self, ticket: Ticket, endpoint: Endpoint, deadline: Deadline) -> Arrival:
        source = ticket.origin()
        with endpoint.links().borrow((source.host, source.port), source, deadline) as link:
            link.send(wire.Read(ticket.key))
            answer = link.receive()
            if isinstance(answer, wire.Data):
                if answer.nbytes != ticket.nbytes:
                    raise ProtocolError(f"{source} sends {answer.nbytes} bytes, the ticket says {ticket.nbytes}")
                blocks = allocate(ticket, endpoint)
                link.receive_into(blocks)
                sent = link.receive()
                if not isinstance(sent, wire.Sent):
                    raise ProtocolError(f"{source} ended a value with {type(sent).__name__}")
                if sent.in_place:
                    return Arrival(blocks=blocks, mutated=sent.mutated, creator_read=sent.creator_read)
                answer = wire.Gone(ticket.key, moved=True)
        raise gone_or_odd(answer, source, ticket)


def gone_or_odd(answer: wire.Message, source: Source, ticket: Ticket) -> TensorFreedError | ProtocolError:
    """Return the error for an answer that does not bring the value."""
    if isinstance(answer, wire.Gone):
        return moved(ticket) if answer.moved else freed(ticket)
    return ProtocolError(f"{source} answered a read with {type(answer).__name__}")

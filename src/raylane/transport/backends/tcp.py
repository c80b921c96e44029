"""tcp: the source's listener sends the blocks over TCP, from tensor memory straight into pooled memory.

Works for every value between any two processes, so `auto` uses it when nothing closer works.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raylane.core.deadline import Deadline
from raylane.core.place import Place
from raylane.errors import ProtocolError, TensorFreedError
from raylane.transport import wire
from raylane.transport.backends.base import Backend, Capability, FetchResult, allocate, freed_error, moved_error
from raylane.transport.source import Source
from raylane.transport.ticket import Ticket

if TYPE_CHECKING:
    from raylane.transport.endpoint import Endpoint


class TcpBackend(Backend):
    """Transfer over a TCP connection to the source's listener."""

    name = "tcp"
    capability = Capability(summary="sent by the source over TCP", same_process=True, same_host=True, across_hosts=True)

    def refusal(self, source: Source, here: Place) -> str | None:
        """Return None: TCP works between any two processes of the cluster."""
        return None

    def fetch(self, ticket: Ticket, endpoint: Endpoint, deadline: Deadline) -> FetchResult:
        """Request the blocks and receive them into pooled memory."""
        source = ticket.origin()
        with endpoint.links().borrow((source.host, source.port), source, deadline) as link:
            link.send(wire.Read(ticket.key))
            answer = link.receive()
            if isinstance(answer, wire.Data):
                # Compare before receiving: the blocks are allocated by the ticket's sizes.
                if answer.nbytes != ticket.nbytes:
                    raise ProtocolError(
                        f"could not read a value of {source}: the source announced {answer.nbytes} bytes, the ticket "
                        f"{ticket.nbytes}"
                    )
                blocks = allocate(ticket, endpoint)
                link.receive_into(blocks)
                trailer = link.receive()
                if not isinstance(trailer, wire.Trailer):
                    raise ProtocolError(
                        f"could not read a value of {source}: the source ended it with {type(trailer).__name__}"
                    )
                # Only the trailer tells whether the received bytes are valid (see `wire.Trailer`).
                if trailer.intact:
                    return FetchResult(blocks=blocks, mutated=trailer.mutated, creator_read=trailer.creator_read)
                answer = wire.Gone(ticket.key, moved=True)
        # Raise outside the `with` block: the link is in a defined state and can be used again.
        raise answer_error(answer, source, ticket)


def answer_error(answer: wire.Message, source: Source, ticket: Ticket) -> TensorFreedError | ProtocolError:
    """Return the error for an answer that does not bring the value."""
    if isinstance(answer, wire.Gone):
        return moved_error(ticket) if answer.moved else freed_error(ticket)
    return ProtocolError(f"could not read a value of {source}: the source answered {type(answer).__name__}")

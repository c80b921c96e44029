"""The answers of a source over a link to the request for a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raylane.errors import ProtocolError, TensorFreedError
from raylane.transport.backends.base import FetchResult
from raylane.transport.link import wire
from raylane.transport.link.connection import Link
from raylane.transport.value.source import Source
from raylane.transport.value.ticket import Ticket, freed_error, moved_error


def read_answer(
    link: Link, ticket: Ticket, nbytes: int, receive: Callable[[], list[Any]]
) -> FetchResult | wire.Message:
    """Return the `nbytes` that a source sends after a request, or its other answer; `receive` returns filled blocks.

    ProtocolError if the source announces another size, or does not end the value with a Trailer.
    """
    answer, source = link.receive(), ticket.origin()
    if not isinstance(answer, wire.Data):
        return answer
    # Compare before receiving: the blocks are allocated by the ticket's sizes.
    if answer.nbytes != nbytes:
        raise ProtocolError(
            f"could not read a value of {source}: the source announced {answer.nbytes} bytes instead of {nbytes}"
        )
    blocks = receive()
    trailer = link.receive()
    if not isinstance(trailer, wire.Trailer):
        raise ProtocolError(f"could not read a value of {source}: the source ended it with {type(trailer).__name__}")
    # Only the trailer tells whether the received bytes are valid (see `wire.Trailer`).
    if not trailer.intact:
        return wire.Gone(ticket.key, moved=True)
    return FetchResult(blocks=blocks, mutated=trailer.mutated, creator_read=trailer.creator_read)


def answer_error(answer: wire.Message, source: Source, ticket: Ticket) -> TensorFreedError | ProtocolError:
    """Return the error for an answer that does not bring the value."""
    if isinstance(answer, wire.Gone):
        return moved_error(ticket) if answer.moved else freed_error(ticket)
    return ProtocolError(f"could not read a value of {source}: the source answered {type(answer).__name__}")

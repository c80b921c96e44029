"""tcp: the source's listener sends the blocks over TCP, from tensor memory straight into pooled memory.

Works for every value between any two processes, so `auto` uses it when nothing closer works.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from raylane.core.deadline import Deadline
from raylane.core.place import Place
from raylane.core.segment import bytes_at
from raylane.errors import ProtocolError, TensorFreedError
from raylane.transport import relay, wire
from raylane.transport.backends.base import (
    Backend,
    Capability,
    FetchResult,
    allocate,
    copy_parts,
    freed_error,
    moved_error,
)
from raylane.transport.link import Link
from raylane.transport.source import Source
from raylane.transport.ticket import Ticket

if TYPE_CHECKING:
    from raylane.transport.endpoint import Endpoint
    from raylane.transport.parts import Part


class TcpBackend(Backend):
    """Transfer over a TCP connection to the source's listener."""

    name = "tcp"
    capability = Capability(
        summary="sent by the source over TCP", same_process=True, same_host=True, across_hosts=True, parts=True
    )

    def refusal(self, source: Source, here: Place) -> str | None:
        """Return None: TCP works between any two processes of the cluster."""
        return None

    def fetch(self, ticket: Ticket, endpoint: Endpoint, deadline: Deadline) -> FetchResult:
        """Request the blocks and receive them into pooled memory, or take them from another reader of this host."""
        if not relay.relays(ticket, endpoint):
            return _fetch(ticket, endpoint, deadline, Link.receive_into)
        found = _meet(ticket, endpoint, deadline)
        if found is None:
            return _fetch(ticket, endpoint, deadline, Link.receive_into)
        if isinstance(found, FetchResult):
            return found
        with found:
            result = _fetch(ticket, endpoint, deadline, found.receive_into)
            found.deliver(result)
            return result

    def fetch_parts(self, ticket: Ticket, parts: Sequence[Part], endpoint: Endpoint, deadline: Deadline) -> FetchResult:
        """Request only these parts and receive them where they belong, or copy them from another reader's copy."""
        if not (relay.relays(ticket, endpoint) and relay.covers(ticket, sum(part.nbytes for part in parts))):
            return _fetch_parts(ticket, parts, endpoint, deadline, Link.receive_into)
        found = _meet(ticket, endpoint, deadline)
        if found is None:
            return _fetch_parts(ticket, parts, endpoint, deadline, Link.receive_into)
        if isinstance(found, relay.Relay):
            with found as first:
                if not first.expects_others:
                    first.refuse()
                    return _fetch_parts(ticket, parts, endpoint, deadline, first.receive_into)
                found = _fetch(ticket, endpoint, deadline, first.receive_into)
                first.deliver(found)  # before the copy below, because others wait for it
        copy_parts(parts, found.blocks, deadline)
        return dataclasses.replace(found, blocks=[])


def _meet(ticket: Ticket, endpoint: Endpoint, deadline: Deadline) -> FetchResult | relay.Relay | None:
    """Return a value that another reader of this host has received, the Relay that this reader now is, or None."""
    found = relay.meet(ticket, endpoint, deadline)
    if found is None or isinstance(found, relay.Relay):
        return found
    # After the copy is here, as after every read: only then does an unchanged state cover all of it.
    source = ticket.origin()
    with endpoint.links().borrow((source.host, source.port), source, deadline) as link:
        link.send(wire.ReadParts(ticket.key, b""))
        state = read_answer(link, ticket, 0, list)
    if not isinstance(state, FetchResult):
        raise answer_error(state, source, ticket)
    # Readers of memory that was written to get what is in it now, so the copy would be too old.
    return None if state.mutated else dataclasses.replace(state, blocks=found)


def _fetch_parts(
    ticket: Ticket,
    parts: Sequence[Part],
    endpoint: Endpoint,
    deadline: Deadline,
    receive_into: Callable[[Link, list[Any]], None],
) -> FetchResult:
    """Request parts from their source; `receive_into` fills their addresses from the link."""
    source, results = ticket.origin(), []
    for first in range(0, len(parts), wire.MAX_PARTS):
        some = parts[first : first + wire.MAX_PARTS]
        targets = [bytes_at(part.address, part.nbytes) for part in some]
        with endpoint.links().borrow((source.host, source.port), source, deadline) as link:
            link.send(wire.ReadParts(ticket.key, wire.pack_parts(part[:3] for part in some)))

            def receive(link: Link = link, targets: list[Any] = targets) -> list[Any]:
                with deadline.writing():
                    receive_into(link, targets)
                return []

            found = read_answer(link, ticket, sum(part.nbytes for part in some), receive)
        if not isinstance(found, FetchResult):
            raise answer_error(found, source, ticket)
        results.append(found)
    return FetchResult(
        blocks=[],
        mutated=any(one.mutated for one in results),
        creator_read=any(one.creator_read for one in results),
    )


def _fetch(
    ticket: Ticket, endpoint: Endpoint, deadline: Deadline, receive_into: Callable[[Link, list[Any]], None]
) -> FetchResult:
    """Request the blocks from their source; `receive_into` fills them from the link."""
    source = ticket.origin()
    with endpoint.links().borrow((source.host, source.port), source, deadline) as link:
        link.send(wire.Read(ticket.key))

        def receive() -> list[Any]:
            blocks = allocate(ticket, endpoint)
            receive_into(link, blocks)
            return blocks

        found = read_answer(link, ticket, ticket.nbytes, receive)
    if isinstance(found, FetchResult):
        return found
    # Raise outside the `with` block: the link is in a defined state and can be used again.
    raise answer_error(found, source, ticket)


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

"""tcp: the source's listener sends the blocks over TCP, from tensor memory straight into pooled memory.

Works for every value between any two processes, so `auto` uses it when nothing closer works.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from raylane.core.deadline import Deadline
from raylane.core.memory.layout import bytes_at
from raylane.transport.backends.answers import answer_error, read_answer
from raylane.transport.backends.base import Backend, Capability, FetchResult, Process
from raylane.transport.backends.tcp import relay
from raylane.transport.hold.blocks import allocate, copy_parts
from raylane.transport.link import wire
from raylane.transport.link.connection import Link
from raylane.transport.value.parts import Part
from raylane.transport.value.ticket import Ticket


class TcpBackend(Backend):
    """Transfer over a TCP connection to the source's listener."""

    name = "tcp"
    capability = Capability(
        summary="sent by the source over TCP",
        rank=40,
        same_process=True,
        same_host=True,
        across_hosts=True,
        parts=True,
        into=True,
        remedy="allow TCP connections between these hosts (firewall, container network), on all ports.",
    )

    def fetch(self, ticket: Ticket, process: Process, deadline: Deadline) -> FetchResult:
        """Request the blocks and receive them into pooled memory, or take them from another reader of this host."""
        if not relay.relays(ticket, process):
            return _fetch(ticket, process, deadline, Link.receive_into)
        meeting = _meet(ticket, process, deadline)
        if meeting is None:
            return _fetch(ticket, process, deadline, Link.receive_into)
        if isinstance(meeting, FetchResult):
            return meeting
        with meeting:
            result = _fetch(ticket, process, deadline, meeting.receive_into)
            meeting.deliver(result)
            return result

    def fetch_parts(self, ticket: Ticket, parts: Sequence[Part], process: Process, deadline: Deadline) -> FetchResult:
        """Request only these parts and receive them where they belong, or copy them from another reader's copy."""
        if not (relay.relays(ticket, process) and relay.covers(ticket, sum(part.nbytes for part in parts))):
            return _fetch_parts(ticket, parts, process, deadline, Link.receive_into)
        meeting = _meet(ticket, process, deadline)
        if meeting is None:
            return _fetch_parts(ticket, parts, process, deadline, Link.receive_into)
        if isinstance(meeting, relay.HostRelay):
            with meeting as first:
                if not first.expects_others:
                    first.refuse()
                    return _fetch_parts(ticket, parts, process, deadline, first.receive_into)
                meeting = _fetch(ticket, process, deadline, first.receive_into)
                first.deliver(meeting)  # before the copy below, because others wait for it
        copy_parts(parts, meeting.blocks, deadline)
        return dataclasses.replace(meeting, blocks=[])


def _meet(ticket: Ticket, process: Process, deadline: Deadline) -> FetchResult | relay.HostRelay | None:
    """Return a value that another reader of this host has received, the Relay that this reader now is, or None."""
    meeting = relay.meet(ticket, process, deadline)
    if meeting is None or isinstance(meeting, relay.HostRelay):
        return meeting
    # After the copy is here, as after every read: only then does an unchanged state cover all of it.
    source = ticket.origin()
    with process.links().borrow((source.host, source.port), source, deadline) as link:
        link.send(wire.ReadParts(ticket.key, b""))
        state = read_answer(link, ticket, 0, list)
    if not isinstance(state, FetchResult):
        raise answer_error(state, source, ticket)
    # Readers of memory that was written to get what is in it now, so the copy would be too old.
    return None if state.mutated else dataclasses.replace(state, blocks=meeting)


def _fetch_parts(
    ticket: Ticket,
    parts: Sequence[Part],
    process: Process,
    deadline: Deadline,
    receive_into: Callable[[Link, list[Any]], None],
) -> FetchResult:
    """Request parts from their source; `receive_into` fills their addresses from the link."""
    source, results = ticket.origin(), []
    for first in range(0, len(parts), wire.MAX_PARTS):
        some = parts[first : first + wire.MAX_PARTS]
        targets = [bytes_at(part.address, part.nbytes) for part in some]
        with process.links().borrow((source.host, source.port), source, deadline) as link:
            link.send(wire.ReadParts(ticket.key, wire.pack_parts(part[:3] for part in some)))

            def receive(link: Link = link, targets: list[Any] = targets) -> list[Any]:
                with deadline.writing():
                    receive_into(link, targets)
                return []

            answer = read_answer(link, ticket, sum(part.nbytes for part in some), receive)
        if not isinstance(answer, FetchResult):
            raise answer_error(answer, source, ticket)
        results.append(answer)
    return FetchResult(
        blocks=[],
        mutated=any(result.mutated for result in results),
        creator_read=any(result.creator_read for result in results),
    )


def _fetch(
    ticket: Ticket, process: Process, deadline: Deadline, receive_into: Callable[[Link, list[Any]], None]
) -> FetchResult:
    """Request the blocks from their source; `receive_into` fills them from the link."""
    source = ticket.origin()
    with process.links().borrow((source.host, source.port), source, deadline) as link:
        link.send(wire.ReadValue(ticket.key))

        def receive() -> list[Any]:
            blocks = allocate(ticket, process.pool)
            receive_into(link, blocks)
            return blocks

        answer = read_answer(link, ticket, ticket.nbytes, receive)
    if isinstance(answer, FetchResult):
        return answer
    # Raise outside the `with` block: the link is in a defined state and can be used again.
    raise answer_error(answer, source, ticket)

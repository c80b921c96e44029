"""gloo: the source sends the blocks through a channel of torch's gloo backend, which both processes open together.

For programs that ask for it by name. `auto` takes `host` or `tcp`, which need no channel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raylane.core.deadline import Deadline
from raylane.core.place import Place
from raylane.errors import SourceLostError, TransportError
from raylane.transport import wire
from raylane.transport.backends.base import Backend, Capability, FetchResult, allocate, timeout_error
from raylane.transport.backends.tcp import answer_error, read_answer
from raylane.transport.pairs import PairLink
from raylane.transport.source import Source
from raylane.transport.ticket import Ticket
from raylane.transport.tls import cleartext_refusal

if TYPE_CHECKING:
    from raylane.transport.endpoint import Endpoint


class GlooBackend(Backend):
    """Transfer through a gloo process group of source and reader."""

    name = "gloo"
    capability = Capability(
        summary="sent by the source through gloo", on_request=True, same_process=True, same_host=True, across_hosts=True
    )

    def refusal(self, source: Source, here: Place) -> str | None:
        """Return None, because gloo works between any two processes of the cluster, or that it may not be used."""
        return cleartext_refusal(self.name)

    def fetch(self, ticket: Ticket, endpoint: Endpoint, deadline: Deadline) -> FetchResult:
        """Request the blocks and receive them into pooled memory; the first time, open a channel."""
        return fetch_by_channel(self.name, ticket, endpoint, deadline)


def fetch_by_channel(name: str, ticket: Ticket, endpoint: Endpoint, deadline: Deadline) -> FetchResult:
    """Receive a value through a channel of this transport; a channel that breaks is opened again once."""
    source = ticket.origin()
    for attempt in (1, 2):
        try:
            with endpoint.pairs(name).borrow((source.host, source.port), source, deadline) as pair:
                return _read(pair, ticket, endpoint)
        # RuntimeError is of torch or NIXL. A connection that ended may also mean that the source's end of the channel
        # failed, so SourceLostError has to be proved.
        except (RuntimeError, SourceLostError) as error:
            if deadline.left_s() == 0:
                raise timeout_error(ticket, deadline) from error
            endpoint.check_alive(source)
            if attempt == 2:
                raise TransportError(
                    f"two {name} channels to {source} broke during a transfer: {str(error).splitlines()[0]}. Its "
                    "source still holds the value: read it again, or with tensor_transport='tcp'",
                    source=source.label,
                ) from error
    raise AssertionError("both attempts return or raise")


def _read(pair: PairLink, ticket: Ticket, endpoint: Endpoint) -> FetchResult:
    """Read a value through a channel. After an error the channel must be closed: it may still expect the value."""
    blocks = allocate(ticket, endpoint, on_device=pair.channel.on_device)
    wait = pair.expect(blocks, [block.nbytes for block in ticket.blocks], ticket.devices)
    pair.send(wire.Send(ticket.key))

    def receive() -> list[Any]:
        wait(pair.deadline)
        return blocks

    found = read_answer(pair, ticket, ticket.nbytes, receive)
    if isinstance(found, FetchResult):
        return found
    raise answer_error(found, ticket.origin(), ticket)

"""A listener in the test's own process, with a store and links to it; needs no Ray."""

from __future__ import annotations

import secrets

import torch

from raylane.core.deadline import Deadline
from raylane.core.process import place
from raylane.transport.hold.store import Entry, Store
from raylane.transport.link import listener, wire
from raylane.transport.link.connection import Address, Link
from raylane.transport.link.listener import Listener
from raylane.transport.value import codec
from raylane.transport.value.guards import footprint
from raylane.transport.value.source import Source

SECRET = b"s" * 32


def entry_of(tensor: torch.Tensor) -> Entry:
    """Return an entry that publishes one tensor as the result of a call."""
    layout = codec.plan_layout([tensor])
    return Entry(
        key=secrets.token_bytes(16),
        leaves=[tensor],
        layout=layout,
        footprints=[footprint(tensor)],
        for_callers=True,
    )


class Server:
    """A listener on its Unix and TCP sockets that serves `store`."""

    def __init__(self) -> None:
        self.name = f"raylane-test-{secrets.token_hex(8)}"
        self.store = Store()
        self.streams: dict[bytes, listener.TakeStream] = {}
        self.listener = Listener(
            self.store,
            SECRET,
            name=self.name,
            host="127.0.0.1",
            put_entry=lambda entry: (b"id", b"owner", [bytes(view) for view, _ in entry.views()]),
            session_ended=lambda: False,
            streams=self.streams,
        )
        self.addresses: list[Address] = [self.name, ("127.0.0.1", self.listener.port)]
        self.source = Source(place.here(), "Actor(Test)", self.name, "127.0.0.1", self.listener.port)

    def link(self, address: Address | None = None, secret: bytes = SECRET, timeout_s: float = 10) -> Link:
        return Link(address or self.addresses[1], secret, Deadline(timeout_s), client="test", peer=str(self.source))

    def serves(self) -> bool:
        """Return True if the listener still answers a new link."""
        link = self.link()
        link.send(wire.HeldQuery())
        answer = link.receive()
        link.close()
        return isinstance(answer, wire.HeldCount)


def read_value(link: Link, key: bytes, nbytes: int) -> bytearray:
    """Read a value of one block; fail unless it is intact, unmutated and unread by its creator."""
    link.send(wire.ReadValue(key))
    answer = link.receive()
    assert isinstance(answer, wire.Data), answer
    assert answer.nbytes == nbytes
    data = bytearray(nbytes)
    link.receive_into([data])
    assert link.receive() == wire.Trailer(True, False, False)
    return data

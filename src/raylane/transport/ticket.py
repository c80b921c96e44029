"""The record that travels in place of the tensors. Pure: who writes it is `publish`, who redeems it `reader`."""

from __future__ import annotations

import msgspec

from raylane.core.segment import HeaderSlots
from raylane.core.spans import Span
from raylane.transport.codec import LeafSpec
from raylane.transport.source import Source

VERSION = 1


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """What a reader needs to fetch one value. `inline` carries small values whole, and then nothing needs fetching."""

    version: int
    wanted: str
    """The transport that the producer asked for (`auto` and so on)."""
    on_mutation: str
    specs: list[LeafSpec]
    blocks: list[Span]
    """Addresses in the source; for a snapshot only their sizes mean something."""
    inline: list[bytes] | None = None
    key: bytes = b""
    source: Source | None = None
    header_address: int = 0
    nonce: int = 0
    segments: list[int] = []
    """Descriptors in the source, one per block, of a snapshot's sealed memfds."""
    counters: list[tuple[int, int]] = []
    """Addresses in the source of torch's 32-bit write counters, and what they were at publication."""

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def origin(self) -> Source:
        """The source of a ticket that is not inline."""
        if self.source is None:
            raise AssertionError("an inline ticket has no source")
        return self.source


HEADER_BYTES = HeaderSlots.SIZE
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Ticket)


def encode(ticket: Ticket) -> bytes:
    return _encoder.encode(ticket)


def decode(data: bytes) -> Ticket:
    """ValueError if these bytes are no ticket of this version."""
    try:
        ticket = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a ticket: {error}; do all processes run the same raylane?") from error
    if ticket.version != VERSION:
        raise ValueError(
            f"a ticket of version {ticket.version}, this raylane reads {VERSION}: run one raylane everywhere"
        )
    return ticket

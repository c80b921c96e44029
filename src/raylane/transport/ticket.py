"""The record that travels in place of the tensors. Pure: who writes it is `publish`, who redeems it `reader`."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import msgspec

from raylane.core.segment import HeaderSlots
from raylane.core.spans import Span
from raylane.transport.codec import LeafSpec
from raylane.transport.source import Source

VERSION = 2


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
    segment: int = -1
    """Descriptor in the source of a snapshot's sealed memfd, which holds the blocks at their `segment_offsets`."""
    counters: bytes = b""
    """Ranges in the source (as `vm.packed` writes them) of torch's 32-bit write counters."""
    counted: bytes = b""
    """The counters' content at publication."""
    guards: bytes | None = b""
    """Ranges in the source that change when its memory is freed, resized or re-pointed; None where the source could not
    find them, and then nobody may read its memory one-sidedly."""
    guarded: bytes = b""
    """Digest of the guards' content at publication."""
    checksum: int | None = None
    """CRC-32 over all blocks at publication, under `on_mutation="error"`; None otherwise."""

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


def checksum(blocks: Iterable[Any]) -> int:
    """Return the CRC-32 of buffers, one after the other: about 3.5 GB/s, without the GIL. A change escapes it once in
    four thousand million times."""
    found = 0
    for block in blocks:
        found = zlib.crc32(block, found)
    return found


def encode(ticket: Ticket) -> bytes:
    return _encoder.encode(ticket)


def decode(data: Any) -> Ticket:
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

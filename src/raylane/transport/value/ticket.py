"""Tickets: the records that Ray carries in place of published tensors.

Pure data with its encoding. `publish` writes tickets, `reader` redeems them (replaces them by the tensors).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import msgspec

from raylane.core.deadline import Deadline
from raylane.core.memory.header_slots import HeaderSlots
from raylane.core.memory.spans import Span
from raylane.core.process.gc_pauses import paused
from raylane.errors import TensorFreedError, TransferTimeoutError, TransportError
from raylane.transport.value.layout import ARRAY, LeafSpec
from raylane.transport.value.source import Source

VERSION = 5


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """Everything a reader needs to fetch one published value.

    A ticket with `inline` blocks carries a small value whole, so its reader fetches nothing.
    """

    version: int
    transport: str
    """Transport that the producer asked for, such as `auto`."""
    on_mutation: str
    """Reaction of a reader to a write since publication: `warn`, `error` or `allow`."""
    specs: list[LeafSpec]
    blocks: list[Span]
    """Addresses of the blocks in the source; for a snapshot those of its mapping there."""
    inline: list[bytes] | None = None
    """Content of the blocks, or None if the reader has to fetch it."""
    key: bytes = b""
    """Key of the value in the store of its source."""
    source: Source | None = None
    """Process that holds the value; None for an inline ticket."""
    header_address: int = 0
    """Address in the source of the value's slot in `HeaderSlots`."""
    nonce: int = 0
    """Number that the header slot holds for as long as the value is published."""
    segment: int = -1
    """Descriptor in the source of a snapshot's sealed memfd, which holds the blocks at their `segment_offsets`."""
    counters: bytes = b""
    """Ranges in the source (packed by `vm.pack_ranges`) of torch's 32-bit write counters."""
    counted: bytes = b""
    """Content of the write counters at publication."""
    guards: bytes | None = b""
    """Ranges in the source that change when its memory is freed, resized or re-pointed.

    None means that the source could not find these ranges; its memory must then not be read one-sidedly.
    """
    guarded: bytes = b""
    """Digest of the content of the guards at publication."""
    checksum: int | None = None
    """CRC-32 over all blocks at publication under `on_mutation="error"`; None otherwise."""
    groups: list[str] = []
    """Collective groups of the source with the wanted transport; readers outside of them use another transport."""
    devices: dict[int, int] = {}
    """Blocks in the memory of a CUDA device, with the device's number in the source."""
    regions: dict[int, tuple[str, int]] = {}
    """Blocks in memory of `raylane.empty`: path and offset, by which processes of the source's host can map them."""

    @property
    def nbytes(self) -> int:
        """Size of all blocks together."""
        return sum(block.nbytes for block in self.blocks)

    @property
    def may_be_shared(self) -> bool:
        """True if a reader may take a copy that was made for an earlier or a simultaneous reader.

        Then a write since that copy is noticed, or the checksum tells. NumPy counts no writes, so readers of its arrays
        would get old content without a word; with `allow` they expect what is in the memory now.
        """
        if self.on_mutation == "allow":
            return False
        return self.checksum is not None or not any(spec.kind == ARRAY for spec in self.specs)

    def origin(self) -> Source:
        """Return the source. AssertionError for an inline ticket, which has none."""
        if self.source is None:
            raise AssertionError("an inline ticket has no source")
        return self.source


HEADER_BYTES = HeaderSlots.SIZE
_BYTES_PER_OBJECT = 50
"""About the size of the encoding of one leaf or block."""
# array_like structs have no field names on the wire, so a ticket stays small. A change of fields needs a new VERSION.
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Ticket)


def checksum(blocks: Iterable[Any]) -> int:
    """Return the CRC-32 over buffers, in order.

    Runs at about 3.5 GB/s and releases the GIL. A random change stays unnoticed with a probability of 2**-32.
    """
    value = 0
    for block in blocks:
        value = zlib.crc32(block, value)
    return value


def encode_ticket(ticket: Ticket) -> bytes:
    """Return the msgpack encoding of a ticket."""
    return _encoder.encode(ticket)


def decode_ticket(data: Any) -> Ticket:
    """Return the ticket that `encode_ticket` packed. ValueError if the bytes are no ticket of this version."""
    try:
        with paused(len(data) // _BYTES_PER_OBJECT):
            ticket = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ValueError(f"could not read a ticket: {error}. Install one version of raylane everywhere") from error
    if ticket.version != VERSION:
        raise ValueError(
            f"could not read a ticket: its version is {ticket.version}, this raylane reads version {VERSION}. "
            "Install one version of raylane everywhere"
        )
    return ticket


def freed_error(ticket: Ticket) -> TensorFreedError:
    """Return the error for a value that its source, which is alive, no longer holds."""
    source = ticket.origin()
    return TensorFreedError(
        f"could not read a value: {source} has freed it, because every ref to it was gone or the process that owned "
        "the ref has died. Keep the ref (in a process that stays alive) until all readers are done",
        source=source.label,
        key=ticket.key.hex(),
    )


def moved_error(ticket: Ticket) -> TensorFreedError:
    """Return the error for a value whose owner freed, resized or re-pointed the memory while refs to it exist."""
    source = ticket.origin()
    return TensorFreedError(
        f"could not read a value: {source} has freed, resized or re-pointed the memory of one of its tensors "
        "(untyped_storage().resize_, resize_, set_, `.data =`, share_memory_, ndarray.resize) since the value was "
        "published. Leave published tensors in place until raylane.wait_free(tensor), or publish with "
        "snapshot=True",
        source=source.label,
        key=ticket.key.hex(),
    )


def timeout_error(ticket: Ticket, deadline: Deadline) -> TransferTimeoutError:
    """Return the error for a transfer that exceeded its deadline; the published value is unharmed."""
    return TransferTimeoutError(
        f"could not read {ticket.nbytes} bytes from {ticket.origin()} within {deadline.timeout_s} s. Raise the timeout "
        "(or RAYLANE_TIMEOUT_S) if the value is that large",
        source=ticket.origin().label,
    )


def receive_error(ticket: Ticket, error: OSError) -> TransportError:
    """Return the error for a reader (not a source) that has no memory or descriptors left."""
    return TransportError(
        f"this process cannot take in {ticket.nbytes} bytes from {ticket.origin()}: {error.strerror}. Free memory or "
        "descriptors (ulimit -n) in this process",
        source=ticket.origin().label,
    )

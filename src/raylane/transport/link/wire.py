"""Messages of a link: typed, size-limited msgpack frames, never pickle. Pure; `listener` and `link` do the I/O.

    frame  =  length (4 bytes, little-endian)  +  msgpack of one of the messages below
    Data is followed by the raw bytes of the blocks in order, outside any frame, and then by a Trailer frame.

A link opens with a handshake. Both ends prove that they know the secret of this Ray cluster before any request is
answered:

    listener -> Challenge(listener's nonce)
    client   -> Hello(client's nonce, HMAC(secret, "client", both nonces, address))
    listener -> Welcome(HMAC(secret, "listener", both nonces, address))   or Refusal, and the link is closed

`address` is the listener's address as the client connected to it. The HMAC covers the address so that a proof recorded
at one listener is invalid at another. Frames after the handshake have no integrity check of their own;
`docs/reference/security.md` describes the networks on which this is safe. A client sends one request at a time and
reads the answer before the next request.

After a StreamRequest the listener passes the connection to the component that registered for the given key in its
process. That component answers Streaming and uses its own protocol from then on (`graph.channels.frames`).
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterable
from typing import Annotated, TypeAlias

import msgspec

VERSION = 5
MAX_FRAME_BYTES = 1 << 20
MAX_HANDSHAKE_FRAME_BYTES = 1 << 12
"""Limit of a frame's size before the peer is authenticated, in either direction."""
NONCE_BYTES = 16
# msgspec checks these limits while decoding, so a peer cannot make a listener keep long keys.
_Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Key = Annotated[bytes, msgspec.Meta(max_length=64)]
_Proof = Annotated[bytes, msgspec.Meta(max_length=64)]
_LENGTH = struct.Struct("<I")
_PART = struct.Struct("<QQQ")
MAX_PARTS = 1 << 15
"""Limit of the parts in one ReadParts, so that the request fits a frame."""


class Challenge(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """First message of a link: the listener's protocol version and nonce."""

    version: int
    nonce: _Nonce


class Hello(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """The client's answer to the Challenge: its own nonce and its proof."""

    version: int
    nonce: _Nonce
    proof: _Proof
    client: str
    """Label of the client's process, for messages."""


class Welcome(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """The listener's own proof; the link accepts requests from now on."""

    proof: _Proof


class Refusal(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Reason why the listener does not serve a peer or a request; the listener then closes the link."""

    reason: str


class ReadValue(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """Request for the blocks of one value; answered by Data or Gone."""

    key: _Key


class ReadParts(msgspec.Struct, tag=19, array_like=True, frozen=True):
    """Request for parts of one value; answered by Data with the parts in order, Gone, or Refusal if one is outside.

    `parts` holds three 64-bit numbers (little-endian) for each part: number of the block, offset and size in bytes.
    """

    key: _Key
    parts: bytes


class Data(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """Announcement of `nbytes` raw bytes: the blocks in order, followed by a Trailer frame."""

    nbytes: int


class Trailer(msgspec.Struct, tag=14, array_like=True, frozen=True):
    """State of the source's memory, checked after the last byte of Data left that memory.

    With `intact` False the received bytes are invalid: the memory was freed, resized or re-pointed.
    """

    intact: bool
    mutated: bool
    creator_read: bool


class Gone(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """Answer for a value that cannot be read: freed or, if `moved`, freed, resized or re-pointed by its owner."""

    key: _Key
    moved: bool = False


class Put(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """Request to put a value's blocks into Ray's object store; answered by PutReply, Gone or Refusal."""

    key: _Key


class PutReply(msgspec.Struct, tag=8, array_like=True, frozen=True):
    """Name of the object that a Put created; the source keeps its ref until the client sends Release."""

    object_id: bytes
    owner: bytes
    mutated: bool
    creator_read: bool


class Release(msgspec.Struct, tag=9, array_like=True, frozen=True):
    """Message that the client no longer needs the object of a PutReply; has no answer."""

    key: _Key


class HeldQuery(msgspec.Struct, tag=10, array_like=True, frozen=True):
    """Request for the number of call results that a process holds; answered by HeldCount.

    Sent by a process that keeps an actor alive only because of the results that the actor may still hold.
    """


class HeldCount(msgspec.Struct, tag=11, array_like=True, frozen=True):
    """Number of call results that the answering process holds."""

    count: int


class HoldingsQuery(msgspec.Struct, tag=42, array_like=True, frozen=True):
    """Request for what a process holds, with its `most` largest and `most` oldest values; answered by Holdings."""

    most: int


class Held(msgspec.Struct, array_like=True, frozen=True):
    """One published value in Holdings."""

    nbytes: int
    tensors: int
    age_s: float
    origin: str
    """Method that returned the value, or the line that called `put`."""
    transport: str
    """Transport that the producer asked for."""
    reads: int
    """Number of reads so far; simultaneous reads can count as one."""
    snapshot: bool
    result: bool
    """True for the result of a call, False for a put."""


class Kept(msgspec.Struct, array_like=True, frozen=True):
    """One actor that a process keeps alive, in Holdings."""

    actor: str
    """Hexadecimal id."""
    refs: list[tuple[str, int]]
    """Names of methods, with the number of refs to their results that this process has."""
    ended: int
    """Number of further refs that are gone, since the actor last had no results or handle kept."""


class Holdings(msgspec.Struct, tag=43, array_like=True, frozen=True):
    """Memory that the answering process holds for readers or for reuse, and actors that it keeps alive."""

    entries: int
    nbytes: int
    budget: int | None
    waiting: int
    """Number of publications that wait for room in the budget."""
    pool_idle_bytes: int
    pool_used_bytes: int
    shared_bytes: int
    """Size of the copies that readers of one host share, with those that are idle."""
    shared_idle_bytes: int
    values: list[Held]
    """The largest and the oldest values, largest first; all values if they are few."""
    kept_actors: list[Kept]
    region_bytes: int = 0
    """Size of the memory that `raylane.empty` has made here."""
    region_read_bytes: int = 0
    """Size of the part of it that other processes read at present."""
    region_idle_bytes: int = 0
    """Size of the part of it that is kept for new arrays."""
    mapped_bytes: int = 0
    """Size of the memory of other processes that this one has mapped and uses."""
    mapped_idle_bytes: int = 0


class StreamRequest(msgspec.Struct, tag=12, array_like=True, frozen=True):
    """Request to pass this connection to the component that registered for `key`; answered by Streaming.

    `member` identifies the client there, and `level` distinguishes the connections of one client.
    """

    key: _Key
    member: int
    level: int


class Streaming(msgspec.Struct, tag=13, array_like=True, frozen=True):
    """Acceptance of a StreamRequest. `clock_s` is the sender's time.perf_counter()."""

    clock_s: float


class OpenChannel(msgspec.Struct, tag=15, array_like=True, frozen=True):
    """First message of a stream to `channels`: both processes create a channel of this backend.

    RendezvousEntry messages follow, then ChannelOpened.
    """

    backend: str


class RendezvousEntry(msgspec.Struct, tag=16, array_like=True, frozen=True):
    """Part of the rendezvous of a channel, in either direction: a value under a key."""

    key: str
    value: bytes


class ChannelOpened(msgspec.Struct, tag=17, array_like=True, frozen=True):
    """End of the rendezvous: the sender's end of the channel is open."""


class Send(msgspec.Struct, tag=18, array_like=True, frozen=True):
    """Request to send the blocks of a value through the channel; answered by Data, whose bytes come there, or Gone."""

    key: _Key


class OfferRequest(msgspec.Struct, tag=30, array_like=True, frozen=True):
    """Request for the ranges of the value that the Data before announced; answered by Offers (`nixl_channel`).

    The reader has the metadata of the source's registrations up to `number` of this epoch; 0 and 0 for none.
    """

    epoch: int
    number: int


OfferedRange: TypeAlias = tuple[int, int, int]
"""Memory in the source: address, size in bytes, and number of the CUDA device (-1: host)."""


class Offer(msgspec.Struct, tag=31, array_like=True, frozen=True):
    """Part of the ranges of a value, and of the metadata that the reader lacks."""

    epoch: int
    number: int
    metadata: list[bytes]
    ranges: list[OfferedRange]
    more: bool
    """True if another Offer follows."""


class Taken(msgspec.Struct, tag=32, array_like=True, frozen=True):
    """Message that the reader has the bytes of all offered ranges; answered by Trailer."""


DevicePlace: TypeAlias = tuple[bytes, int, int, bytes]
"""Memory of a CUDA device: handle of its allocation, offset and size in bytes, UUID of the device."""


class Allocations(msgspec.Struct, tag=33, array_like=True, frozen=True):
    """Places of some pieces of a value that lie on devices (`backends.cuda`).

    The bytes of the pieces in host memory follow the last of these.
    """

    places: list[DevicePlace]
    more: bool
    """True if another one follows."""


class ShareRequest(msgspec.Struct, tag=40, array_like=True, frozen=True):
    """Request for a copy of a value in shared memory, for all readers of the host.

    Answered by Shared, Gone or Refusal.
    """

    key: _Key


class Shared(msgspec.Struct, tag=41, array_like=True, frozen=True):
    """Path of the shared copy in the source; the blocks lie at their `segment_offsets`."""

    path: str


Message: TypeAlias = (
    Challenge
    | Hello
    | Welcome
    | Refusal
    | ReadValue
    | Data
    | Trailer
    | Gone
    | Put
    | PutReply
    | Release
    | HeldQuery
    | HeldCount
    | StreamRequest
    | Streaming
    | OpenChannel
    | RendezvousEntry
    | ChannelOpened
    | Send
    | ReadParts
    | ShareRequest
    | Shared
    | OfferRequest
    | Offer
    | Taken
    | Allocations
    | HoldingsQuery
    | Holdings
)
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()
# The tags are part of the protocol: keep the number of a message when it is renamed.


def pack_parts(parts: Iterable[tuple[int, int, int]]) -> bytes:
    """Return (block, offset, size) of each part as ReadParts carries them."""
    return b"".join(_PART.pack(*part) for part in parts)


def unpack_parts(packed: bytes) -> list[tuple[int, int, int]]:
    """Return what `pack_parts` packed. WireError if the bytes are no list of parts."""
    if len(packed) % _PART.size:
        raise WireError(f"a list of parts takes a multiple of {_PART.size} bytes, got {len(packed)}")
    return list(_PART.iter_unpack(packed))


class WireError(ValueError):
    """Received bytes are not a valid frame of this protocol."""


def pack_frame(message: Message) -> bytes:
    """Return a message as one frame, its length in front."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise AssertionError(f"a {type(message).__name__} frame of {len(body)} bytes; the limit is {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def frame_length(head: bytes, limit: int = MAX_FRAME_BYTES) -> int:
    """Return the size of a frame's body in bytes, from the first four bytes. WireError if it is outside the limit."""
    length: int = _LENGTH.unpack(head)[0]
    if not 0 < length <= limit:
        raise WireError(f"the announced size of a frame is {length} bytes; 1 to {limit} are allowed")
    return length


def unpack_body(body: bytes | bytearray | memoryview) -> Message:
    """Return the message in the body of a frame. WireError if the bytes are not a message, however msgspec fails."""
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise WireError(f"not a message of this protocol: {type(error).__name__}: {error}") from error


class FrameBuffer:
    """Buffer of received bytes that returns complete messages of at most `limit` bytes each."""

    __slots__ = ("_bytes", "limit")

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self._bytes = bytearray()
        self.limit = limit

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that `data` completes. WireError as soon as the bytes cannot be a valid frame."""
        self._bytes += data
        messages = []
        while len(self._bytes) >= _LENGTH.size:
            # The length is checked before the body has arrived, so a peer cannot make this buffer grow without limit.
            end = _LENGTH.size + frame_length(bytes(self._bytes[: _LENGTH.size]), self.limit)
            if len(self._bytes) < end:
                break
            messages.append(unpack_body(self._bytes[_LENGTH.size : end]))
            del self._bytes[:end]
        return messages


Address: TypeAlias = str | tuple[str, int]
"""Address of a listener: the name of an abstract Unix socket (without the leading NUL), or (host, port)."""


def make_proof(secret: bytes, role: str, listeners_nonce: bytes, clients_nonce: bytes, address: Address) -> bytes:
    """Return the HMAC-SHA256 over the role, both nonces and the listener's address.

    The result is valid for one role in one handshake with one listener.
    """
    where = f"unix:{address}" if isinstance(address, str) else f"tcp:{address[0]}:{address[1]}"
    # The role is included so that a listener's proof cannot be sent back to it as a client's proof.
    text = f"raylane/{VERSION}/{role}/".encode() + listeners_nonce + clients_nonce + where.encode()
    return hmac.digest(secret, text, hashlib.sha256)


def proofs_equal(claimed: bytes, expected: bytes) -> bool:
    """Compare two proofs in constant time, so that timing does not reveal how many bytes match."""
    return hmac.compare_digest(claimed, expected)

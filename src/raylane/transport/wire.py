"""Messages of a link: typed frames, bounded in size, never pickle. Pure; `listener` and `link` do the I/O.

    frame  =  length (4 bytes, little-endian)  +  msgpack of one of the messages below
    Data is followed by the raw bytes of the blocks, one after the other, outside any frame, and then by a Sent frame.

A link opens with a mutual proof that both ends know the secret of this Ray cluster; nothing else is answered before:

    listener -> Challenge(listener's nonce)
    client   -> Hello(client's nonce, HMAC(secret, "client", both nonces, address))
    listener -> Welcome(HMAC(secret, "listener", both nonces, address))   or Refusal, and the link is closed

`address` is the one that the client connected to, and the listener's own: a proof made for one listener is worth
nothing at another. Frames carry no integrity check of their own; `docs/reference/security.md` says which network is
trusted. A client sends one request and reads its answer before the next one.

A link may then become somebody else's: after Stream the listener hands the connection over to whoever has registered
for that key in this process, who answers Streaming and speaks a protocol of his own (`graph.channels.frames`).
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Annotated, TypeAlias

import msgspec

VERSION = 2
MAX_FRAME_BYTES = 1 << 20
MAX_STRANGER_FRAME_BYTES = 1 << 12
"""Limit before the proof, in either direction."""
NONCE_BYTES = 16
_Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Key = Annotated[bytes, msgspec.Meta(max_length=64)]
_Proof = Annotated[bytes, msgspec.Meta(max_length=64)]
_LENGTH = struct.Struct("<I")


class Challenge(msgspec.Struct, tag=0, array_like=True, frozen=True):
    version: int
    nonce: _Nonce


class Hello(msgspec.Struct, tag=1, array_like=True, frozen=True):
    version: int
    nonce: _Nonce
    proof: _Proof
    who: str


class Welcome(msgspec.Struct, tag=2, array_like=True, frozen=True):
    proof: _Proof


class Refusal(msgspec.Struct, tag=3, array_like=True, frozen=True):
    reason: str


class Read(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """Send me this value's blocks."""

    key: _Key


class Data(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """The next `nbytes` bytes of the link are the blocks, then comes Sent."""

    nbytes: int


class Sent(msgspec.Struct, tag=14, array_like=True, frozen=True):
    """What the source found after the last byte had left its memory. With `in_place` False the bytes mean nothing: the
    memory was freed, resized or re-pointed."""

    in_place: bool
    mutated: bool
    creator_read: bool


class Gone(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """The value is not held any more; or, if `moved`, its memory was freed, resized or re-pointed by its owner."""

    key: _Key
    moved: bool = False


class Put(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """Put this value's blocks into Ray's object store; the reply names the object, held until the link says Done."""

    key: _Key


class PutReply(msgspec.Struct, tag=8, array_like=True, frozen=True):
    object_id: bytes
    owner: bytes
    mutated: bool
    creator_read: bool


class Done(msgspec.Struct, tag=9, array_like=True, frozen=True):
    key: _Key


class Holding(msgspec.Struct, tag=10, array_like=True, frozen=True):
    """Do you hold results of calls? Asked by a process that keeps an actor alive only for what it may hold."""


class Held(msgspec.Struct, tag=11, array_like=True, frozen=True):
    count: int


class Stream(msgspec.Struct, tag=12, array_like=True, frozen=True):
    """Hand this connection over to who has registered for `key`. I am `member` there; `level` tells my connections
    apart."""

    key: _Key
    member: int
    level: int


class Streaming(msgspec.Struct, tag=13, array_like=True, frozen=True):
    """Go on. `expected` are pairs of a channel and the number of its next message; a channel that is not named begins.
    `clock_s` is time.perf_counter() of the sender."""

    expected: list[tuple[int, int]]
    clock_s: float


Message: TypeAlias = (
    Challenge
    | Hello
    | Welcome
    | Refusal
    | Read
    | Data
    | Sent
    | Gone
    | Put
    | PutReply
    | Done
    | Holding
    | Held
    | Stream
    | Streaming
)
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


class WireError(ValueError):
    """These bytes are not a frame of ours."""


def pack(message: Message) -> bytes:
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise AssertionError(f"a {type(message).__name__} frame of {len(body)} bytes; the limit is {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def frame_length(head: bytes, limit: int = MAX_FRAME_BYTES) -> int:
    """Return the bytes of the frame's body, from its first four bytes. WireError if that cannot be one of ours."""
    length: int = _LENGTH.unpack(head)[0]
    if not 0 < length <= limit:
        raise WireError(f"a frame of {length} bytes was announced; 1 to {limit} are allowed")
    return length


def unpack(body: bytes | bytearray | memoryview) -> Message:
    """Return the message. WireError for anything else, of whatever kind msgspec's own complaint is."""
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise WireError(f"not a message of ours: {type(error).__name__}: {error}") from error


class FrameBuffer:
    """Collects bytes as they arrive and gives out whole messages of at most `limit` bytes."""

    __slots__ = ("_bytes", "limit")

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self._bytes = bytearray()
        self.limit = limit

    def feed(self, data: bytes) -> list[Message]:
        """The messages completed by `data`. WireError as soon as something cannot be ours."""
        self._bytes += data
        messages = []
        while len(self._bytes) >= _LENGTH.size:
            end = _LENGTH.size + frame_length(bytes(self._bytes[: _LENGTH.size]), self.limit)
            if len(self._bytes) < end:
                break
            messages.append(unpack(self._bytes[_LENGTH.size : end]))
            del self._bytes[:end]
        return messages


Address: TypeAlias = str | tuple[str, int]
"""An abstract Unix socket's name (without the leading NUL), or (host, port)."""


def proof(secret: bytes, role: str, listeners_nonce: bytes, clients_nonce: bytes, address: Address) -> bytes:
    """Return the HMAC-SHA256 over the role, both nonces and the listener's address: good for one role in one handshake
    with one listener."""
    where = f"unix:{address}" if isinstance(address, str) else f"tcp:{address[0]}:{address[1]}"
    text = f"raylane/{VERSION}/{role}/".encode() + listeners_nonce + clients_nonce + where.encode()
    return hmac.digest(secret, text, hashlib.sha256)


def proves(claimed: bytes, expected: bytes) -> bool:
    """Compare two proofs in constant time."""
    return hmac.compare_digest(claimed, expected)

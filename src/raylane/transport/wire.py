"""What links say: typed frames, bounded in size, never pickle. Pure; `listener` and `link` do the I/O.

    frame  =  length (4 bytes, little-endian)  +  msgpack of one of the messages below
    Data is followed by its blocks' raw bytes, one after the other, outside any frame.

A link opens with a mutual proof that both ends know the secret of this Ray cluster; nothing else is answered before:

    listener -> Challenge(nonce)            client -> Hello(nonce, proof of the listener's nonce)
    listener -> Welcome(proof of the client's nonce)   or Refusal, and the link is closed

A link may then become somebody else's: after Stream the listener hands the connection over to whoever has registered
for that key in this process, who answers Streaming and speaks a protocol of his own (`graph.channels.frames`).
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import TypeAlias

import msgspec

VERSION = 1
MAX_FRAME_BYTES = 1 << 20
NONCE_BYTES = 16
_LENGTH = struct.Struct("<I")


class Challenge(msgspec.Struct, tag=0, array_like=True, frozen=True):
    version: int
    nonce: bytes


class Hello(msgspec.Struct, tag=1, array_like=True, frozen=True):
    version: int
    nonce: bytes
    proof: bytes
    who: str


class Welcome(msgspec.Struct, tag=2, array_like=True, frozen=True):
    proof: bytes


class Refusal(msgspec.Struct, tag=3, array_like=True, frozen=True):
    reason: str


class Read(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """Send me this value's blocks."""

    key: bytes


class Data(msgspec.Struct, tag=5, array_like=True, frozen=True):
    sizes: list[int]
    mutated: bool
    creator_read: bool


class Gone(msgspec.Struct, tag=6, array_like=True, frozen=True):
    key: bytes


class Put(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """Put this value's blocks into Ray's object store; the reply names the object, held until the link says Done."""

    key: bytes


class PutReply(msgspec.Struct, tag=8, array_like=True, frozen=True):
    object_id: bytes
    owner: bytes
    mutated: bool
    creator_read: bool


class Done(msgspec.Struct, tag=9, array_like=True, frozen=True):
    key: bytes


class Holding(msgspec.Struct, tag=10, array_like=True, frozen=True):
    """Do you hold results of calls? Asked by a process that keeps an actor alive only for what it may hold."""


class Held(msgspec.Struct, tag=11, array_like=True, frozen=True):
    count: int


class Stream(msgspec.Struct, tag=12, array_like=True, frozen=True):
    """Hand this connection over to who has registered for `key`. I am `member` there; `level` tells my connections
    apart."""

    key: bytes
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


def frame_length(head: bytes) -> int:
    """Bytes of the frame's body, from its first four bytes. WireError if that cannot be one of ours."""
    length: int = _LENGTH.unpack(head)[0]
    if not 0 < length <= MAX_FRAME_BYTES:
        raise WireError(f"a frame of {length} bytes was announced; 1 to {MAX_FRAME_BYTES} are allowed")
    return length


def unpack(body: bytes | bytearray | memoryview) -> Message:
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a message of ours: {error}") from error


class FrameBuffer:
    """Collects bytes as they arrive and gives out whole messages."""

    __slots__ = ("_bytes",)

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages completed by `data`. WireError as soon as something cannot be ours."""
        self._bytes += data
        messages = []
        while len(self._bytes) >= _LENGTH.size:
            end = _LENGTH.size + frame_length(bytes(self._bytes[: _LENGTH.size]))
            if len(self._bytes) < end:
                break
            messages.append(unpack(self._bytes[_LENGTH.size : end]))
            del self._bytes[:end]
        return messages


def proof(secret: bytes, role: str, nonce: bytes) -> bytes:
    """HMAC-SHA256 over the role and the other side's nonce: a proof by one side is none for the other."""
    return hmac.digest(secret, f"raylane/{VERSION}/{role}".encode() + nonce, hashlib.sha256)


def proves(secret: bytes, role: str, nonce: bytes, claimed: bytes) -> bool:
    return hmac.compare_digest(proof(secret, role, nonce), claimed)

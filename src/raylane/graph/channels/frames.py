"""What goes over a hop: frames of one direction, receipts of the other. Bytes only; `hop` sends them, `arrivals` reads.

    frame    =  channel u32 | kind u8 | flags u8 | 0 u16 | buffers u32 | sequence u64 | body bytes u64
                + size u64 of each buffer + the buffers + the body
    receipt  =  channel u32 | sequence u64        for frames with the flag RECEIPT: the receiver has all of it

Both ends have proven themselves to the listener before the first frame (`transport.wire`): sizes are trusted.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from raylane.graph.values.message import Message

_HEAD = struct.Struct("<IBBxxIQQ")
HEAD_BYTES = _HEAD.size
_RECEIPT = struct.Struct("<IQ")
RECEIPT_BYTES = _RECEIPT.size
RECEIPT = 128
"""A flag beside those of rings: the sender waits for the receipt, because it lends its own memory until then."""
JOIN_BELOW_BYTES = 1 << 17
"""Smaller frames are copied into one piece: the sender keeps them and returns at once."""
_MAX_PIECES = 512
"""Below IOV_MAX, 1024 on Linux."""


class Head(NamedTuple):
    channel: int
    kind: int
    flags: int
    buffers: int
    sequence: int
    body: int


def pack(channel: int, sequence: int, message: Message, flags: int) -> tuple[list[memoryview], bool]:
    """The pieces of a frame, and whether they lend memory of the message (else they are a copy of it)."""
    kind, body, buffers, _ = message
    if not buffers and len(body) < JOIN_BELOW_BYTES:
        return [memoryview(_HEAD.pack(channel, kind, flags, 0, sequence, len(body)) + body)], False
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    sizes = [view.nbytes for view in views]
    lent = sum(sizes) + len(body) >= JOIN_BELOW_BYTES
    head = _HEAD.pack(channel, kind, flags | (RECEIPT if lent else 0), len(views), sequence, len(body))
    head += struct.pack(f"<{len(sizes)}Q", *sizes)
    if lent:
        return [memoryview(head), *(view for view in views if view.nbytes), memoryview(body)], True
    return [memoryview(b"".join([head, *views, body]))], False


def unpack(data: Any) -> Head:
    return Head(*_HEAD.unpack(data))


def sizes_of(data: Any, count: int) -> tuple[int, ...]:
    return struct.unpack(f"<{count}Q", data)


def pack_receipt(channel: int, sequence: int) -> bytes:
    return _RECEIPT.pack(channel, sequence)


def unpack_receipt(data: Any) -> tuple[int, int]:
    """(channel, sequence)."""
    found: tuple[int, int] = _RECEIPT.unpack(data)
    return found


def send_all(sock: socket.socket, pieces: Sequence[memoryview]) -> None:
    """Send all of it from where it lies. OSError when the connection ends."""
    if len(pieces) == 1:
        sock.sendall(pieces[0])
        return
    left = [piece for piece in pieces if piece.nbytes]
    while left:
        sent = sock.sendmsg(left[:_MAX_PIECES])
        while left and sent >= left[0].nbytes:
            sent -= left.pop(0).nbytes
        if sent:
            left[0] = left[0][sent:]


class FrameReader:
    """Takes bytes off a blocking socket: small pieces many at a time, large ones straight to where they belong."""

    def __init__(self, sock: socket.socket, buffer_bytes: int = 1 << 16) -> None:
        self._sock = sock
        self._memory = memoryview(bytearray(buffer_bytes))
        self._start = self._end = 0

    def exactly(self, count: int) -> bytes:
        """ConnectionError when the connection ends before that."""
        while self._end - self._start < count:
            if count > self._memory.nbytes:
                data = bytearray(count)
                self.fill(memoryview(data))
                return bytes(data)
            self._more(count)
        data_at = self._start
        self._start += count
        return bytes(self._memory[data_at : self._start])

    def _more(self, count: int) -> None:
        memory, start, end = self._memory, self._start, self._end
        if start == end:
            self._start = start = end = 0
        elif start + count > memory.nbytes:
            memory[: end - start] = bytes(memory[start:end])
            self._start, start, end = 0, 0, end - start
        got = self._sock.recv_into(memory[end:])
        if not got:
            raise ConnectionError("connection closed")
        self._end = end + got

    def fill(self, view: memoryview) -> None:
        """Fill this memory. ConnectionError when the connection ends before that."""
        have = min(self._end - self._start, view.nbytes)
        view[:have] = self._memory[self._start : self._start + have]
        self._start += have
        view = view[have:]
        while view.nbytes:
            got = self._sock.recv_into(view, 0, socket.MSG_WAITALL)
            if not got:
                raise ConnectionError("connection closed")
            view = view[got:]

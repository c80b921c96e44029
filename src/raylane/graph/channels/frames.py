"""Format of the bytes between two hosts: frames in one direction, receipts in the other.

Frames are sent by `peer_link` and read by `receiver`.

    frame    =  channel u32 | kind u8 | flags u8 | 0 u16 | buffers u32 | sequence u64 | body bytes u64
                + size u64 of each buffer + the buffers + the body
    receipt  =  one byte for each frame with the flag RECEIPT, in their order: the receiver has the whole message

Before the first frame both ends have authenticated each other (`transport.wire`). The receiver checks sizes all the
same: a defect of the peer must not make this process allocate memory.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from raylane.graph.values.message import Message

_HEADER = struct.Struct("<IBBxxIQQ")
HEADER_BYTES = _HEADER.size
RECEIPT_BYTE = b"\0"
RECEIPT = 128
"""Flag of a frame whose sender waits for a receipt, because it lends the memory of the message until then.

The flag does not collide with those of rings, which travel in the same byte.
"""
JOIN_BELOW_BYTES = 1 << 17
"""Size below which a frame is copied into one piece: the sender keeps the copy and returns at once."""
_MAX_PIECES = 512
"""Maximum number of pieces in one sendmsg call; IOV_MAX is 1024 on Linux."""


class FrameHeader(NamedTuple):
    """Fixed part of a frame. `buffers` is the number of buffers, `body` the size of the body in bytes."""

    channel: int
    kind: int
    flags: int
    buffers: int
    sequence: int
    body: int


def pack_message(channel: int, sequence: int, message: Message, flags: int) -> tuple[list[memoryview], bool]:
    """Return the pieces of a frame, and True if they share memory with the message (else they are a copy)."""
    kind, body, buffers, _ = message
    if not buffers and len(body) < JOIN_BELOW_BYTES:
        return [memoryview(_HEADER.pack(channel, kind, flags, 0, sequence, len(body)) + body)], False
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    sizes = [view.nbytes for view in views]
    lent = sum(sizes) + len(body) >= JOIN_BELOW_BYTES
    header = _HEADER.pack(channel, kind, flags | (RECEIPT if lent else 0), len(views), sequence, len(body))
    header += struct.pack(f"<{len(sizes)}Q", *sizes)
    if lent:
        return [memoryview(header), *(view for view in views if view.nbytes), memoryview(body)], True
    return [memoryview(b"".join([header, *views, body]))], False


def unpack_header(data: Any) -> FrameHeader:
    """Read a header from HEADER_BYTES bytes."""
    return FrameHeader(*_HEADER.unpack(data))


def unpack_sizes(data: Any, count: int) -> tuple[int, ...]:
    """Read the sizes of `count` buffers."""
    return struct.unpack(f"<{count}Q", data)


def send_all(sock: socket.socket, pieces: Sequence[memoryview]) -> None:
    """Send all pieces without joining them. Waits for the peer to read; OSError when the connection ends."""
    if len(pieces) == 1:
        sock.sendall(pieces[0])
        return
    remaining = [piece for piece in pieces if piece.nbytes]
    while remaining:
        sent = sock.sendmsg(remaining[:_MAX_PIECES])  # may send less than all, also in the middle of a piece
        while remaining and sent >= remaining[0].nbytes:
            sent -= remaining.pop(0).nbytes
        if sent:
            remaining[0] = remaining[0][sent:]


class FrameReader:
    """Buffered reader of a blocking socket: many small pieces per system call, large pieces without a copy."""

    def __init__(self, sock: socket.socket, buffer_bytes: int = 1 << 16) -> None:
        self._sock = sock
        self._memory = memoryview(bytearray(buffer_bytes))
        self._start = self._end = 0

    def exactly(self, count: int) -> bytes:
        """Return the next `count` bytes. ConnectionError if the connection ends before."""
        while self._end - self._start < count:
            if count > self._memory.nbytes:  # does not fit into the buffer: receive it into memory of its own
                data = bytearray(count)
                self.fill(memoryview(data))
                return bytes(data)
            self._receive(count)
        data_at = self._start
        self._start += count
        return bytes(self._memory[data_at : self._start])

    def _receive(self, count: int) -> None:
        """Receive more bytes into the buffer, which must have room for `count` bytes from its first unread one."""
        memory, start, end = self._memory, self._start, self._end
        if start == end:
            self._start = start = end = 0
        elif start + count > memory.nbytes:  # no room behind the unread bytes: move them to the front
            memory[: end - start] = bytes(memory[start:end])
            self._start, start, end = 0, 0, end - start
        got = self._sock.recv_into(memory[end:])
        if not got:
            raise ConnectionError("connection closed")
        self._end = end + got

    def fill(self, view: memoryview) -> None:
        """Fill `view` with the next bytes. ConnectionError if the connection ends before."""
        have = min(self._end - self._start, view.nbytes)
        view[:have] = self._memory[self._start : self._start + have]
        self._start += have
        view = view[have:]
        while view.nbytes:
            # MSG_WAITALL saves system calls; a signal may still end the call early, hence the loop.
            got = self._sock.recv_into(view, 0, socket.MSG_WAITALL)
            if not got:
                raise ConnectionError("connection closed")
            view = view[got:]

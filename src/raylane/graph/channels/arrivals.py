"""The receiving end of hops: one thread for each inbound connection of one graph.

A frame's bytes are received where they will live: small ones on their way into a slot of this host's ring, large ones
straight into a leased segment, from which the readers here take them without a copy. Then the relay sends the message
on to the relays that it serves.

What a connection has brought is known beyond its end: when its other end connects again, it is told which message of
each channel comes next. Made by `station`.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raylane.errors import GraphError, ProtocolError
from raylane.graph import message as m
from raylane.graph.channels import frames
from raylane.graph.channels.frames import FrameReader, Head
from raylane.graph.channels.hop import FanWriter, keep_alive
from raylane.graph.channels.lease import LeasePool
from raylane.graph.channels.ring import LEND_FROM_BYTES, WAKE, RingWriter
from raylane.graph.message import Message
from raylane.transport import wire

log = logging.getLogger("raylane.graph")

JOIN_S = 2.0
MAX_TOLD_BYTES = (1 << 17) - 1
"""Limit of one alarm or failure: below `frames.JOIN_BELOW_BYTES`, so that its sender does not wait for a receipt."""


@dataclass
class Arrival:
    """Where the messages of one channel go from here."""

    ring: RingWriter
    onward: FanWriter | None = None


class Inbound:
    """All connections, one after the other, from one member at one level."""

    def __init__(
        self,
        name: str,
        arrivals: dict[int, Arrival],
        pool: LeasePool,
        alarm: int,
        alarmed: Callable[[str], None],
        failed: Callable[[bytes], None],
    ) -> None:
        self.name = name
        self.pool = pool
        self._arrivals = arrivals
        self._alarm = alarm
        """The channel of it, whose messages are text for `alarmed`, or (kind ERROR) for `failed`."""
        self._alarmed = alarmed
        self._failed = failed
        self._lock = threading.RLock()  # guards _socket, _thread and _closed; a finalizer may `close`
        self._socket: socket.socket | None = None
        self._next: socket.socket | None = None
        """The connection to serve after this one. A newer one takes its place: a peer has one at a time."""
        self._thread: threading.Thread | None = None
        self._closed = False
        self._expected: dict[int, int] = {}
        """By channel the next message. Belongs to the thread."""

    def take(self, sock: socket.socket) -> None:
        """Serve this connection from now on, in place of the one before. Does not wait."""
        with self._lock:
            if self._closed:
                sock.close()
                return
            skipped, self._next = self._next, sock
            if skipped is not None:
                skipped.close()
            _shut(self._socket)  # its thread may be waiting for memory, at most for the graph's timeout
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve_all, name="raylane-hop", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the connection; the thread ends by itself."""
        with self._lock:
            self._closed = True
            self.pool.closed = True
            sock = self._socket
            skipped, self._next = self._next, None
            if skipped is not None:
                skipped.close()
        _shut(sock)

    def join(self, timeout_s: float) -> None:
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _serve_all(self) -> None:
        while True:
            with self._lock:
                sock, self._next = self._next, None
                self._socket = sock
                if sock is None:
                    self._thread = None
                    return
            self._serve(sock)

    def _serve(self, sock: socket.socket) -> None:
        try:
            if sock.family != socket.AF_UNIX:
                keep_alive(sock)
            sock.sendall(wire.pack_frame(wire.Streaming(list(self._expected.items()), time.perf_counter())))
            reader = FrameReader(sock)
            while True:
                head = frames.unpack(reader.exactly(frames.HEAD_BYTES))
                self._receive(sock, reader, head)
        except OSError as error:
            log.debug("%s: %s", self.name, error)  # whoever sends knows whether there is more to come
        except Exception as error:  # a defect of ours: the graph cannot go on
            if not self._closed:
                log.exception("%s", self.name)
                self._alarmed(f"{self.name}: {m.shown(error)}")
        finally:
            with self._lock:  # not while `close` may use its number
                self._socket = None
                sock.close()

    def _receive(self, sock: socket.socket, reader: FrameReader, head: Head) -> None:
        if head.buffers > m.MAX_BUFFERS or head.kind not in m.KINDS:
            raise ProtocolError(
                f"a frame of kind {head.kind} with {head.buffers} buffers; at most {m.MAX_BUFFERS} are allowed"
            )
        sizes = frames.sizes_of(reader.exactly(8 * head.buffers), head.buffers) if head.buffers else ()
        expected = self._expected.get(head.channel, 0)
        if head.sequence < expected:  # sent again, and here already
            _skip(reader, sum(sizes) + head.body)
            self._confirm(sock, head)
            return
        if head.channel == self._alarm:
            self._receive_told(reader, head)
            return
        if head.sequence > expected:
            raise ProtocolError(f"message {head.sequence} of channel {head.channel} in the place of {expected}")
        arrival = self._arrivals.get(head.channel)
        if arrival is None:
            raise ProtocolError(f"a message of channel {head.channel}, which does not arrive here")
        flags = head.flags & WAKE
        if not sizes and head.body < LEND_FROM_BYTES:  # fits into a slot
            message = Message(head.kind, reader.exactly(head.body))
            self._expected[head.channel] = head.sequence + 1
            self._hand_over(arrival, head.sequence, message, flags)
        else:
            self._receive_large(sock, reader, head, sizes, arrival, flags)

    def _receive_told(self, reader: FrameReader, head: Head) -> None:
        if head.body > MAX_TOLD_BYTES:
            raise ProtocolError(f"an alarm of {head.body} bytes; at most {MAX_TOLD_BYTES} are allowed")
        data = reader.exactly(head.body)
        self._expected[head.channel] = head.sequence + 1
        if head.kind == m.ERROR:
            self._failed(data)
        else:
            self._alarmed(data.decode(errors="replace"))

    def _receive_large(
        self, sock: socket.socket, reader: FrameReader, head: Head, sizes: tuple[int, ...], arrival: Arrival, flags: int
    ) -> None:
        try:
            reserved = arrival.ring.reserve(head.body, sizes)
        except GraphError as error:  # too large, or no memory in time: that is what the readers get
            _skip(reader, sum(sizes) + head.body)
            self._arrived(sock, head)
            self._hand_over(arrival, head.sequence, m.encode_error(error), flags)
            return
        if reserved is None:
            parts: list[Any] = [bytearray(nbytes) for nbytes in (*sizes, head.body)]
        elif len(reserved.parts) > len(sizes):
            parts = reserved.parts
        else:
            parts = [*reserved.parts, bytearray(head.body)]
        try:
            for part in parts:
                reader.fill(memoryview(part))
        except BaseException:
            if reserved is not None:
                arrival.ring.cancel(reserved)
            raise
        self._arrived(sock, head)
        message = Message(head.kind, memoryview(parts[-1]), parts[:-1])
        if reserved is None:
            self._hand_over(arrival, head.sequence, message, flags)
            return
        # On to others first: the one reader of a ring may write to what it gets, and then it must have left already.
        if arrival.onward is not None:
            arrival.onward.forward(head.sequence, message, flags)
        body = b"" if len(reserved.parts) > len(sizes) else bytes(parts[-1])
        arrival.ring.write_reserved(head.sequence, head.kind, body, reserved, flags)

    def _hand_over(self, arrival: Arrival, sequence: int, message: Message, flags: int) -> None:
        arrival.ring.write(sequence, message, flags)
        if arrival.onward is not None:
            arrival.onward.forward(sequence, message, flags)

    def _arrived(self, sock: socket.socket, head: Head) -> None:
        """It is all here: it will not be asked for again, and its sender may use its memory."""
        self._expected[head.channel] = head.sequence + 1
        self._confirm(sock, head)

    def _confirm(self, sock: socket.socket, head: Head) -> None:
        if head.flags & frames.RECEIPT:
            with contextlib.suppress(OSError):  # the connection broke: the sender asks when it is back
                sock.sendall(frames.pack_receipt(head.channel, head.sequence))


def _skip(reader: FrameReader, nbytes: int) -> None:
    scrap = memoryview(bytearray(min(nbytes, 1 << 16)))
    while nbytes:
        piece = scrap[: min(nbytes, len(scrap))]
        reader.fill(piece)
        nbytes -= len(piece)


def _shut(sock: socket.socket | None) -> None:
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

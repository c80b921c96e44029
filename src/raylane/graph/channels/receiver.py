"""Receiving end of links: one thread for each peer and level of one graph.

    peer's link  --socket-->  Receiver thread  --ring of this host-->  readers on this host
                                    |
                                    +--onward links-->  relays of further hosts

A frame's bytes are received where they will stay: small ones on their way into a slot of this host's ring, large ones
straight into a leased segment, from which the readers use them without a copy. Then the receiver forwards the message
to the relays that this process serves.

A receiver outlives its connections: when the peer connects again, the receiver answers which message of each channel it
expects next. Created by `peer_network`.
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
from raylane.graph.channels import frames
from raylane.graph.channels.frames import FrameHeader, FrameReader
from raylane.graph.channels.peer_link import FanOutWriter, enable_keepalive
from raylane.graph.channels.ring import LEND_FROM_BYTES, WAKE, RingWriter
from raylane.graph.values import message as messages
from raylane.graph.values.message import Message
from raylane.transport.link import wire

log = logging.getLogger("raylane.graph")

JOIN_S = 2.0
MAX_REPORT_BYTES = (1 << 17) - 1
"""Size limit of one alarm or failure report.

It lies below `frames.JOIN_BELOW_BYTES`, so that the sender does not wait for a receipt.
"""


@dataclass
class InboundChannel:
    """Destinations of one channel whose messages arrive over a link."""

    ring: RingWriter
    onward: FanOutWriter | None = None


class Receiver:
    """Reader of all connections, one after the other, from one member at one level."""

    def __init__(
        self,
        name: str,
        channels: dict[int, InboundChannel],
        alarm_channel: int,
        on_alarm: Callable[[str], None],
        on_failure: Callable[[bytes], None],
    ) -> None:
        """Create a receiver without a connection.

        Messages of `alarm_channel` go to `on_alarm` as text or, those of kind ERROR, to `on_failure` as bytes.
        """
        self.name = name
        self._channels = channels
        self._alarm_channel = alarm_channel
        self._on_alarm = on_alarm
        self._on_failure = on_failure
        self._lock = threading.RLock()  # guards _socket, _next and _thread; reentrant, because a finalizer may `close`
        self._socket: socket.socket | None = None
        self._next: socket.socket | None = None
        """Connection to serve after the present one. A newer connection replaces it: a peer has one at a time."""
        self._thread: threading.Thread | None = None
        self._closed = False
        self._expected: dict[int, int] = {}
        """Number of the next message in each channel. Belongs to the thread."""

    def serve(self, sock: socket.socket) -> None:
        """Serve this connection from now on, in place of the one before. Does not wait."""
        with self._lock:
            if self._closed:
                sock.close()
                return
            skipped, self._next = self._next, sock
            if skipped is not None:
                skipped.close()
            _shut_down(self._socket)  # the thread may be waiting for memory, at most for the graph's timeout
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="raylane-receiver", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the connection. Does not wait for the thread, which ends by itself."""
        with self._lock:
            self._closed = True
            sock = self._socket
            skipped, self._next = self._next, None
            if skipped is not None:
                skipped.close()
        _shut_down(sock)

    def join(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for the thread to end."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def cut(self) -> None:
        """Break the connection, as a network failure does. The peer reconnects. For tests of failures."""
        _shut_down(self._socket)

    def _run(self) -> None:
        while True:
            with self._lock:
                sock, self._next = self._next, None
                self._socket = sock
                if sock is None:
                    self._thread = None
                    return
            self._read_connection(sock)

    def _read_connection(self, sock: socket.socket) -> None:
        try:
            if sock.family != socket.AF_UNIX:
                enable_keepalive(sock)
            # The sender waits for this answer before its first frame, so no frame can arrive before it.
            sock.sendall(wire.pack_frame(wire.Streaming(list(self._expected.items()), time.perf_counter())))
            reader = FrameReader(sock)
            while True:
                header = frames.unpack_header(reader.exactly(frames.HEADER_BYTES))
                self._receive(sock, reader, header)
        except OSError as error:
            log.debug("%s: %s", self.name, error)  # only the sender knows if there is more to come
        except Exception as error:  # a defect of raylane: the graph cannot continue
            if not self._closed:
                log.exception("%s", self.name)
                self._on_alarm(f"{self.name}: {messages.error_text(error)}")
        finally:
            with self._lock:  # `close` must not shut down another file that has got the same descriptor number
                self._socket = None
                sock.close()

    def _receive(self, sock: socket.socket, reader: FrameReader, header: FrameHeader) -> None:
        if header.buffers > messages.MAX_BUFFERS or header.kind not in messages.KINDS:
            raise ProtocolError(
                f"a frame of kind {header.kind} with {header.buffers} buffers; at most {messages.MAX_BUFFERS} are "
                "allowed"
            )
        sizes = frames.unpack_sizes(reader.exactly(8 * header.buffers), header.buffers) if header.buffers else ()
        expected = self._expected.get(header.channel, 0)
        if header.sequence < expected:  # sent again after a reconnection, and received before
            _skip(reader, sum(sizes) + header.body)
            self._confirm(sock, header)
            return
        if header.channel == self._alarm_channel:  # its messages may have gaps: the oldest are not sent again
            if header.body > MAX_REPORT_BYTES:
                raise ProtocolError(f"an alarm of {header.body} bytes; at most {MAX_REPORT_BYTES} are allowed")
            data = reader.exactly(header.body)
            self._expected[header.channel] = header.sequence + 1
            if header.kind == messages.ERROR:
                self._on_failure(data)
            else:
                self._on_alarm(data.decode(errors="replace"))
            return
        if header.sequence > expected:
            raise ProtocolError(f"message {header.sequence} of channel {header.channel} in the place of {expected}")
        channel = self._channels.get(header.channel)
        if channel is None:
            raise ProtocolError(f"a message of channel {header.channel}, which this process does not receive")
        flags = header.flags & WAKE
        if not sizes and header.body < LEND_FROM_BYTES:  # fits into a slot
            message = Message(header.kind, reader.exactly(header.body))
            # Counted once all bytes are here: a connection that breaks earlier gets the frame again.
            self._expected[header.channel] = header.sequence + 1
            _deliver(channel, header.sequence, message, flags)
        else:
            self._receive_large(sock, reader, header, sizes, channel, flags)

    def _receive_large(
        self,
        sock: socket.socket,
        reader: FrameReader,
        header: FrameHeader,
        sizes: tuple[int, ...],
        channel: InboundChannel,
        flags: int,
    ) -> None:
        try:
            reservation = channel.ring.reserve(header.body, sizes)
        except GraphError as error:  # too large, or no memory in time: the readers get that error instead
            _skip(reader, sum(sizes) + header.body)
            self._mark_received(sock, header)
            _deliver(channel, header.sequence, messages.encode_error(error), flags)
            return
        if reservation is None:
            parts: list[Any] = [bytearray(nbytes) for nbytes in (*sizes, header.body)]
        elif len(reservation.parts) > len(sizes):
            parts = reservation.parts
        else:
            parts = [*reservation.parts, bytearray(header.body)]
        try:
            for part in parts:
                reader.fill(memoryview(part))
        except BaseException:  # the connection broke in the middle: the memory must not stay leased
            if reservation is not None:
                channel.ring.cancel(reservation)
            raise
        self._mark_received(sock, header)
        message = Message(header.kind, memoryview(parts[-1]), parts[:-1])
        if reservation is None:
            _deliver(channel, header.sequence, message, flags)
            return
        # Forward before writing the ring: a single reader of the ring may change the memory as soon as it has the
        # message, and by then the message must have been sent to the other hosts.
        if channel.onward is not None:
            channel.onward.forward(header.sequence, message, flags)
        body = b"" if len(reservation.parts) > len(sizes) else bytes(parts[-1])
        channel.ring.write_reserved(header.sequence, header.kind, body, reservation, flags)

    def _mark_received(self, sock: socket.socket, header: FrameHeader) -> None:
        """Note that a message is complete: it must not be sent again, and the sender may reuse its memory."""
        self._expected[header.channel] = header.sequence + 1
        self._confirm(sock, header)

    def _confirm(self, sock: socket.socket, header: FrameHeader) -> None:
        if header.flags & frames.RECEIPT:
            with contextlib.suppress(OSError):  # connection broken: the answer to the next one says the same
                sock.sendall(frames.pack_receipt(header.channel, header.sequence))


def _deliver(channel: InboundChannel, sequence: int, message: Message, flags: int) -> None:
    """Write a message to the readers of this host, then forward it. The message has memory of its own."""
    channel.ring.write(sequence, message, flags)
    if channel.onward is not None:
        channel.onward.forward(sequence, message, flags)


def _skip(reader: FrameReader, nbytes: int) -> None:
    scratch = memoryview(bytearray(min(nbytes, 1 << 16)))
    while nbytes:
        piece = scratch[: min(nbytes, len(scratch))]
        reader.fill(piece)
        nbytes -= len(piece)


def _shut_down(sock: socket.socket | None) -> None:
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

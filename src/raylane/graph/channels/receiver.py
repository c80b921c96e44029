"""Receiving end of links: one thread for each peer and level of one graph.

    peer's link  --socket-->  Receiver thread  --ring of this host-->  readers on this host
                                    |
                                    +--onward links-->  relays of further hosts

A frame's bytes are received where they will stay: small ones on their way into a slot of this host's ring, large ones
straight into a leased segment, from which the readers use them without a copy. Then the receiver forwards the message
to the relays that this process serves.

Created by `peer_network`.
"""

from __future__ import annotations

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
from raylane.graph.channels.peer_link import FanOutWriter, configure, shut_down
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
    """Reader of the connection from one member at one level."""

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        channels: dict[int, InboundChannel],
        alarm_channel: int,
        on_alarm: Callable[[str], None],
        on_failure: Callable[[bytes], None],
        on_end: Callable[[str], None] = lambda why: None,
        timeout_s: float | None = None,
    ) -> None:
        """Start to read a connection, whose peer may be silent for `timeout_s` and a margin.

        Messages of `alarm_channel` go to `on_alarm` as text or, those of kind ERROR, to `on_failure` as bytes. `on_end`
        (reason) is called when the connection has broken. All are called on the thread of this receiver.
        """
        self.name = name
        self._channels = channels
        self._alarm_channel = alarm_channel
        self._on_alarm = on_alarm
        self._on_failure = on_failure
        self._on_end = on_end
        self._timeout_s = timeout_s
        self._lock = threading.RLock()  # guards _socket; reentrant, because a finalizer may `close`
        self._socket: socket.socket | None = sock
        """None once this receiver is closed, or the connection has ended."""
        self._thread = threading.Thread(target=self._run, args=(sock,), name="raylane-receiver", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the connection. Does not wait for the thread, which ends by itself."""
        with self._lock:
            shut_down(self._socket)
            self._socket = None

    def join(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for the thread to end."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self, sock: socket.socket) -> None:
        try:
            configure(sock, self._timeout_s, sender=False)
            # The sender waits for this answer before its first frame, so no frame can arrive before it.
            sock.sendall(wire.pack_frame(wire.Streaming(time.perf_counter())))
            reader = FrameReader(sock)
            while True:
                header = frames.unpack_header(reader.exactly(frames.HEADER_BYTES))
                self._receive(sock, reader, header)
        except OSError as error:
            if self._socket is not None:
                self._on_end(str(error))
        except Exception as error:  # a defect of raylane: the graph cannot continue
            if self._socket is not None:
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
        if header.channel == self._alarm_channel:
            if header.body > MAX_REPORT_BYTES:
                raise ProtocolError(f"an alarm of {header.body} bytes; at most {MAX_REPORT_BYTES} are allowed")
            data = reader.exactly(header.body)
            if header.kind == messages.ERROR:
                self._on_failure(data)
            else:
                self._on_alarm(data.decode(errors="replace"))
            return
        channel = self._channels.get(header.channel)
        if channel is None:
            raise ProtocolError(f"a message of channel {header.channel}, which this process does not receive")
        flags = header.flags & WAKE
        if not sizes and header.body < LEND_FROM_BYTES:  # fits into a slot
            _deliver(channel, header.sequence, Message(header.kind, reader.exactly(header.body)), flags)
        else:
            _receive_large(sock, reader, header, sizes, channel, flags)


def _receive_large(
    sock: socket.socket,
    reader: FrameReader,
    header: FrameHeader,
    sizes: tuple[int, ...],
    channel: InboundChannel,
    flags: int,
) -> None:
    receipt = frames.RECEIPT_BYTE if header.flags & frames.RECEIPT else b""
    try:
        reservation = channel.ring.reserve(header.body, sizes)
    except GraphError as error:  # too large, or no memory in time: the readers get that error instead
        scratch = memoryview(bytearray(1 << 16))
        skipped_bytes = sum(sizes) + header.body
        for start in range(0, skipped_bytes, len(scratch)):
            reader.fill(scratch[: skipped_bytes - start])
        sock.sendall(receipt)
        _deliver(channel, header.sequence, messages.encode_error(error), flags)
        return
    if reservation is None:
        parts: list[Any] = [bytearray(nbytes) for nbytes in (*sizes, header.body)]
    elif len(reservation.parts) > len(sizes):
        parts = reservation.parts
    else:
        parts = [*reservation.parts, bytearray(header.body)]
    for part in parts:
        reader.fill(memoryview(part))
    sock.sendall(receipt)  # from now on the sender may reuse the memory of the message
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


def _deliver(channel: InboundChannel, sequence: int, message: Message, flags: int) -> None:
    """Write a message to the readers of this host, then forward it. The message has memory of its own."""
    channel.ring.write(sequence, message, flags)
    if channel.onward is not None:
        channel.onward.forward(sequence, message, flags)

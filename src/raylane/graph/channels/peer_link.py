"""Sending end of a link: one connection to a process of another host, for many channels of one graph.

Messages are delivered once and in order, also when the connection breaks:

    sender                                              receiver
    number each message within its channel
    keep the last frames of each channel        --->    read frames
    connection breaks, is opened again          <---    number of the next message expected in each channel
    send again from that number on              --->    drop frames that have arrived before

As many frames are kept as executions may be in flight. Small frames are kept as a copy. Large frames (from
`frames.JOIN_BELOW_BYTES` on) are sent from the memory of the value itself, which its owner may change as soon as
`write` returns: so `wait_until_received` waits for the receiver's receipt, and nothing of the frame is kept.

The peer is gone when no process listens at its address (connection refused), or when its listener does not know the
graph. The link then notifies `LinkEvents` and drops further messages. Used by `peer_network`, from any thread: the
graph loop, the driver's threads, receivers, the process watcher.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import socket
import struct
import threading
import time
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from raylane.core.deadline import Deadline
from raylane.core.watcher import Watch, watcher
from raylane.errors import ProtocolError, TransportError
from raylane.graph.channels import frames
from raylane.graph.channels.layout import GraphLayout
from raylane.graph.channels.ring import RingWriter
from raylane.graph.lifecycle import LINK_TRANSITIONS, Lifecycle, LinkEvent, LinkState
from raylane.graph.values.message import Message
from raylane.transport.link import wire
from raylane.transport.link.connection import Address, Link
from raylane.transport.link.tls import TlsSocket

log = logging.getLogger("raylane.graph")

ATTEMPT_S, SHORTEST_ATTEMPT_S = 5.0, 0.1
"""Seconds for one attempt to connect and authenticate; the shorter limit holds at the end of the deadline."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.5
"""Seconds between two attempts to connect; each pause is twice as long as the one before."""
KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_COUNT = 2, 1, 3
"""TCP keep-alive settings: an idle connection to a machine that is gone breaks after about 5 s."""
RECEIVER_MARGIN_S = 5.0
"""Seconds that a sender waits beyond the graph's timeout.

The receiver itself stops waiting for memory after the timeout and says so; the sender must still be there to read that.
"""


class PeerRefused(Exception):
    """The peer process has ended, or has left the graph."""


class LinkEvents(Protocol):
    """Events of a link, for its owner. Called on any thread."""

    lifecycle: Lifecycle

    def peer_gone(self, member: int) -> None:
        """Handle that the process of `member` has ended or has left the graph."""

    def peer_unreachable(self, member: int, why: str) -> None:
        """Handle that `member` could not be reached until the deadline."""


@dataclass(slots=True)
class _RetainedFrame:
    """Frame that may have to be sent again. `pieces` is empty once the peer has confirmed a large frame."""

    sequence: int
    pieces: list[memoryview]


class PeerLink:
    """Sending end of a link.

    One lock is held while bytes are sent. Links whose senders could wait for each other differ in level (see
    `plan.routing`), so holding the lock cannot deadlock.
    """

    def __init__(
        self, layout: GraphLayout, member: int, level: int, address: Address, secret: bytes, events: LinkEvents
    ) -> None:
        """Create the link to `member`, which is not connected yet. `secret` is that of the cluster."""
        self._layout = layout
        self._member = member
        self._level = level
        self._address = address
        self._secret = secret
        self._name = layout.names[member]
        self._timeout_s = layout.timeout_s
        self.clock_offset_s = 0.0
        """time.perf_counter() of the peer minus that of this process; accurate to half a round trip."""
        self.reconnections = 0
        self._events = events
        self._lock = threading.RLock()  # guards everything below
        self._socket: socket.socket | None = None
        """Connection while the state is CONNECTED, else None."""
        self._watch: Watch | None = None
        self._state = LinkState.BROKEN
        self._retained: dict[int, collections.deque[_RetainedFrame]] = {}
        self._confirmed: dict[int, int] = {}
        """Last message of each channel that the peer has confirmed."""

    def open(self, deadline: Deadline) -> None:
        """Connect for the first time. TransportError if that fails, PeerRefused if the peer has gone."""
        with self._lock:
            self._connect(deadline)

    def send(self, channel: int, sequence: int, message: Message, flags: int, keep: int) -> bool:
        """Send one message and retain the last `keep` frames of its channel.

        Return True if `wait_until_received` must be called before the message's memory may change. Waits while the
        connection is broken; if it cannot be opened again, drops the message.
        """
        pieces, lent = frames.pack_message(channel, sequence, message, flags)
        with self._lock:
            if self._state is LinkState.ABANDONED:
                return False
            retained = self._retained.get(channel)
            if retained is None:
                # A receiver can lack at most the messages of the executions in flight: older frames drop out.
                retained = self._retained[channel] = collections.deque(maxlen=keep)
            retained.append(_RetainedFrame(sequence, pieces))  # before sending: a reconnection sends it again
            sock = self._socket
            if sock is None:
                self._reconnect("it was closed")
                return lent
            try:
                frames.send_all(sock, pieces)
            except OSError as error:
                self._reconnect(str(error))
            except BaseException:  # Ctrl-C in the middle of a frame: the peer cannot read the rest of this connection
                self._disconnect()
                raise
            return lent

    def wait_until_received(self, channel: int, sequence: int) -> None:
        """Wait until the peer has received a message completely, or the link is abandoned."""
        with self._lock:
            while self._confirmed.get(channel, -1) < sequence and self._state is not LinkState.ABANDONED:
                if self._socket is None:
                    self._reconnect("it was closed")
                    continue
                try:
                    token, number = frames.unpack_receipt(_receive_exactly(self._socket, frames.RECEIPT_BYTES))
                    self._confirmed[token] = max(number, self._confirmed.get(token, -1))
                except OSError as error:
                    self._reconnect(str(error))
                except BaseException:
                    self._disconnect()
                    raise
            for frame in self._retained.get(channel, ()):
                if frame.sequence <= sequence and len(frame.pieces) > 1:
                    frame.pieces = []  # the memory is the value's again

    # Connecting

    def _connect(self, deadline: Deadline) -> None:
        layout, name = self._layout, self._name
        try:
            link = Link(self._address, self._secret, deadline, client=layout.names[layout.member], peer=name)
        except TransportError as error:
            if isinstance(error.__cause__, ConnectionRefusedError):
                raise PeerRefused(f"no process listens at {self._address} any more") from error
            raise
        try:
            began = time.perf_counter()
            link.send(wire.StreamRequest(layout.key, layout.member, self._level))
            answer = link.receive()
            ended = time.perf_counter()
            if isinstance(answer, wire.Refusal):
                raise PeerRefused(answer.reason)
            if not isinstance(answer, wire.Streaming):
                raise ProtocolError(f"{name} answered {type(answer).__name__} to a stream")
            # The peer read its clock somewhere between the two local readings: assume the middle.
            self.clock_offset_s = answer.clock_s - (began + ended) / 2
            sock = link.socket
            _configure(sock, self._timeout_s)
            # Before the socket is published: a frame of another thread must not overtake the ones sent again.
            self._send_again(sock, dict(answer.expected))
        except OSError as error:
            link.close()
            raise ProtocolError(f"{name} broke the connection at once: {error}") from error
        except BaseException:
            link.close()
            raise
        self._socket = sock
        self._advance(LinkEvent.CONNECT)
        if self._state is LinkState.ABANDONED:  # a finalizer has closed this link within this very call
            self._disconnect()
            return
        # A thread that only waits for results sends nothing and would never notice the break.
        self._watch = watcher.watch_connection(sock, lambda: self._on_break(sock))

    def _send_again(self, sock: socket.socket, expected: dict[int, int]) -> None:
        """Send all retained frames that the peer has not received; `expected` maps channel to its next message."""
        for channel, retained in self._retained.items():
            first = expected.get(channel, 0)
            self._confirmed[channel] = max(first - 1, self._confirmed.get(channel, -1))
            for frame in retained:
                if frame.sequence >= first:
                    if not frame.pieces:
                        raise AssertionError(
                            f"{self._name} had confirmed message {frame.sequence} and expects it again"
                        )
                    frames.send_all(sock, frame.pieces)

    def _reconnect(self, why: str) -> None:
        """Try to connect until that works, the peer has gone or the deadline has passed; then abandon the link."""
        self._disconnect()
        lifecycle = self._events.lifecycle
        deadline = Deadline(self._timeout_s)
        pause_s = FIRST_PAUSE_S
        while not lifecycle.disconnecting:
            remaining_s = deadline.left_s()
            if remaining_s is not None and remaining_s <= 0:
                self._abandon()
                self._events.peer_unreachable(self._member, why)
                return
            try:
                self._connect(
                    Deadline(ATTEMPT_S if remaining_s is None else max(SHORTEST_ATTEMPT_S, min(remaining_s, ATTEMPT_S)))
                )
                self.reconnections += 1
                log.info("reconnected to %s: the connection had broken (%s)", self._name, why)
                return
            except PeerRefused:  # no retry: a process that has ended does not come back under this address
                self._abandon()
                self._events.peer_gone(self._member)
                return
            except TransportError as error:
                why = str(error.__cause__ or error)  # as text: the error's traceback would keep this frame alive
            lifecycle.pause(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        self._abandon()

    def _advance(self, event: LinkEvent) -> None:
        self._state = LINK_TRANSITIONS[self._state, event]

    def _abandon(self) -> None:
        self._disconnect()
        self._advance(LinkEvent.ABANDON)
        self._retained.clear()

    def _on_break(self, sock: socket.socket) -> None:
        """Repair a connection that broke while it was idle: frames that it has lost must be sent again.

        Called on the watcher's thread, which must not wait; reconnecting may take seconds, so it gets its own thread.
        """

        def reconnect() -> None:
            with self._lock:
                if self._socket is sock:  # a sender may have noticed the break first
                    self._reconnect("noticed while the connection was idle")

        threading.Thread(target=reconnect, name="raylane-reconnect", daemon=True).start()

    def _disconnect(self) -> None:
        self._advance(LinkEvent.BREAK)
        sock, self._socket = self._socket, None
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.forget()
        if sock is not None:
            # The watcher holds a copy of the descriptor, so `close` alone would not end the connection.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def cut(self) -> None:
        """Break the connection, as a network failure does. The link reconnects. For tests of failures."""
        sock = self._socket
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; bytes that were sent still arrive. Advance the lifecycle first: then this is quick."""
        # A sender may hold the lock while the peer does not read. Shutting the socket down ends its system call.
        if not self._lock.acquire(timeout=0.1):
            self.cut()
            self._lock.acquire()
        try:
            self._abandon()
        finally:
            self._lock.release()


def _configure(sock: socket.socket, timeout_s: float | None) -> None:
    """Make a socket blocking with time limits kept by the kernel.

    A timeout of Python's socket module would cost one poll(2) before every call.
    """
    sock.setblocking(True)
    if timeout_s is not None:
        limit_s = timeout_s + RECEIVER_MARGIN_S
    if isinstance(sock, TlsSocket):  # would call the kernel again and again after each of its time limits
        sock.settimeout(None if timeout_s is None else limit_s)
    elif timeout_s is not None:
        limit = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    if sock.family != socket.AF_UNIX:
        enable_keepalive(sock)
        if timeout_s is not None:
            # This option also ends a connection whose peer does not read, so it must outlast the receiver's deadline.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int((timeout_s + RECEIVER_MARGIN_S) * 1000))


def enable_keepalive(sock: socket.socket) -> None:
    """Let the kernel notice that the peer's machine is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT)


def _receive_exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        got = sock.recv(count - len(data))
        if not got:
            raise ConnectionError("connection closed")
        data += got
    return data


class FanOutWriter:
    """Writer of a channel that has readers on other hosts: the ring of this host, if any, and links to relays.

    The ring is written first: only the ring can refuse a message (PoolFull), and then no link has sent it.
    """

    def __init__(self, ring: RingWriter | None, links: list[PeerLink], channel: int, keep: int) -> None:
        self._ring = ring
        self._links = links
        self._channel = channel
        self._keep = keep
        self._link_bytes = 0

    @property
    def written_bytes(self) -> int:
        """Number of bytes written in total, counted once for all readers."""
        return self._link_bytes if self._ring is None else self._ring.written_bytes

    def write(self, sequence: int, message: Message, flags: int = 0) -> None:
        """Send one message, like `RingWriter.write`. Also waits for broken connections and for large messages."""
        if self._ring is None:
            self._link_bytes += message.nbytes
        else:
            self._ring.write(sequence, message, flags)
        self.forward(sequence, message, flags)

    def leased_bytes(self, message: Message) -> int:
        """Return the bytes that must be leased to send a message. Links send from the message's own memory."""
        return 0 if self._ring is None else self._ring.leased_bytes(message)

    def forward(self, sequence: int, message: Message, flags: int) -> None:
        """Send over the links alone. Every link gets the message before this waits for the first receipt."""
        channel = self._channel
        # All links first: the hosts receive a large message at the same time, not one after the other.
        lent = [link for link in self._links if link.send(channel, sequence, message, flags, self._keep)]
        for link in lent:
            link.wait_until_received(channel, sequence)


Writer: TypeAlias = RingWriter | FanOutWriter
"""Sending end of a channel: the ring's own writer where no message leaves the host."""

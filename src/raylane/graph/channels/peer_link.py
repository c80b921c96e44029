"""Sending end of a link: one connection to a process of another host, for many channels of one graph.

TCP delivers frames once and in order, also across a cut of the network that is shorter than the limit of the
connection, which is the graph's timeout (`configure`). A connection that is reset, or exceeds the limit, is not opened
again: `on_break` of the link is called, and further messages are dropped.

Small frames are sent as a copy. Large frames (from `frames.JOIN_BELOW_BYTES` on) are sent from the memory of the value
itself, which its owner may change as soon as `write` returns: so `wait_until_received` waits for a receipt.

Used by `peer_network`, from any thread: the graph loop, the driver's threads, receivers, the process watcher.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from raylane.core.deadline import Deadline
from raylane.core.process.watcher import Watch, watcher
from raylane.errors import ProtocolError, TransportError
from raylane.graph.channels import frames
from raylane.graph.channels.layout import GraphLayout
from raylane.graph.channels.ring import RingWriter
from raylane.graph.values.message import Message
from raylane.transport.link import wire
from raylane.transport.link.connection import Address, Link
from raylane.transport.link.tls import TlsSocket

CHECK_S, CHECK_PAUSE_S = 2.0, 0.02
"""Seconds in which `peer_ended` asks whether the process at the other end has ended, and pause between two attempts."""
KEEPALIVE_S = 2
"""Seconds between two packets of TCP keep-alive on an idle connection."""
RECEIVER_MARGIN_S = 5.0
"""Seconds that a sender waits beyond the graph's timeout.

The receiver itself stops waiting for memory after the timeout and says so; the sender must still be there to read that.
"""
UNLIMITED_S = 900.0
"""Limit of a connection in seconds if the graph has no timeout; without an option TCP ends it after about as long."""


class PeerRefused(Exception):
    """The peer process has ended, or has left the graph."""


class PeerLink:
    """Sending end of a link.

    One lock is held while bytes are sent. Links whose senders could wait for each other differ in level (see
    `plan.routing`), so holding the lock cannot deadlock.
    """

    def __init__(
        self,
        layout: GraphLayout,
        member: int,
        level: int,
        address: Address,
        secret: bytes,
        on_break: Callable[[PeerLink, str], None],
    ) -> None:
        """Create the link to `member`, which is not connected yet. `secret` is that of the cluster.

        `on_break` (link, reason) is called once, on a thread of its own, when the connection has broken.
        """
        self._layout = layout
        self.member = member
        self._level = level
        self._address = address
        self._secret = secret
        self.clock_offset_s = 0.0
        """time.perf_counter() of the peer minus that of this process; accurate to half a round trip."""
        self._on_break = on_break
        self._lock = threading.RLock()  # guards everything below; reentrant, because a finalizer may `close`
        self._socket: socket.socket | None = None
        """Connection while the link is open, else None."""
        self._watch: Watch | None = None
        self._lent = 0
        """Number of frames sent that share memory with their message."""
        self._receipts = 0
        """Number of receipts read. They come in the order of these frames."""
        self._why = ""
        """Error of the call that has noticed the break, as text: its traceback would keep the message alive."""

    def _authenticate(self, deadline: Deadline) -> Link:
        names = self._layout.names
        client, peer = names[self._layout.member], names[self.member]
        return Link(self._address, self._secret, deadline, client=client, peer=peer)

    def open(self, deadline: Deadline) -> None:
        """Connect. TransportError if that fails, PeerRefused if the peer has gone."""
        layout, name = self._layout, self._layout.names[self.member]
        try:
            link = self._authenticate(deadline)
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
            configure(link.socket, layout.options.timeout_s, sender=True)
            with self._lock:
                self._socket = link.socket
                # A thread that only waits for results sends nothing and would never notice the break.
                self._watch = watcher.watch_connection(link.socket, self._on_end)
        except OSError as error:
            link.close()
            raise ProtocolError(f"{name} broke the connection at once: {error}") from error
        except BaseException:
            link.close()
            raise

    def send(self, channel: int, sequence: int, message: Message, flags: int) -> int:
        """Send one message, or drop it if the connection has broken.

        Return a number to call `wait_until_received` with before the message's memory may change; 0 if it may.
        """
        pieces, lent = frames.pack_message(channel, sequence, message, flags)
        with self._lock:
            if self._socket is None:
                return 0
            try:
                frames.send_all(self._socket, pieces)
            except OSError as error:
                self._why = str(error)
                self.cut()
                return 0
            except BaseException:  # Ctrl-C in the middle of a frame: the peer cannot read the rest of this connection
                self.cut()
                raise
            self._lent += lent
            return self._lent if lent else 0

    def wait_until_received(self, number: int) -> None:
        """Wait until the peer has received a message completely, or the connection has broken."""
        with self._lock:
            while self._receipts < number and self._socket is not None:
                try:
                    receipts = self._socket.recv(number - self._receipts)
                except OSError as error:
                    self._why, receipts = str(error), b""
                if not receipts:
                    self.cut()
                    return
                self._receipts += len(receipts)

    def peer_ended(self) -> bool:
        """Return True if the peer's process has ended: no process listens at its address. Takes at most CHECK_S."""
        deadline = Deadline(CHECK_S)
        while deadline.left_s():
            try:
                self._authenticate(deadline).close()
                return False
            except TransportError as error:
                if isinstance(error.__cause__, ConnectionRefusedError):
                    return True
            # A process that is ending closes its connections a moment before its listener.
            time.sleep(CHECK_PAUSE_S)
        return False

    def _on_end(self) -> None:
        """Handle the end of the connection. Called on the watcher's thread, which must not wait."""
        threading.Thread(target=self._report_break, name="raylane-link-check", daemon=True).start()

    def _report_break(self) -> None:
        with self._lock:
            if self._socket is None:
                return
            code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            self._close()
        self._on_break(self, self._why or (os.strerror(code) if code else "connection closed"))

    def cut(self) -> None:
        """Break the connection, as a network failure does. The watcher notices that."""
        shut_down(self._socket)

    def close(self) -> None:
        """Close the connection; bytes that were sent still arrive. Advance the lifecycle first: then this is quick."""
        # A sender may hold the lock while the peer does not read. Shutting the socket down ends its system call.
        if not self._lock.acquire(timeout=0.1):
            self.cut()
            self._lock.acquire()
        try:
            self._close()
        finally:
            self._lock.release()

    def _close(self) -> None:
        sock, self._socket = self._socket, None
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.forget()
        if sock is not None:
            # The watcher holds a copy of the descriptor, so `close` alone would not end the connection.
            shut_down(sock)
            sock.close()


def shut_down(sock: socket.socket | None) -> None:
    """End a connection, and the system calls of other threads that wait for it. Does nothing for None."""
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def configure(sock: socket.socket, timeout_s: float | None, *, sender: bool) -> None:
    """Make a socket blocking; let the kernel end the connection when the peer is silent for longer than the timeout.

    A sender does not wait longer for a peer that answers but does not read. A timeout of Python's socket module would
    cost one poll(2) before every call.
    """
    sock.setblocking(True)
    limit_s = UNLIMITED_S if timeout_s is None else timeout_s + RECEIVER_MARGIN_S
    if sender and timeout_s is not None:
        if isinstance(sock, TlsSocket):  # would call the kernel again and again after each of its time limits
            sock.settimeout(limit_s)
        else:
            limit = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
        # Limits keep-alive and data that is not acknowledged (tcp(7)). It also ends a connection whose peer does not
        # read, so it must outlast the receiver's deadline.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limit_s * 1000))


class FanOutWriter:
    """Writer of a channel that has readers on other hosts: the ring of this host, if any, and links to relays.

    The ring is written first: only the ring can refuse a message (PoolFull), and then no link has sent it.
    """

    def __init__(self, ring: RingWriter | None, links: list[PeerLink], channel: int) -> None:
        self._ring = ring
        self._links = links
        self._channel = channel
        self._link_bytes = 0

    @property
    def written_bytes(self) -> int:
        """Number of bytes written in total, counted once for all readers."""
        return self._link_bytes if self._ring is None else self._ring.written_bytes

    def write(self, sequence: int, message: Message, flags: int = 0) -> None:
        """Send one message, like `RingWriter.write`. Also waits for receipts of large messages."""
        if self._ring is None:
            self._link_bytes += message.nbytes
        else:
            self._ring.write(sequence, message, flags)
        self.forward(sequence, message, flags)

    def take_back(self) -> None:
        """Take the messages that readers on this host have not read, like `RingWriter.take_back`."""
        if self._ring is not None:
            self._ring.take_back()

    def leased_bytes(self, message: Message) -> int:
        """Return the bytes that must be leased to send a message. Links send from the message's own memory."""
        return 0 if self._ring is None else self._ring.leased_bytes(message)

    def forward(self, sequence: int, message: Message, flags: int) -> None:
        """Send over the links alone. Every link gets the message before this waits for the first receipt."""
        # All links first: the hosts receive a large message at the same time, not one after the other.
        sent = [(link, link.send(self._channel, sequence, message, flags)) for link in self._links]
        for link, number in sent:
            link.wait_until_received(number)


Writer: TypeAlias = RingWriter | FanOutWriter
"""Sending end of a channel: the ring's own writer where no message leaves the host."""

"""The sending end of a hop: one connection to a process of another host, for many channels of one graph.

Ordered and retried: every frame has the number of its message in its channel, and the last frames of each channel are
kept, as many as there may be executions in flight. When the connection breaks, it is opened again until the graph's
deadline; the other end then says which message of each channel it expects next, and everything from there on is sent
again (it drops what it has already). So nothing is lost, doubled or out of order.

What is kept: small frames as a copy. Large ones (JOIN_BELOW_BYTES) are sent from the memory of the value itself, which
its owner may change as soon as `write` has returned: so `settle` waits until the receiver says that it has all of it,
and nothing is kept of it then.

The other process is gone when nobody listens there any more (connection refused), or when its listener does not know
the graph. `Events` is told; this end then drops what is written. Used by `station`, from any thread: the lane's, the
driver's, those of inbound connections, the watcher's.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from raylane.core.deadline import Deadline
from raylane.errors import ProtocolError, TransportError
from raylane.graph.channels import frames
from raylane.graph.channels.ring import RingWriter
from raylane.graph.message import Message
from raylane.graph.watch import Watch, watcher
from raylane.transport import wire
from raylane.transport.link import Address, Link

log = logging.getLogger("raylane.graph")

ATTEMPT_S, SHORTEST_ATTEMPT_S = 5.0, 0.1
"""For one attempt to connect and shake hands; the shortest is that at the end of the deadline."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.5
KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_COUNT = 2, 1, 3
"""An idle connection to a machine that is gone breaks after about 5 s."""
BESIDE_S = 5.0
"""The receiver stops waiting for memory after the graph's timeout, and says so: the sender waits this much longer."""


class Refused(Exception):
    """The process at the other end is gone, or has left the graph."""


class Events(Protocol):
    """What a hop tells its station."""

    closing: threading.Event

    def gone(self, member: int) -> None:
        """That member's process has ended, or has left the graph."""

    def lost(self, member: int, why: str) -> None:
        """That member could not be reached until the deadline."""


@dataclass(frozen=True)
class Target:
    """To whom, and how to introduce oneself there."""

    member: int
    level: int
    who: str
    """The other end, for messages."""
    address: Address
    key: bytes
    secret: bytes = field(repr=False)
    own_member: int
    own_who: str


@dataclass(slots=True)
class _Kept:
    sequence: int
    pieces: list[memoryview]


class Hop:
    """See above. One lock, held while bytes are sent: connections that could wait for each other differ in level (see
    `routing`)."""

    def __init__(self, target: Target, timeout_s: float | None, events: Events) -> None:
        self.target = target
        self.clock_offset_s = 0.0
        """time.perf_counter() there less that here, as of the last connection; right within half a round trip."""
        self.reconnections = 0
        self._timeout_s = timeout_s
        self._events = events
        self._lock = threading.RLock()  # guards everything below
        self._socket: socket.socket | None = None
        self._watch: Watch | None = None
        self._given_up = False
        self._kept: dict[int, collections.deque[_Kept]] = {}
        self._received: dict[int, int] = {}
        """By channel the last message that the other end has said it has."""

    def open(self, deadline: Deadline) -> None:
        """Connect for the first time. TransportError, Refused."""
        with self._lock:
            self._connect(deadline)

    def send(self, channel: int, sequence: int, message: Message, flags: int, keep: int) -> bool:
        """Send one message, keeping the last `keep` of its channel. True if `settle` must be called before the
        message's memory may change. Waits while the connection is broken; then drops the message if it stays so."""
        pieces, lent = frames.pack(channel, sequence, message, flags)
        with self._lock:
            if self._given_up:
                return False
            kept = self._kept.get(channel)
            if kept is None:
                kept = self._kept[channel] = collections.deque(maxlen=keep)
            kept.append(_Kept(sequence, pieces))
            sock = self._socket
            if sock is None:
                self._reconnect("it was closed")
                return lent
            try:
                frames.send_all(sock, pieces)
            except OSError as error:
                self._reconnect(str(error))
            except BaseException:  # Ctrl-C: what has been sent of the frame is of no use
                self._drop()
                raise
            return lent

    def settle(self, channel: int, sequence: int) -> None:
        """Wait until the other end has that message, or is given up."""
        with self._lock:
            while self._received.get(channel, -1) < sequence and not self._given_up:
                if self._socket is None:
                    self._reconnect("it was closed")
                    continue
                try:
                    found, number = frames.unpack_receipt(_exactly(self._socket, frames.RECEIPT_BYTES))
                    self._received[found] = max(number, self._received.get(found, -1))
                except OSError as error:
                    self._reconnect(str(error))
                except BaseException:
                    self._drop()
                    raise
            for kept in self._kept.get(channel, ()):
                if kept.sequence <= sequence and len(kept.pieces) > 1:
                    kept.pieces = []

    # Connecting

    def _connect(self, deadline: Deadline) -> None:
        target = self.target
        try:
            link = Link(target.address, target.secret, deadline, client=target.own_who, peer=target.who)
        except TransportError as error:
            if isinstance(error.__cause__, ConnectionRefusedError):
                raise Refused(f"nobody listens at {target.address} any more") from error
            raise
        try:
            began = time.perf_counter()
            link.send(wire.Stream(target.key, target.own_member, target.level))
            answer = link.receive()
            ended = time.perf_counter()
            if isinstance(answer, wire.Refusal):
                raise Refused(answer.reason)
            if not isinstance(answer, wire.Streaming):
                raise ProtocolError(f"{target.who} answered {type(answer).__name__} to a stream")
            self.clock_offset_s = answer.clock_s - (began + ended) / 2
            sock = link.socket
            _configure(sock, self._timeout_s)
            self._resend(sock, dict(answer.expected))
        except OSError as error:
            link.close()
            raise ProtocolError(f"{target.who} broke the connection at once: {error}") from error
        except BaseException:
            link.close()
            raise
        self._socket = sock
        self._watch = watcher.watch_connection(sock, lambda: self._broken(sock))

    def _resend(self, sock: socket.socket, expected: dict[int, int]) -> None:
        for channel, kept in self._kept.items():
            first = expected.get(channel, 0)
            self._received[channel] = max(first - 1, self._received.get(channel, -1))
            for frame in kept:
                if frame.sequence >= first:
                    if not frame.pieces:
                        raise AssertionError(f"{self.target.who} had message {frame.sequence} and asks for it again")
                    frames.send_all(sock, frame.pieces)

    def _reconnect(self, why: str) -> None:
        """Until it works, the other end is gone, or the deadline has passed: then this end has given up."""
        self._drop()
        deadline = Deadline(self._timeout_s)
        pause_s = FIRST_PAUSE_S
        while not self._events.closing.is_set():
            left = deadline.left_s()
            if left is not None and left <= 0:
                self._give_up()
                self._events.lost(self.target.member, why)
                return
            try:
                self._connect(Deadline(ATTEMPT_S if left is None else max(SHORTEST_ATTEMPT_S, min(left, ATTEMPT_S))))
                self.reconnections += 1
                log.info("the connection to %s broke (%s) and is open again", self.target.who, why)
                return
            except Refused:
                self._give_up()
                self._events.gone(self.target.member)
                return
            except TransportError as error:
                why = str(error.__cause__ or error)  # not the error itself, whose traceback holds this frame
            self._events.closing.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        self._give_up()

    def _give_up(self) -> None:
        self._given_up = True
        self._kept.clear()

    def _broken(self, sock: socket.socket) -> None:
        """On the watcher's thread, which must not wait: mending has a thread of its own."""
        threading.Thread(target=self._mend, args=(sock,), name="raylane-hop-mend", daemon=True).start()

    def _mend(self, sock: socket.socket) -> None:
        """A connection that nobody writes to has broken: what it lost must be sent again all the same."""
        with self._lock:
            if self._socket is sock and not self._given_up:
                self._reconnect("seen while it was idle")

    def _drop(self) -> None:
        sock, self._socket = self._socket, None
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.forget()
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def cut(self) -> None:
        """Break the connection, as a network does. For tests."""
        sock = self._socket
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """What was sent still arrives. Set `Events.closing` first: then this waits for nobody."""
        if not self._lock.acquire(timeout=0.1):
            self.cut()  # whoever holds the lock is sending, to somebody who does not read
            self._lock.acquire()
        try:
            self._give_up()
            self._drop()
        finally:
            self._lock.release()


def _configure(sock: socket.socket, timeout_s: float | None) -> None:
    """Blocking, with limits kept by the kernel: a timeout of Python's costs a poll before every call."""
    sock.setblocking(True)
    if timeout_s is not None:
        limit_s = timeout_s + BESIDE_S
        limit = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    if sock.family != socket.AF_UNIX:
        keep_alive(sock)
        if timeout_s is not None:
            # Also ends a connection whose other end does not read; so not before the receiver's own deadline.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int((timeout_s + BESIDE_S) * 1000))


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel notice that the machine at the other end is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT)


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        got = sock.recv(count - len(data))
        if not got:
            raise ConnectionError("connection closed")
        data += got
    return data


class FanWriter:
    """Writes a channel's messages into the ring of this host, if it has readers here, and over hops to others.

    The ring comes first: only it can fail (memory that readers keep), and nothing has been sent then."""

    def __init__(self, ring: RingWriter | None, hops: list[Hop], channel: int, keep: int) -> None:
        self._ring = ring
        self._hops = hops
        self._channel = channel
        self._keep = keep
        self._hop_bytes = 0

    @property
    def bytes(self) -> int:
        """Written in all, as counted for a ring."""
        return self._hop_bytes if self._ring is None else self._ring.bytes

    def write(self, sequence: int, message: Message, flags: int = 0) -> None:
        """See `RingWriter.write`. Waits also for connections that are broken, and for large messages to arrive."""
        if self._ring is None:
            self._hop_bytes += message.nbytes
        else:
            self._ring.write(sequence, message, flags)  # may raise NoRoom: then nothing was sent over a hop either
        self.forward(sequence, message, flags)

    def lends(self, message: Message) -> int:
        """See `RingWriter.lends`. What goes over hops is sent from where it lies."""
        return 0 if self._ring is None else self._ring.lends(message)

    def forward(self, sequence: int, message: Message, flags: int) -> None:
        """Over the hops alone. All are given the message before the first is waited for."""
        channel = self._channel
        lent = [hop for hop in self._hops if hop.send(channel, sequence, message, flags, self._keep)]
        for hop in lent:
            hop.settle(channel, sequence)


Writer: TypeAlias = RingWriter | FanWriter
"""What sends along an edge or a line: the ring's own writer where no message leaves the host."""

"""The client's end of a link: connect, authenticate, send requests, receive straight into memory.

Independent of tensors and of Ray. A link is used by one caller at a time, and `LinkPool` lends idle links. Any error
closes the link on which it happened, so that no caller ever continues in the middle of a frame.

Only a refused connection, or a process that is known to be dead, proves that the source is gone. A full backlog, a
connection that ends during the handshake (a listener under attack drops unauthenticated peers) and an unreachable
network prove nothing: connecting is repeated until the deadline.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import itertools
import math
import os
import secrets
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from raylane.core.deadline import Deadline
from raylane.core.process import place
from raylane.core.process.place import Place
from raylane.errors import ProtocolError, SourceLostError, TransferTimeoutError, TransportError
from raylane.transport.link import tls, wire
from raylane.transport.link.wire import Address as Address  # re-exported for graphs
from raylane.transport.value.source import Source

CONNECT_TIMEOUT_S = 5.0
MAX_IDLE_PER_SOURCE = 4
FIRST_PAUSE_S = 0.01
LONGEST_PAUSE_S = 0.25
_SCATTER_BELOW_BYTES = 1 << 16
"""Size below which buffers are received several at a time."""
_MAX_SCATTER = 512
_READER_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of a connection attempt that blame this process, not the source."""


def _connect(address: Address, deadline: Deadline) -> socket.socket:
    # Limit a single attempt, so that `LinkPool._open` can check between attempts whether the source is dead.
    remaining_s = deadline.left_s()
    timeout = CONNECT_TIMEOUT_S if remaining_s is None else min(remaining_s, CONNECT_TIMEOUT_S)
    if timeout <= 0:
        raise TimeoutError
    if isinstance(address, tuple):
        sock = socket.create_connection(address, timeout=timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # requests are small and must not wait for more data
        return tls.connect(sock)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Use SO_SNDTIMEO instead of Python's own timeout, which makes the socket non-blocking. A blocking connect waits
        # for room in the listener's backlog (unix(7)); a non-blocking one fails with EAGAIN at once.
        seconds, part = divmod(max(timeout, 1e-3), 1.0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(part * 1e6)))
        try:
            sock.connect("\0" + address)
        except BlockingIOError as error:
            raise TimeoutError(f"the listener's backlog stayed full for {timeout:.3g} s") from error
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 0))
    except BaseException:
        sock.close()
        raise
    return sock


class Connection:
    """One connected socket that carries messages, and raw bytes between them.

    Methods raise SourceLostError, TransferTimeoutError, ProtocolError or TransportError; each message names the peer.
    """

    def __init__(self, sock: socket.socket, deadline: Deadline, *, peer: str) -> None:
        """Take over a socket; `peer` describes the process at its other end."""
        self.socket = sock
        self.deadline = deadline
        self.peer = peer

    @contextlib.contextmanager
    def _translated(self, attempt: str) -> Iterator[None]:
        """Translate operating-system errors into transport errors; the only place where a link does so."""
        try:
            yield
        except TimeoutError as error:
            raise TransferTimeoutError(
                f"could not {attempt} {self.peer} within {self.deadline.timeout_s} s. Raise the timeout (or "
                "RAYLANE_TIMEOUT_S) if the value is that large, or check whether that process hangs"
            ) from error
        except ssl.SSLError as error:
            if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):  # closed, as for every connection
                raise SourceLostError(f"could not {attempt} {self.peer}: connection closed") from error
            raise ProtocolError(f"could not {attempt} {self.peer}: {tls.explain(error)}") from error
        except OSError as error:
            if error.errno in _READER_EXHAUSTED:
                raise TransportError(
                    f"could not {attempt} {self.peer}: {error.strerror}. Free descriptors (ulimit -n) or memory in "
                    "this process"
                ) from error
            raise SourceLostError(f"could not {attempt} {self.peer}: {error}") from error

    def _set_timeout(self) -> None:
        """Give the socket the time that is left. TimeoutError if none is left: a timeout of 0 means non-blocking."""
        remaining_s = self.deadline.left_s()
        if remaining_s is not None and remaining_s <= 0:
            raise TimeoutError
        self.socket.settimeout(remaining_s)

    def send(self, message: wire.Message) -> None:
        """Send one message; wait at most until the deadline."""
        with self._translated("send to"):
            self._set_timeout()
            self.socket.sendall(wire.pack_frame(message))

    def send_bytes(self, data: memoryview) -> None:
        """Send raw bytes, which the other end takes by `receive_into`; wait at most until the deadline."""
        with self._translated("send to"):
            self._set_timeout()
            self.socket.sendall(data)

    def receive(self, limit: int = wire.MAX_FRAME_BYTES) -> wire.Message:
        """Return the next message; wait at most until the deadline. ProtocolError for an invalid or larger frame."""
        try:
            with self._translated("receive from"):
                head = self._exactly(4)
                return wire.unpack_body(self._exactly(wire.frame_length(head, limit)))
        except wire.WireError as error:
            raise ProtocolError(f"{self.peer} sent bytes that are not this protocol: {error}") from error

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        while view.nbytes:
            # The deadline covers the whole transfer, and the socket's timeout each call only: compute it every time.
            self._set_timeout()
            got = self.socket.recv_into(view, min(view.nbytes, 1 << 24))
            if not got:
                raise ConnectionError("connection closed")
            view = view[got:]

    def receive_into(self, buffers: Sequence[Any]) -> None:
        """Fill these buffers, in order, with the raw bytes that follow a Data frame."""
        with self._translated("receive from"):
            rest = collections.deque(memoryview(buffer).cast("B") for buffer in buffers)
            while rest:
                if rest[0].nbytes >= _SCATTER_BELOW_BYTES:
                    self._fill(rest.popleft())
                else:
                    self._fill_some(rest)

    def _fill_some(self, buffers: collections.deque[memoryview]) -> None:
        """Receive once into the first small buffers together; remove what was filled from the queue."""
        self._set_timeout()
        small = itertools.takewhile(lambda view: view.nbytes < _SCATTER_BELOW_BYTES, buffers)
        got = self.socket.recvmsg_into(list(itertools.islice(small, _MAX_SCATTER)))[0]
        if not got:
            raise ConnectionError("connection closed")
        while got:
            head = buffers.popleft()
            if got < head.nbytes:
                buffers.appendleft(head[got:])
            got -= min(got, head.nbytes)

    def interrupt(self) -> None:
        """End the connection, so that a thread that waits on it raises; the thread itself has to close it."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection at once and discard data in transit."""
        with contextlib.suppress(OSError):
            # A linger time of 0 resets the connection, so that a full send buffer does not delay the close.
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            # Forked children hold copies of the descriptor; only a shutdown ends the connection in spite of them.
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class Link(Connection):
    """One authenticated connection to a listener."""

    def __init__(self, address: Address, secret: bytes, deadline: Deadline, *, client: str, peer: str) -> None:
        """Connect and authenticate before the deadline. `client` labels this process, `peer` the listener's process."""
        self.peer = peer
        self.deadline = deadline
        with self._translated("connect to"):
            self.socket = _connect(address, deadline)
        try:
            self._shake_hands(secret, client, address)
        except BaseException:
            self.close()
            raise

    def _shake_hands(self, secret: bytes, client: str, address: Address) -> None:
        """Exchange proofs in the order that `wire` describes. ProtocolError if the peer fails to prove itself."""
        challenge = self.receive(wire.MAX_HANDSHAKE_FRAME_BYTES)
        if not isinstance(challenge, wire.Challenge):
            if isinstance(challenge, wire.Refusal):
                # The peer has proved nothing yet, so its text is untrusted.
                raise ProtocolError(f"{self.peer} refused the link: {_quoted(challenge.reason)}")
            raise ProtocolError(
                f"could not connect to {self.peer}: the peer opened with {type(challenge).__name__} instead of "
                "Challenge"
            )
        if challenge.version != wire.VERSION:
            raise ProtocolError(
                f"could not connect to {self.peer}: the peer speaks version {challenge.version} of the protocol, this "
                f"process version {wire.VERSION}. Install one version of raylane in all environments"
            )
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        proof = wire.make_proof(secret, "client", challenge.nonce, nonce, address)
        # Cut the label: the frame has to stay within the limit of the handshake.
        self.send(wire.Hello(wire.VERSION, nonce, proof, client[:200]))
        answer = self.receive(wire.MAX_HANDSHAKE_FRAME_BYTES)
        if isinstance(answer, wire.Refusal):
            raise ProtocolError(f"{self.peer} refused the link: {_quoted(answer.reason)}")
        expected = wire.make_proof(secret, "listener", challenge.nonce, nonce, address)
        if not (isinstance(answer, wire.Welcome) and wire.proofs_equal(answer.proof, expected)):
            raise ProtocolError(f"{self.peer} could not prove that it belongs to this Ray cluster")


def _quoted(reason: str) -> str:
    """Return text from an unauthenticated peer in a form safe for messages: short, control characters escaped."""
    return repr(reason[:200])


def is_gone(error: BaseException) -> bool:
    """Return True if an error proves that the source no longer exists; any other failure may be temporary.

    The proof is that no process listens at the address, or that the process is known to be dead.
    """
    return isinstance(error, SourceLostError) and (
        isinstance(error.__cause__, ConnectionRefusedError) or bool(error.fields.get("dead"))
    )


TakeStream = Callable[[socket.socket, int, int], None]
"""Function that takes over an authenticated, blocking socket; its other arguments are Stream's `member` and `level`.

It runs on the listener's thread and must not wait.
"""

LinkT = TypeVar("LinkT", bound=Link)


class LinkPool(Generic[LinkT]):
    """Idle links by address, at most MAX_IDLE_PER_SOURCE each. Thread-safe.

    A thread, started with the first idle link, closes idle links whose peer has closed them, and those that nobody has
    used for `idle_s` to twice `idle_s` seconds. `open_link` makes a new link; it takes the arguments of `Link`.
    """

    def __init__(
        self,
        secret: bytes,
        client: str,
        place: Place,
        open_link: Callable[..., LinkT],
        *,
        idle_s: float = math.inf,
    ) -> None:
        self._secret = secret
        self._client = client
        self._place = place
        self._open_link = open_link
        self._lock = threading.Lock()  # guards everything below
        self._idle: dict[Address, collections.deque[LinkT]] = {}
        self._idle_s = idle_s
        self._watched: dict[int, tuple[Address, LinkT]] = {}
        """Idle links by descriptor, as registered with the epoll object."""
        self._since_s: dict[int, float] = {}
        """Time at which each idle link was returned, by descriptor; the oldest first."""
        self._watcher: threading.Thread | None = None
        self._epoll: select.epoll | None = None
        self._wake = -1
        """Eventfd that wakes the thread for `close`."""
        self._closed = False

    @contextlib.contextmanager
    def borrow(self, address: Address, source: Source, deadline: Deadline) -> Iterator[LinkT]:
        """Lend a link to `source` for a `with` block; keep the link afterwards, or close it if the block raised."""
        link = self._take(address) or self._open(address, source, deadline)
        link.deadline = deadline  # an idle link still has the deadline of its last borrower
        try:
            with deadline.interrupts(link.interrupt):
                yield link
        except BaseException:
            link.close()  # it may be in the middle of a frame
            raise
        self._put_back(address, link)

    def _open(self, address: Address, source: Source, deadline: Deadline) -> LinkT:
        """Connect; repeat until the deadline unless the source is known to be gone (SourceLostError)."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return self._open_link(address, self._secret, deadline, client=self._client, peer=str(source))
            except (SourceLostError, TransferTimeoutError, ProtocolError) as error:
                if is_gone(error):
                    raise
                if place.known_dead(source.place, self._place):
                    raise SourceLostError(f"{source} died", source=source.label, dead=True) from error
                remaining_s = deadline.left_s()
                # A peer that fails the handshake would fail it again, unlike one that cannot be reached.
                if isinstance(error, ProtocolError) or remaining_s == 0:
                    raise
                obstacle = error
            if remaining_s is not None and remaining_s <= pause_s:
                raise TransferTimeoutError(
                    f"could not connect to {source} within {deadline.timeout_s} s, although nothing proves that it is "
                    f"gone: {obstacle}. Check the network between the two hosts, or raise the timeout",
                    source=source.label,
                ) from obstacle
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _put_back(self, address: Address, link: LinkT) -> None:
        with self._lock:
            surplus: LinkT | None = link
            # Without descriptors (OSError) or threads (RuntimeError) the link is closed instead of kept.
            with contextlib.suppress(OSError, RuntimeError):
                if not self._closed:
                    epoll = self._epoll or self._start_watching()
                    epoll.register(link.socket.fileno(), select.EPOLLIN | select.EPOLLRDHUP)
                    self._watched[link.socket.fileno()] = address, link
                    self._since_s[link.socket.fileno()] = time.monotonic()
                    idle = self._idle.setdefault(address, collections.deque())
                    idle.append(link)
                    surplus = self._remove(address, idle[0]) if len(idle) > MAX_IDLE_PER_SOURCE else None
        if surplus is not None:
            surplus.close()

    def _start_watching(self) -> select.epoll:
        """Start the thread. Call with the lock held; the pool is unchanged if this raises."""
        epoll = select.epoll()
        wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            epoll.register(wake, select.EPOLLIN)
            watcher = threading.Thread(target=self._watch, args=(epoll,), name="raylane-links", daemon=True)
            watcher.start()
        except BaseException:
            epoll.close()
            os.close(wake)
            raise
        self._wake, self._watcher, self._epoll = wake, watcher, epoll
        return epoll

    def _take(self, address: Address) -> LinkT | None:
        """Return an idle link that is still open, or None."""
        while True:
            with self._lock:
                idle = self._idle.get(address)
                if not idle:
                    return None
                # The most recently used link: its peer is most likely to be alive.
                link = self._remove(address, idle[-1])
            # The thread may not have seen the end of the connection yet, so check once more.
            if _is_open(link.socket):
                return link
            link.close()  # the peer died, or its actor was restarted

    def _remove(self, address: Address, link: LinkT) -> LinkT:
        """Remove a link from the idle ones. Call with the lock held.

        The link is unregistered before it is lent: the thread would take the first answer for the end of the link.
        """
        idle = self._idle[address]
        idle.remove(link)
        if not idle:
            del self._idle[address]
        del self._watched[link.socket.fileno()], self._since_s[link.socket.fileno()]
        if self._epoll is not None:
            self._epoll.unregister(link.socket.fileno())
        return link

    def _watch(self, epoll: select.epoll) -> None:
        """Close idle links: at once those that become readable, because a peer sends nothing unasked, or later."""
        while not self._closed:
            # Not woken when a link is returned, which happens with every read.
            ready = epoll.poll(None if self._idle_s == math.inf else self._idle_s)
            oldest_s = time.monotonic() - self._idle_s
            with self._lock:
                unused = [fd for fd, since_s in self._since_s.items() if since_s <= oldest_s]
                # A link may have been lent between the event and the lock; then it is not in `_watched` any more.
                ended = [
                    self._remove(*self._watched[fd])
                    for fd in dict.fromkeys([*(fd for fd, _ in ready), *unused])
                    if fd in self._watched
                ]
            for link in ended:
                link.close()

    def close(self) -> None:
        """Close the idle links and join the thread; lent links are closed when they are returned."""
        with self._lock:
            self._closed = True
            links = [self._remove(address, link) for address, link in list(self._watched.values())]
            (watcher, epoll), self._watcher = (self._watcher, self._epoll), None
        for link in links:
            link.close()
        if watcher is not None and epoll is not None:
            os.eventfd_write(self._wake, 1)
            watcher.join()
            # Only after the join: the thread waits on both descriptors.
            epoll.close()
            os.close(self._wake)

    def __len__(self) -> int:
        with self._lock:
            return sum(len(idle) for idle in self._idle.values())


def _is_open(sock: socket.socket) -> bool:
    """Return True if an idle connection is open and has nothing to read, not even its end."""
    sock.setblocking(False)
    try:
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False

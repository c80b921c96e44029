"""The client's end of a link: connect, prove, ask, receive straight into memory. Knows nothing of tensors or of Ray.

A link is used by one caller at a time; `LinkPool` lends idle ones. Any error closes the link it happened on: half a
frame is never read twice.

Only a refused connection, or a process known to be dead, means that the source is gone. A full backlog, a connection
that ends during the handshake (a listener under attack drops strangers) and an unreachable network mean nothing yet:
connecting is tried again until the deadline.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from raylane.core import place
from raylane.core.deadline import Deadline
from raylane.core.place import Place
from raylane.errors import ProtocolError, SourceLostError, TransferTimeoutError, TransportError
from raylane.transport import wire
from raylane.transport.source import Source
from raylane.transport.wire import Address as Address  # graphs name it by this module

CONNECT_TIMEOUT_S = 5.0
MAX_IDLE_PER_SOURCE = 4
FIRST_PAUSE_S = 0.01
LONGEST_PAUSE_S = 0.25
_OWN_TROUBLE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def _connect(address: Address, deadline: Deadline) -> socket.socket:
    left = deadline.left_s()
    timeout = CONNECT_TIMEOUT_S if left is None else min(left, CONNECT_TIMEOUT_S)
    if timeout <= 0:
        raise TimeoutError
    if isinstance(address, tuple):
        sock = socket.create_connection(address, timeout=timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # A blocking connect waits for room in the listener's backlog (unix(7)); Python's own timeout would make the
        # socket non-blocking, and a full backlog an EAGAIN at once.
        seconds, part = divmod(max(timeout, 1e-3), 1.0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(part * 1e6)))
        try:
            sock.connect("\0" + address)
        except BlockingIOError as error:
            raise TimeoutError(f"its backlog stayed full for {timeout:.3g} s") from error
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 0))
    except BaseException:
        sock.close()
        raise
    return sock


class Link:
    """One proven connection. Raises SourceLostError, TransferTimeoutError or ProtocolError, all naming `who`."""

    def __init__(self, address: Address, secret: bytes, deadline: Deadline, *, who: str, peer: str) -> None:
        self.peer = peer
        self.deadline = deadline
        with self._translated("connect to"):
            self.socket = _connect(address, deadline)
        try:
            self._shake_hands(secret, who, address)
        except BaseException:
            self.close()
            raise

    def _shake_hands(self, secret: bytes, who: str, address: Address) -> None:
        challenge = self.receive(wire.MAX_STRANGER_FRAME_BYTES)
        if not isinstance(challenge, wire.Challenge):
            if isinstance(challenge, wire.Refusal):
                raise ProtocolError(f"{self.peer} refused the link: {_quoted(challenge.reason)}")
            raise ProtocolError(f"{self.peer} opened with {type(challenge).__name__} instead of a challenge")
        if challenge.version != wire.VERSION:
            raise ProtocolError(
                f"{self.peer} speaks version {challenge.version} of the protocol, this process {wire.VERSION}: "
                "install one version of raylane in all environments"
            )
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        proof = wire.proof(secret, "client", challenge.nonce, nonce, address)
        self.send(wire.Hello(wire.VERSION, nonce, proof, who[:200]))
        answer = self.receive(wire.MAX_STRANGER_FRAME_BYTES)
        if isinstance(answer, wire.Refusal):
            raise ProtocolError(f"{self.peer} refused the link: {_quoted(answer.reason)}")
        expected = wire.proof(secret, "listener", challenge.nonce, nonce, address)
        if not (isinstance(answer, wire.Welcome) and wire.proves(answer.proof, expected)):
            raise ProtocolError(f"{self.peer} could not prove that it belongs to this Ray cluster")

    @contextlib.contextmanager
    def _translated(self, attempt: str) -> Iterator[None]:
        """Foreign errors become ours, once, here."""
        try:
            yield
        except TimeoutError as error:
            raise TransferTimeoutError(
                f"could not {attempt} {self.peer} within {self.deadline.timeout_s} s; "
                "raise the timeout (or RAYLANE_TIMEOUT_S) if the value is that large, or look whether it hangs"
            ) from error
        except OSError as error:
            if error.errno in _OWN_TROUBLE:
                raise TransportError(
                    f"could not {attempt} {self.peer}: {error.strerror}. Free descriptors (ulimit -n) or memory in "
                    "this process"
                ) from error
            raise SourceLostError(f"could not {attempt} {self.peer}: {error}") from error

    def _arm(self) -> None:
        left = self.deadline.left_s()
        if left is not None and left <= 0:
            raise TimeoutError
        self.socket.settimeout(left)

    def send(self, message: wire.Message) -> None:
        with self._translated("send to"):
            self._arm()
            self.socket.sendall(wire.pack(message))

    def receive(self, limit: int = wire.MAX_FRAME_BYTES) -> wire.Message:
        try:
            with self._translated("receive from"):
                head = self._exactly(4)
                return wire.unpack(self._exactly(wire.frame_length(head, limit)))
        except wire.WireError as error:
            raise ProtocolError(f"{self.peer} sent something else than our protocol: {error}") from error

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        while view.nbytes:
            self._arm()
            got = self.socket.recv_into(view, min(view.nbytes, 1 << 24))
            if not got:
                raise ConnectionError("connection closed")
            view = view[got:]

    def receive_into(self, buffers: Sequence[Any]) -> None:
        """Fill these buffers, in order, with the raw bytes that follow a Data frame."""
        with self._translated("receive from"):
            for buffer in buffers:
                self._fill(memoryview(buffer).cast("B"))

    def close(self) -> None:
        # No lingering: what is still under way is of no use to anybody.
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.socket.shutdown(socket.SHUT_RDWR)  # also for the copies of it that forked children hold
        self.socket.close()


def _quoted(reason: str) -> str:
    """Return a stranger's words as they may stand in a message: short, and without control characters."""
    return repr(reason[:200])


def is_gone(error: BaseException) -> bool:
    """Return True if a link failed because its source does not exist any more: nobody listens at its address, or its
    process is known to be dead. Any other failure may pass."""
    return isinstance(error, SourceLostError) and (
        isinstance(error.__cause__, ConnectionRefusedError) or bool(error.fields.get("dead"))
    )


class LinkPool:
    """Idle links by address, at most a few for each. Thread-safe.

    A thread, started with the first idle link, closes those whose other end has gone.
    """

    def __init__(self, secret: bytes, who: str, here: Place) -> None:
        self._secret = secret
        self._who = who
        self._here = here
        self._lock = threading.Lock()  # guards everything below
        self._idle: dict[Address, collections.deque[Link]] = {}
        self._watched: dict[int, tuple[Address, Link]] = {}
        """Idle links by descriptor, as registered with the epoll object."""
        self._watcher: threading.Thread | None = None
        self._epoll: select.epoll | None = None
        self._wake = -1
        self._closed = False

    @contextlib.contextmanager
    def borrow(self, address: Address, source: Source, deadline: Deadline) -> Iterator[Link]:
        """Lend a link to `source` for the block; it is kept for the next one if the block ends well, closed if not."""
        link = self._take(address) or self._open(address, source, deadline)
        link.deadline = deadline
        try:
            yield link
        except BaseException:
            link.close()
            raise
        self._put_back(address, link)

    def _open(self, address: Address, source: Source, deadline: Deadline) -> Link:
        """Connect, again and again until the deadline if the way is blocked. SourceLostError as soon as it is known
        that the source is gone."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return Link(address, self._secret, deadline, who=self._who, peer=str(source))
            except (SourceLostError, TransferTimeoutError, ProtocolError) as error:
                if is_gone(error):
                    raise
                if place.known_dead(source.place, self._here):
                    raise SourceLostError(f"{source} died", source=source.label, dead=True) from error
                left = deadline.left_s()
                if isinstance(error, ProtocolError) or left == 0:
                    raise
                obstacle = error
            if left is not None and left <= pause_s:
                raise TransferTimeoutError(
                    f"{source} could not be reached within {deadline.timeout_s} s, although nothing says that it is "
                    f"gone: {obstacle}. Look at the network between the two, or raise the timeout",
                    source=source.label,
                ) from obstacle
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _put_back(self, address: Address, link: Link) -> None:
        with self._lock:
            surplus: Link | None = link
            # Out of descriptors (OSError) or threads (RuntimeError): the link is closed instead of kept.
            with contextlib.suppress(OSError, RuntimeError):
                if not self._closed:
                    epoll = self._epoll or self._start_watching()
                    epoll.register(link.socket.fileno(), select.EPOLLIN | select.EPOLLRDHUP)
                    self._watched[link.socket.fileno()] = address, link
                    idle = self._idle.setdefault(address, collections.deque())
                    idle.append(link)
                    surplus = self._remove(address, idle[0]) if len(idle) > MAX_IDLE_PER_SOURCE else None
        if surplus is not None:
            surplus.close()

    def _start_watching(self) -> select.epoll:
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

    def _take(self, address: Address) -> Link | None:
        while True:
            with self._lock:
                idle = self._idle.get(address)
                if not idle:
                    return None
                link = self._remove(address, idle[-1])
            if _quiet(link.socket):
                return link
            link.close()  # its other end is gone: a process that died, or a restarted actor

    def _remove(self, address: Address, link: Link) -> Link:
        """Take a link out of the idle ones, under the lock."""
        idle = self._idle[address]
        idle.remove(link)
        if not idle:
            del self._idle[address]
        del self._watched[link.socket.fileno()]
        if self._epoll is not None:
            self._epoll.unregister(link.socket.fileno())
        return link

    def _watch(self, epoll: select.epoll) -> None:
        """Close idle links as soon as anything arrives on them: nothing is expected but their end."""
        while not self._closed:
            ready = epoll.poll()
            with self._lock:
                ended = [self._remove(*self._watched[fd]) for fd, _ in ready if fd in self._watched]
            for link in ended:
                link.close()

    def close(self) -> None:
        """Close the idle links and join the thread; links that are lent are closed when they come back."""
        with self._lock:
            self._closed = True
            links = [self._remove(address, link) for address, link in list(self._watched.values())]
            (watcher, epoll), self._watcher = (self._watcher, self._epoll), None
        for link in links:
            link.close()
        if watcher is not None and epoll is not None:
            os.eventfd_write(self._wake, 1)
            watcher.join()
            epoll.close()
            os.close(self._wake)

    def __len__(self) -> int:
        with self._lock:
            return sum(len(idle) for idle in self._idle.values())


def _quiet(sock: socket.socket) -> bool:
    """Whether an idle connection is still open: nothing to read, not even its end."""
    sock.setblocking(False)
    try:
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False

"""The client's end of a link: connect, prove, ask, receive straight into memory. Knows nothing of tensors or of Ray.

A link is used by one caller at a time; `LinkPool` lends idle ones. Any error closes the link it happened on: half a
frame is never read twice.
"""

from __future__ import annotations

import collections
import contextlib
import secrets
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from raylane.core.deadline import Deadline
from raylane.errors import ProtocolError, SourceLostError, TransferTimeoutError
from raylane.transport import wire
from raylane.transport.source import Source

CONNECT_TIMEOUT_S = 5.0
MAX_IDLE_PER_SOURCE = 4
Address = str | tuple[str, int]
"""An abstract Unix socket's name, or (host, port)."""


def _connect(address: Address, deadline: Deadline) -> socket.socket:
    left = deadline.left_s()
    timeout = CONNECT_TIMEOUT_S if left is None else min(left, CONNECT_TIMEOUT_S)
    if isinstance(address, tuple):
        sock = socket.create_connection(address, timeout=timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        sock.connect("\0" + address)
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
            self._shake_hands(secret, who)
        except BaseException:
            self.close()
            raise

    def _shake_hands(self, secret: bytes, who: str) -> None:
        challenge = self.receive()
        if not isinstance(challenge, wire.Challenge):
            if isinstance(challenge, wire.Refusal):
                raise ProtocolError(f"{self.peer} refused the link: {challenge.reason}")
            raise ProtocolError(f"{self.peer} opened with {type(challenge).__name__} instead of a challenge")
        if challenge.version != wire.VERSION:
            raise ProtocolError(
                f"{self.peer} speaks version {challenge.version} of the protocol, this process {wire.VERSION}: "
                "install one version of raylane in all environments"
            )
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        proof = wire.proof(secret, "client", challenge.nonce)
        self.send(wire.Hello(wire.VERSION, nonce, proof, who))
        answer = self.receive()
        if isinstance(answer, wire.Refusal):
            raise ProtocolError(f"{self.peer} refused the link: {answer.reason}")
        if not (isinstance(answer, wire.Welcome) and wire.proves(secret, "listener", nonce, answer.proof)):
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
        except (ConnectionError, OSError) as error:
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

    def receive(self) -> wire.Message:
        try:
            with self._translated("hear from"):
                head = self._exactly(4)
                return wire.unpack(self._exactly(wire.frame_length(head)))
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
        self.socket.close()


class LinkPool:
    """Idle links by address, at most a few for each. Thread-safe."""

    def __init__(self, secret: bytes, who: str) -> None:
        self._secret = secret
        self._who = who
        self._lock = threading.Lock()  # guards _idle
        self._idle: dict[Address, collections.deque[Link]] = {}

    @contextlib.contextmanager
    def borrow(self, address: Address, source: Source, deadline: Deadline) -> Iterator[Link]:
        """A link to `source` for the block; kept for the next one if the block ends well, closed if it does not."""
        link = self._take(address) or self._open(address, source, deadline)
        link.deadline = deadline
        try:
            yield link
        except BaseException:
            link.close()
            raise
        with self._lock:
            idle = self._idle.setdefault(address, collections.deque())
            idle.append(link)
            surplus = idle.popleft() if len(idle) > MAX_IDLE_PER_SOURCE else None
        if surplus is not None:
            surplus.close()

    def _open(self, address: Address, source: Source, deadline: Deadline) -> Link:
        return Link(address, self._secret, deadline, who=self._who, peer=str(source))

    def _take(self, address: Address) -> Link | None:
        while True:
            with self._lock:
                idle = self._idle.get(address)
                if not idle:
                    self._idle.pop(address, None)
                    return None
                link = idle.pop()
            if _quiet(link.socket):
                return link
            link.close()  # its other end is gone: a process that died, or a restarted actor

    def close(self) -> None:
        with self._lock:
            links = [link for idle in self._idle.values() for link in idle]
            self._idle.clear()
        for link in links:
            link.close()

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

"""One transfer for several readers of a host: the first one, the relay, passes what it received to the others.

Readers meet at an abstract Unix socket whose name is derived from the value and the cluster's secret. The first one
binds the name and fetches the value; later ones connect and wait. The kernel decides who is first, and ends the
connections when the relay dies. The source takes no part, but is asked about its memory by each reader.

    relay     bind, listen -> fetch -> anybody waiting? copy into a shared segment -> send its descriptor -> close
    waiter    connect, send proof -> words about progress ... -> descriptor -> map copy-on-write -> ask the source for
              the state of its memory, as after a read
              end of connection: try to be the relay      refusal, silence (`patience`): read from the source

Connections carry packets (SOCK_SEQPACKET). Both ends check each other's user and a proof made with the secret.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from raylane.core import settings
from raylane.core.deadline import Deadline
from raylane.core.memory.layout import segment_offsets
from raylane.core.memory.shared_pool import map_received
from raylane.core.process.place import Place, uid_of
from raylane.transport.backends.base import FetchResult, Process, ProcessPart
from raylane.transport.backends.tcp.relay_wait import RelayWait
from raylane.transport.link.connection import Link
from raylane.transport.value.ticket import Ticket

WORD_S = 0.1
"""Seconds between two words about progress."""
_PIECE_BYTES = 1 << 20
"""Size after which the relay looks at the clock."""
_MOST_WAITERS = 128
_ROUNDS = 8
"""Number of relays that a reader sees end before it reads from the source."""
_PAUSE_S = 0.002
_PROOF_BYTES = 32
_PROOF_WITHIN_S = 0.1
_PACKET = struct.Struct(f"<{_PROOF_BYTES}sBQ")
"""Proof of the relay, kind of the packet, and the number of bytes that the relay has moved."""
_WORD, _REFUSAL, _COPY = range(3)


class SharedSources(set[Place], ProcessPart):
    """Sources of which other readers of this host have lately read a value at the same time."""


def relays(ticket: Ticket, process: Process) -> bool:
    """Return True if readers of this host share one transfer of a value."""
    there, reader = ticket.origin().place, process.place
    if there.same_host(reader) and there.net_namespace == reader.net_namespace:  # loopback: a second transfer is cheap
        return False
    least = settings.SHARE_FROM_BYTES.read()
    return least is not None and ticket.nbytes >= least and ticket.may_be_shared


class _Name:
    """Name of the socket for one value, and the proofs of both ends."""

    def __init__(self, ticket: Ticket, secret: bytes) -> None:
        there = ticket.origin().place
        what = (there.boot_id, there.pid_namespace, there.pid, there.start_ticks, ticket.nonce, os.geteuid())
        value = repr(what).encode() + ticket.key
        self.address = f"\0raylane-{hmac.digest(secret, b'relay name' + value, hashlib.sha256).hex()[:40]}"
        # The name can be seen by everybody (/proc/net/unix), so it proves nothing.
        self.of_waiter = hmac.digest(secret, b"relay waiter" + value, hashlib.sha256)
        self.of_relay = hmac.digest(secret, b"relay" + value, hashlib.sha256)


def covers(ticket: Ticket, nbytes: int) -> bool:
    """Return True if a read of so many bytes is better served by a copy of the whole value."""
    return nbytes * 4 >= ticket.nbytes * 3


def meet(ticket: Ticket, process: Process, deadline: Deadline) -> list[Any] | HostRelay | None:
    """Return the blocks that another reader of this host has received, or the HostRelay that this reader now is.

    None if this reader shall read from the source for itself alone. The caller must ask the source about the state of
    its memory after this: another reader asked before, perhaps before this one began.
    """
    name = _Name(ticket, process.secret())
    # Without descriptors, or where abstract sockets are not permitted, every reader fetches for itself.
    with contextlib.suppress(OSError):
        for _ in range(_ROUNDS):
            relay = _bind(name, ticket, process)
            if relay is not None:
                return relay
            sock = _connect(name)
            if sock is None:
                time.sleep(_PAUSE_S)  # the relay is between bind and listen, or ends
                continue
            with sock:
                try:
                    blocks = _wait(sock, name, ticket, deadline)
                except ConnectionError:  # the relay died or ended
                    continue
            # It may be this reader's turn to be the relay next time.
            process.part(SharedSources).add(ticket.origin().place)
            process.counts["relayed"] += blocks is not None
            return blocks
    return None


def _bind(name: _Name, ticket: Ticket, process: Process) -> HostRelay | None:
    """Return the relay for a value if there is none yet."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        server.bind(name.address)
        server.listen(_MOST_WAITERS)
        server.setblocking(False)
    except OSError as error:
        server.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return HostRelay(server, name, ticket, process)


def _connect(name: _Name) -> socket.socket | None:
    """Return a connection to the relay of a value, or None if it cannot be had now."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)  # a full backlog is an error instead of a wait
        sock.connect(name.address)
        if uid_of(sock) != os.geteuid():
            raise PermissionError(errno.EACCES, "the name belongs to another user")
        sock.send(name.of_waiter)
    except (ConnectionError, BlockingIOError):
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise
    return sock


def _wait(sock: socket.socket, name: _Name, ticket: Ticket, deadline: Deadline) -> list[Any] | None:
    """Wait for the relay's copy of the blocks. None: read from the source. ConnectionError if the relay has ended."""
    patience = RelayWait(time.monotonic(), deadline.left_s(), ticket.nbytes)
    while left_s := patience.left_s(time.monotonic()):
        sock.settimeout(left_s)
        try:
            data, descriptors, _, _ = socket.recv_fds(sock, _PACKET.size, 1, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            continue
        with contextlib.ExitStack() as unused:
            for fd in descriptors:
                unused.callback(os.close, fd)
            if not data:
                raise ConnectionError("the relay has ended")
            if len(data) != _PACKET.size:
                return None
            proof, kind, number = _PACKET.unpack(data)
            if not hmac.compare_digest(proof, name.of_relay):
                return None
            if kind == _WORD:
                patience.heard(time.monotonic(), number)
                continue
            if kind != _COPY or not descriptors:
                return None
            blocks = map_received(descriptors[0], [block.nbytes for block in ticket.blocks])
            unused.pop_all()
            return blocks
    return None


class HostRelay:
    """The end of the reader that fetches a value for all readers of its host; used in a `with` block.

    A reader that fills tensors of its user (`into=`) receives straight into them. Their content cannot be passed on,
    because the user may write to them at any time. Such a reader receives into pooled memory only where it has met
    others before, so a reader that is alone pays nothing.
    """

    def __init__(self, server: socket.socket, name: _Name, ticket: Ticket, process: Process) -> None:
        self._server = server
        self._name = name
        self._sizes = [block.nbytes for block in ticket.blocks]
        self._process = process
        self._waiters: list[socket.socket] = []
        self._source = ticket.origin().place
        self._refuses = False
        self._next_word = time.monotonic() + WORD_S

    def __enter__(self) -> HostRelay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Nobody is left waiting, whatever happened: those that got no copy are told to read from the source.
        self.accept()
        self._tell(_REFUSAL, 0)
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # a forked child may hold a copy, which would keep the name alive
        self._server.close()
        self._dismiss()

    @property
    def expects_others(self) -> bool:
        """True if several readers of this host have lately read a value of this source at the same time."""
        return self._source in self._process.part(SharedSources)

    def refuse(self) -> None:
        """Send all who wait, now or later, to the source."""
        self._refuses = True

    def receive_into(self, link: Link, blocks: Sequence[Any]) -> None:
        """Fill the blocks from a link, as `Link.receive_into`, and tell the waiters of the progress."""
        done = 0
        for piece in _pieces(blocks):
            link.receive_into(piece)
            done += sum(view.nbytes for view in piece)
            self._report(done)

    def deliver(self, result: FetchResult) -> None:
        """Pass what was received to those who wait, if it is the published content."""
        # A mixture of old and new content, perhaps; the others shall not depend on when this reader began.
        waiting = self.accept()
        if not waiting:
            self._process.part(SharedSources).discard(self._source)
        if not waiting or result.mutated:
            return
        self._process.part(SharedSources).add(self._source)
        with contextlib.suppress(OSError):  # no memory, no descriptor: `__exit__` tells the others
            fd = self._copy(result.blocks)
            if fd is not None:
                try:
                    self.accept()
                    self._process.counts["relays"] += 1
                    self._tell(_COPY, sum(self._sizes), [fd])
                finally:
                    os.close(fd)
                self._dismiss()

    def _copy(self, blocks: Sequence[Any]) -> int | None:
        """Return a descriptor of a copy of the blocks in shared memory; None if the budget has no room for it."""
        offsets, total = segment_offsets(self._sizes)
        store = self._process.store
        segment = store.take_copy(total)
        if segment is None:
            return None
        try:
            target, done = memoryview(segment.memory).cast("B"), sum(self._sizes)
            for start, block in zip(offsets, blocks, strict=True):
                source = memoryview(block).cast("B")
                for at in range(0, source.nbytes, _PIECE_BYTES):
                    part = source[at : at + _PIECE_BYTES]
                    target[start + at : start + at + part.nbytes] = part
                    done += part.nbytes
                    self._report(done)
            segment.release_to_readers()
            return segment.open_locked()
        finally:
            # Idle from now on, but filled again only when the last waiter has closed its descriptor.
            store.shared.give_back(segment)

    def _report(self, done: int) -> None:
        """Tell the waiters how many bytes were moved, from time to time."""
        now = time.monotonic()
        if now >= self._next_word:
            self._next_word = now + WORD_S
            waiting = self.accept()
            self._tell(_REFUSAL if self._refuses else _WORD, done)
            if self._refuses and waiting:
                self._process.part(SharedSources).add(self._source)
                self._dismiss()

    def accept(self) -> int:
        """Accept those who have connected, if they prove that they belong to this cluster. Return how many wait."""
        for _ in range(_MOST_WAITERS):  # limited, because every local user can connect
            try:
                sock, _ = self._server.accept()
            except OSError:
                break
            with contextlib.suppress(OSError):
                sock.settimeout(_PROOF_WITHIN_S)  # sent right after the connection, so it is there already
                if uid_of(sock) == os.geteuid() and hmac.compare_digest(sock.recv(64), self._name.of_waiter):
                    sock.setblocking(False)
                    self._waiters.append(sock)
                    continue
            sock.close()
        return len(self._waiters)

    def _tell(self, kind: int, number: int, descriptors: Sequence[int] = ()) -> None:
        """Send a packet to all waiters; forget those that have ended or do not read."""
        packet = _PACKET.pack(self._name.of_relay, kind, number)
        for sock in list(self._waiters):
            try:
                socket.send_fds(sock, [packet], list(descriptors))
            except OSError:
                self._waiters.remove(sock)
                sock.close()

    def _dismiss(self) -> None:
        while self._waiters:
            self._waiters.pop().close()


def _pieces(blocks: Sequence[Any]) -> Iterator[list[memoryview]]:
    """Cut buffers into groups of about _PIECE_BYTES, in order."""
    piece: list[memoryview] = []
    room = _PIECE_BYTES
    for block in blocks:
        view = memoryview(block).cast("B")
        while view.nbytes:
            piece.append(view[:room])
            room -= piece[-1].nbytes
            view = view[piece[-1].nbytes :]
            if not room:
                yield piece
                piece, room = [], _PIECE_BYTES
    if piece:
        yield piece

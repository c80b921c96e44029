"""The source's end of all links: one thread, one selector, no matter how many peers.

The listener answers reads from the store, and drops every peer that does not prove membership of this cluster in
time. It never calls user code and never waits for one peer. Putting values into Ray's object store waits, and runs on a
second thread, one value after the other. A peer that asks for a stream is handed over, socket and all, to whoever has
registered for the stream's key (`endpoint.streams`); the listener has nothing to do with it from then on.

Back-pressure: one request of a peer is served at a time. Until its answer has left for the kernel nothing more is read
from that peer, so a peer that asks and never reads costs one answer, however much it asks for.

    reading ──request──> answering (out is not empty) or putting (busy) ──answer sent──> next request, or reading
"""

from __future__ import annotations

import collections
import contextlib
import errno
import itertools
import logging
import os
import queue
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from raylane.transport import wire
from raylane.transport.store import Entry, Store

log = logging.getLogger("raylane.transport")

HANDSHAKE_TIMEOUT_S = 5.0
MAX_STRANGERS = 256
"""Connections that have not proven themselves. One more, and the oldest of them is dropped."""
SESSION_CHECK_S = 2.0
DEAF_S = 0.5
_SEND_BYTES = 4 << 20
_MAX_PARTS = 256
_MAX_REASON = 500
"""Characters of an error that a peer is told."""

PutEntry = Callable[[Entry], "tuple[bytes, bytes, object] | None"]
"""Puts an entry's blocks into Ray's object store; returns (object id, owner address, what keeps it alive), or None if
their memory was freed, resized or re-pointed meanwhile."""
TakeStream = Callable[[socket.socket, int, int], None]
"""Takes over a proven connection (blocking, no timeout) from `member`, with its `level`. Must not wait: it runs on the
listener's thread."""


_Part = tuple["memoryview | Callable[[], memoryview]", object]
"""Bytes to send, or what makes them at their turn, with what keeps them alive."""
_ZEROS = memoryview(bytes(_SEND_BYTES))


@dataclass(eq=False, slots=True)
class _Peer:
    number: int
    socket: socket.socket
    deadline: float
    nonce: bytes
    address: wire.Address
    """Of this listener, as the peer must have known it to connect."""
    proven: bool = False
    frames: wire.FrameBuffer = field(default_factory=lambda: wire.FrameBuffer(wire.MAX_STRANGER_FRAME_BYTES))
    inbox: collections.deque[wire.Message] = field(default_factory=collections.deque)
    """Requests that were read with the one being served."""
    out: collections.deque[_Part] = field(default_factory=collections.deque)
    busy: bool = False
    """True while the other thread puts a value for this peer."""
    watched: int = 0
    """The events for which the socket is registered; 0 if it is not."""
    held: dict[bytes, object] = field(default_factory=dict)
    """Objects put for this peer, until it sends Done."""


class Listener:
    """Starts listening when made; `close` ends the thread and every link. All state belongs to the thread."""

    def __init__(
        self,
        store: Store,
        secret: bytes,
        *,
        name: str,
        host: str,
        put_entry: PutEntry,
        session_over: Callable[[], bool],
        streams: Mapping[bytes, TakeStream] | None = None,
    ) -> None:
        self._store = store
        self._secret = secret
        self._put_entry = put_entry
        self._puts: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._putter: threading.Thread | None = None
        self._session_over = session_over
        self._streams = {} if streams is None else streams
        """Takers of connections by key. Written by other threads."""
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, _Peer] = {}
        self._strangers: collections.OrderedDict[int, _Peer] = collections.OrderedDict()
        self._next_number = 1
        self._done: collections.deque[Callable[[], None]] = collections.deque()
        """Results of other threads, run by the loop."""
        self._closing = False
        self._deaf_until = 0.0
        """When to accept again after running out of descriptors; 0 while accepting."""
        self.name = name
        with contextlib.ExitStack() as undo:
            undo.callback(self._selector.close)
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, self._wake)
            self._unix = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self._unix.bind("\0" + name)
            self._tcp = undo.enter_context(socket.create_server((host, 0), backlog=512))
            self._unix.listen(512)
            self.host, self.port = self._tcp.getsockname()[:2]
            for sock in (self._unix, self._tcp):
                sock.setblocking(False)
                self._selector.register(sock, selectors.EVENT_READ, self._accept)
            self._selector.register(self._wake, selectors.EVENT_READ, self._woken)
            self._thread = threading.Thread(target=self._run, name="raylane-listener", daemon=True)
            self._thread.start()
            undo.pop_all()  # the thread closes them
        _listening.add(self)

    def close(self) -> None:
        """Stop and join (within seconds). Links are closed, which is how peers learn of it."""
        self._closing = True
        self.nudge()
        self._thread.join(timeout=5)
        if self._putter is not None:
            self._puts.put(None)
            self._putter.join(timeout=5)

    def nudge(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def strangers(self) -> int:
        """Connections that have not proven themselves yet."""
        return len(self._strangers)

    # The loop

    def _run(self) -> None:
        try:
            while not self._closing and not self._session_over():
                for key, events in self._selector.select(self._pause_s()):
                    if isinstance(key.data, _Peer):
                        self._serve(key.data, events)
                    else:
                        key.data(key.fileobj)
                while self._done:
                    self._done.popleft()()
                self._drop_late_strangers(time.monotonic())
                self._listen_again(time.monotonic())
        finally:
            for peer in list(self._peers.values()):
                self._drop(peer, None)
            _listening.discard(self)
            self._selector.close()
            self._unix.close()
            self._tcp.close()
            os.close(self._wake)

    def close_in_child(self) -> None:
        """Close a forked child's copies of all sockets: they would keep addresses and links of a dead parent alive."""
        for peer in self._peers.values():
            peer.socket.close()
        self._unix.close()
        self._tcp.close()

    def _pause_s(self) -> float:
        now = time.monotonic()
        until = now + (DEAF_S if self._deaf_until else SESSION_CHECK_S)
        if self._strangers:
            until = min(until, next(iter(self._strangers.values())).deadline)
        return max(0.0, until - now)

    def _drop_late_strangers(self, now: float) -> None:
        while self._strangers and (oldest := next(iter(self._strangers.values()))).deadline <= now:
            self._drop(oldest, "no proof in time")

    def _woken(self, _: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    # Connections

    def _accept(self, server: socket.socket) -> None:
        try:
            sock, _ = server.accept()
        except OSError as error:
            log.debug("accept: %s", error)
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._turn_deaf()  # the peer stays in the queue, and would be announced again at once
            return
        sock.setblocking(False)
        address: wire.Address = self.name
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            address = self.host, self.port
        elif _uid_of(sock) not in (os.geteuid(), 0):
            # Names of abstract sockets are public (/proc/net/unix); a cluster's processes run as one user, or root.
            with contextlib.suppress(OSError), sock:
                sock.send(wire.pack(wire.Refusal(f"only processes of user {os.geteuid()} are served here")))
            return
        if len(self._strangers) >= MAX_STRANGERS:
            self._drop(next(iter(self._strangers.values())), "too many connections without proof")
        peer = _Peer(
            number=self._next_number,
            socket=sock,
            deadline=time.monotonic() + HANDSHAKE_TIMEOUT_S,
            nonce=secrets.token_bytes(wire.NONCE_BYTES),
            address=address,
        )
        self._next_number += 1
        self._peers[peer.number] = self._strangers[peer.number] = peer
        self._send(peer, wire.Challenge(wire.VERSION, peer.nonce))
        self._advance(peer)

    def _turn_deaf(self) -> None:
        """Accept nobody for a while; those who are linked are served."""
        if self._deaf_until:  # the other socket's peer was announced with this one's
            return
        for sock in (self._unix, self._tcp):
            self._selector.unregister(sock)
        self._deaf_until = time.monotonic() + DEAF_S

    def _listen_again(self, now: float) -> None:
        if self._deaf_until and now >= self._deaf_until:
            self._deaf_until = 0.0
            for sock in (self._unix, self._tcp):
                self._selector.register(sock, selectors.EVENT_READ, self._accept)

    def _drop(self, peer: _Peer, why: str | None) -> None:
        if self._peers.pop(peer.number, None) is None:
            return
        self._strangers.pop(peer.number, None)
        if why:
            log.debug("dropping link %d: %s", peer.number, why)
        self._watch(peer, 0)
        peer.socket.close()
        peer.out.clear()
        peer.held.clear()

    def _serve(self, peer: _Peer, events: int) -> None:
        if peer.number not in self._peers:  # dropped while an earlier event of the same batch was served
            return
        try:
            if events & selectors.EVENT_READ and not peer.out:
                data = peer.socket.recv(1 << 16)
                if not data:
                    self._drop(peer, None)
                    return
                peer.inbox.extend(peer.frames.feed(data))
        except BlockingIOError:
            pass
        except (OSError, wire.WireError) as error:
            self._drop(peer, str(error))
            return
        self._advance(peer)

    def _advance(self, peer: _Peer) -> None:
        """Send what the socket takes, serve the requests that have come in one by one, and wait for what is next."""
        try:
            self._flush(peer)
            while peer.inbox and not peer.out and not peer.busy and peer.number in self._peers:
                self._handle(peer, peer.inbox.popleft())
                self._flush(peer)
            if peer.number in self._peers:
                waiting = peer.busy or peer.inbox
                self._watch(peer, selectors.EVENT_WRITE if peer.out else 0 if waiting else selectors.EVENT_READ)
        except OSError as error:
            self._drop(peer, str(error))
        except Exception:  # a defect of ours costs this peer its link, not every peer the listener
            log.exception("serving link %d", peer.number)
            self._drop(peer, "internal error")

    def _watch(self, peer: _Peer, events: int) -> None:
        """Register a peer's socket for these events."""
        if events == peer.watched:
            return
        if not peer.watched:
            self._selector.register(peer.socket, events, peer)
        elif events:
            self._selector.modify(peer.socket, events, peer)
        else:
            self._selector.unregister(peer.socket)
        peer.watched = events

    def _send(self, peer: _Peer, message: wire.Message) -> None:
        """Queue a message; `_advance` sends it."""
        peer.out.append((memoryview(wire.pack(message)), None))

    def _flush(self, peer: _Peer) -> None:
        """Send what the socket takes of a peer's answer, some of it at a time: the other peers have their turn."""
        most = _MAX_PARTS
        for _ in range(16):
            parts = _next_parts(peer.out, most)
            if not parts:
                return
            try:
                sent = peer.socket.sendmsg(parts)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.EFAULT:
                    raise
                if len(parts) == 1:
                    _blank(peer.out)
                most = 1  # find the part that is not mapped any more
                continue
            most = _MAX_PARTS
            _consume(peer.out, sent)

    # Messages

    def _handle(self, peer: _Peer, message: wire.Message) -> None:
        if not peer.proven:
            self._prove(peer, message)
        elif isinstance(message, wire.Read):
            self._read(peer, message.key)
        elif isinstance(message, wire.Holding):
            self._send(peer, wire.Held(self._store.held_for_callers()))
        elif isinstance(message, wire.Put):
            self._put(peer, message.key)
        elif isinstance(message, wire.Done):
            peer.held.pop(message.key, None)
        elif isinstance(message, wire.Stream):
            self._hand_over(peer, message)
        else:
            self._drop(peer, f"sent {type(message).__name__}, which only a listener sends")

    def _prove(self, peer: _Peer, message: wire.Message) -> None:
        if not isinstance(message, wire.Hello) or message.version != wire.VERSION:
            reason = "expected a Hello of version " + str(wire.VERSION)
        elif not wire.proves(
            message.proof, wire.proof(self._secret, "client", peer.nonce, message.nonce, peer.address)
        ):
            reason = "wrong proof: not of this Ray cluster, or meant for another listener"
        else:
            peer.proven = True
            peer.frames.limit = wire.MAX_FRAME_BYTES
            self._strangers.pop(peer.number, None)
            proof = wire.proof(self._secret, "listener", peer.nonce, message.nonce, peer.address)
            self._send(peer, wire.Welcome(proof))
            return
        self._refuse(peer, reason)

    def _refuse(self, peer: _Peer, reason: str) -> None:
        if peer.number not in self._peers:
            return
        self._send(peer, wire.Refusal(reason))
        with contextlib.suppress(OSError):
            self._flush(peer)
        self._drop(peer, reason)

    def _hand_over(self, peer: _Peer, message: wire.Stream) -> None:
        take = self._streams.get(message.key)
        if take is None:
            self._refuse(peer, "nobody here expects this stream: it has ended, or never began")
            return
        if peer.inbox:
            self._drop(peer, "sent more before it knew that its stream was taken")
            return
        self._watch(peer, 0)
        del self._peers[peer.number]
        peer.socket.setblocking(True)
        take(peer.socket, message.member, message.level)

    def _find(self, peer: _Peer, key: bytes) -> tuple[Entry, bool] | None:
        """Return what a peer asks for, marked as read, and whether its creator has read it. If it is not there any
        more, the peer is told so instead."""
        entry = self._store.get(key)
        if entry is None or not entry.in_place():
            self._send(peer, wire.Gone(key, moved=entry is not None))
            return None
        by_creator, _ = self._store.mark_read(entry, creator=False)
        return entry, by_creator

    def _read(self, peer: _Peer, key: bytes) -> None:
        found = self._find(peer, key)
        if found is None:
            return
        entry, by_creator = found

        def sent() -> memoryview:
            # Only after the last byte was read can anything be said of all of them.
            return memoryview(wire.pack(wire.Sent(entry.in_place(), entry.mutated(), by_creator)))

        self._send(peer, wire.Data(entry.nbytes))
        peer.out.extend(entry.views())
        peer.out.append((sent, entry))

    def _put(self, peer: _Peer, key: bytes) -> None:
        found = self._find(peer, key)
        if found is None:
            return
        entry, by_creator = found
        peer.busy = True

        def work() -> None:
            try:
                put = self._put_entry(entry)
            except Exception as error:
                log.exception("could not put a value of %d bytes into the object store", entry.nbytes)
                reason = f"object store put failed: {error!r}"[:_MAX_REASON]
                self._done.append(lambda: self._refuse(peer, reason))
            else:
                self._done.append(lambda: finish(put))
            self.nudge()

        def finish(put: tuple[bytes, bytes, object] | None) -> None:
            if peer.number not in self._peers:
                return
            peer.busy = False
            if put is None:
                self._send(peer, wire.Gone(key, moved=True))
            else:
                object_id, owner, peer.held[key] = put
                self._send(peer, wire.PutReply(object_id, owner, entry.mutated(), by_creator))
            self._advance(peer)

        if self._putter is None:
            putter = threading.Thread(target=self._run_puts, name="raylane-put", daemon=True)
            putter.start()  # RuntimeError if the system starts no more threads: the next put tries again
            self._putter = putter
        self._puts.put(work)

    def _run_puts(self) -> None:
        while (work := self._puts.get()) is not None:
            work()
            del work


def _next_parts(out: collections.deque[_Part], most: int) -> list[memoryview]:
    """Return up to `most` parts, and _SEND_BYTES, from the head of the queue. A part that is made at its turn is made
    when it is the head, which is when everything before it has left."""
    if out and not isinstance(out[0][0], memoryview):
        made, keep = out.popleft()
        out.appendleft((made() if callable(made) else made, keep))
    parts: list[memoryview] = []
    room = _SEND_BYTES
    for data, _ in itertools.islice(out, most):
        if not isinstance(data, memoryview) or not room:
            break
        parts.append(data[:room])
        room -= parts[-1].nbytes
    return parts


def _consume(out: collections.deque[_Part], sent: int) -> None:
    """Take `sent` bytes off the head of the queue."""
    while sent:
        data, keep = out.popleft()
        if not isinstance(data, memoryview):
            raise AssertionError("a part was sent before it was made")
        if sent < data.nbytes:
            out.appendleft((data[sent:], keep))
        sent -= min(sent, data.nbytes)


def _blank(out: collections.deque[_Part]) -> None:
    """Replace the head of the queue by zeros: its memory is not mapped any more. The reader learns it from Sent."""
    data, _ = out.popleft()
    left = data.nbytes if isinstance(data, memoryview) else 0
    while left:
        out.appendleft((_ZEROS[:left], None))
        left -= out[0][0].nbytes  # type: ignore[union-attr]


def _uid_of(sock: socket.socket) -> int:
    """Return the user of the process at the other end of a Unix socket (SO_PEERCRED, unix(7))."""
    found: int = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
    return found


_listening: weakref.WeakSet[Listener] = weakref.WeakSet()


def _close_in_child() -> None:
    for found in list(_listening):
        found.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)

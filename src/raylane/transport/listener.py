"""The source's end of all links: one thread, one selector, no matter how many peers.

It answers reads from the store, and drops whoever does not prove membership of this cluster in time. It never calls
user code and never waits for one peer. The one thing that waits, putting a value into Ray's object store, runs on a
thread of its own for as long as it takes. A peer that asks for a stream is handed over, socket and all, to whoever has
registered for it (`endpoint.streams`), and is none of the listener's business from then on.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from raylane.core.segment import bytes_at, map_segment
from raylane.transport import wire
from raylane.transport.store import Entry, Store

log = logging.getLogger("raylane.transport")

HANDSHAKE_TIMEOUT_S = 5.0
MAX_STRANGERS = 256
"""Connections that have not proven themselves. One more, and the oldest of them is dropped."""
SESSION_CHECK_S = 2.0
DEAF_S = 0.5
_SEND_BYTES = 4 << 20

PutBlocks = Callable[[list[memoryview]], tuple[bytes, bytes, object]]
"""Puts blocks into Ray's object store; returns (object id, owner address, what keeps it alive)."""
TakeStream = Callable[[socket.socket, int, int], None]
"""Takes over a proven connection (blocking, no timeout) from `member`, with its `level`. Must not wait: it runs on the
listener's thread."""


@dataclass(eq=False, slots=True)
class _Peer:
    number: int
    socket: socket.socket
    deadline: float
    nonce: bytes
    proven: bool = False
    frames: wire.FrameBuffer = field(default_factory=wire.FrameBuffer)
    out: collections.deque[tuple[memoryview, object]] = field(default_factory=collections.deque)
    """Bytes to send, each with what keeps them alive."""
    held: dict[bytes, object] = field(default_factory=dict)
    """Objects put for this peer, until it says Done."""


class Listener:
    """Starts listening when made; `close` ends the thread and every link. All state belongs to the thread."""

    def __init__(
        self,
        store: Store,
        secret: bytes,
        *,
        name: str,
        host: str,
        put_blocks: PutBlocks,
        session_over: Callable[[], bool],
        streams: Mapping[bytes, TakeStream] | None = None,
    ) -> None:
        self._store = store
        self._secret = secret
        self._put_blocks = put_blocks
        self._session_over = session_over
        self._streams = {} if streams is None else streams
        """By key, who takes connections over. Written by other threads."""
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, _Peer] = {}
        self._strangers: collections.OrderedDict[int, _Peer] = collections.OrderedDict()
        self._next_number = 1
        self._done: collections.deque[Callable[[], None]] = collections.deque()
        """Results of other threads, run by the loop."""
        self._closing = False
        self._deaf_until = 0.0
        """When to accept again after running out of descriptors; 0 while accepting."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._unix.bind("\0" + name)
        self._tcp = socket.create_server((host, 0), backlog=512)
        self._unix.listen(512)
        self.host, self.port = self._tcp.getsockname()[:2]
        for sock in (self._unix, self._tcp):
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake, selectors.EVENT_READ, self._woken)
        self._thread = threading.Thread(target=self._run, name="raylane-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop and join (within seconds). Links are closed, which is how peers learn of it."""
        self._closing = True
        self.nudge()
        self._thread.join(timeout=5)

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
            self._selector.close()
            self._unix.close()
            self._tcp.close()
            os.close(self._wake)

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
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self._strangers) >= MAX_STRANGERS:
            self._drop(next(iter(self._strangers.values())), "too many connections without proof")
        peer = _Peer(
            number=self._next_number,
            socket=sock,
            deadline=time.monotonic() + HANDSHAKE_TIMEOUT_S,
            nonce=secrets.token_bytes(wire.NONCE_BYTES),
        )
        self._next_number += 1
        self._peers[peer.number] = self._strangers[peer.number] = peer
        self._selector.register(sock, selectors.EVENT_READ, peer)
        self._send(peer, wire.Challenge(wire.VERSION, peer.nonce))

    def _turn_deaf(self) -> None:
        """Accept nobody for a while; those who are linked are served."""
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
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.socket)
        peer.socket.close()
        peer.out.clear()
        peer.held.clear()

    def _serve(self, peer: _Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(peer)
            if events & selectors.EVENT_READ:
                data = peer.socket.recv(1 << 16)
                if not data:
                    self._drop(peer, None)
                    return
                for message in peer.frames.feed(data):
                    if peer.number not in self._peers:
                        return
                    self._handle(peer, message)
        except BlockingIOError:
            return
        except (OSError, wire.WireError) as error:
            self._drop(peer, str(error))
        except Exception:  # a defect of ours costs this peer its link, not every peer the listener
            log.exception("serving link %d", peer.number)
            self._drop(peer, "internal error")

    def _send(self, peer: _Peer, message: wire.Message) -> None:
        self._queue(peer, [(memoryview(wire.pack(message)), None)])

    def _queue(self, peer: _Peer, parts: list[tuple[memoryview, object]]) -> None:
        """Send now what the socket takes, the rest when it takes more."""
        peer.out.extend(parts)
        try:
            self._flush(peer)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(peer, str(error))

    def _flush(self, peer: _Peer) -> None:
        budget = 16  # sends before the others have their turn
        while peer.out and budget:
            budget -= 1
            head, keep = peer.out.popleft()
            try:
                sent = peer.socket.send(head[:_SEND_BYTES])
            except BlockingIOError:
                peer.out.appendleft((head, keep))
                break
            if sent < head.nbytes:
                peer.out.appendleft((head[sent:], keep))
        if peer.number in self._peers:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.out else 0)
            self._selector.modify(peer.socket, wanted, peer)

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
            self._drop(peer, f"sent {type(message).__name__}, which only a listener says")

    def _prove(self, peer: _Peer, message: wire.Message) -> None:
        if not isinstance(message, wire.Hello) or message.version != wire.VERSION:
            reason = "expected a Hello of version " + str(wire.VERSION)
        elif not wire.proves(self._secret, "client", peer.nonce, message.proof):
            reason = "wrong proof: not of this Ray cluster"
        else:
            peer.proven = True
            self._strangers.pop(peer.number, None)
            self._send(peer, wire.Welcome(wire.proof(self._secret, "listener", message.nonce)))
            return
        self._send(peer, wire.Refusal(reason))
        self._drop(peer, reason)

    def _hand_over(self, peer: _Peer, message: wire.Stream) -> None:
        take = self._streams.get(message.key)
        if take is None:
            self._send(peer, wire.Refusal("nobody here expects this stream: it has ended, or never began"))
            self._drop(peer, "unknown stream")
            return
        if peer.out:
            self._drop(peer, "asked for a stream before it had read the answers to what it asked before")
            return
        self._selector.unregister(peer.socket)
        del self._peers[peer.number]
        peer.socket.setblocking(True)
        take(peer.socket, message.member, message.level)

    def _find(self, peer: _Peer, key: bytes) -> tuple[Entry, bool] | None:
        """What a peer asks for, marked as read, and whether its creator has read it; the peer is told if it is gone."""
        entry = self._store.get(key)
        if entry is None:
            self._send(peer, wire.Gone(key))
            return None
        by_creator, _ = self._store.mark_read(entry, creator=False)
        return entry, by_creator

    def _read(self, peer: _Peer, key: bytes) -> None:
        found = self._find(peer, key)
        if found is None:
            return
        entry, by_creator = found
        views = block_views(entry)
        head = wire.Data([view.nbytes for view, _ in views], entry.mutated(), by_creator)
        self._queue(peer, [(memoryview(wire.pack(head)), None), *views])

    def _put(self, peer: _Peer, key: bytes) -> None:
        found = self._find(peer, key)
        if found is None:
            return
        entry, by_creator = found

        def work() -> None:
            try:
                object_id, owner, keep = self._put_blocks([view for view, _ in block_views(entry)])
            except Exception:
                log.exception("could not put a value of %d bytes into the object store", entry.nbytes)
                self._done.append(lambda: self._drop(peer, "object store put failed"))
            else:
                self._done.append(lambda: finish(object_id, owner, keep))
            self.nudge()

        def finish(object_id: bytes, owner: bytes, keep: object) -> None:
            if peer.number in self._peers:
                peer.held[key] = keep
                self._send(peer, wire.PutReply(object_id, owner, entry.mutated(), by_creator))

        threading.Thread(target=work, name="raylane-put", daemon=True).start()


def block_views(entry: Entry) -> list[tuple[memoryview, Any]]:
    """The bytes of an entry's blocks, each with what keeps them alive."""
    if entry.segments:
        arrays = [map_segment(fd, block.nbytes) for fd, block in zip(entry.segments, entry.layout.blocks, strict=True)]
        return [(memoryview(array).cast("B"), array) for array in arrays]
    return [(bytes_at(block.start, block.nbytes), entry) for block in entry.layout.blocks]

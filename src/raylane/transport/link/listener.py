"""The source's end of all links: one thread and one selector for any number of peers.

The listener answers requests from the store, and drops every peer that does not authenticate in time. Its thread never
calls user code and never waits for a single peer. Putting values into Ray's object store, and copying them into shared
memory, can take long, so a second thread does it, one value after the other. A peer that asks for a stream is passed,
with its socket, to the component that registered for the stream's key (`endpoint.streams`); the listener does not touch
that connection again.

Back-pressure: the listener serves one request of a peer at a time. It reads nothing more from that peer until the
answer has been passed to the kernel, so a peer that sends requests without reading costs the memory of one answer.

    reading ──request──> answering (out is not empty) or putting (busy) ──answer sent──> next request, or reading
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
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from raylane.core.memory.shared_pool import SharedSegment
from raylane.core.process.place import uid_of
from raylane.transport.hold.store import Entry, Store
from raylane.transport.link import tls, wire
from raylane.transport.link.connection import TakeStream
from raylane.transport.link.outgoing import Part, blank, consume, next_parts
from raylane.transport.link.second_thread import SecondThread

log = logging.getLogger("raylane.transport")
_T = TypeVar("_T")

HANDSHAKE_TIMEOUT_S = 5.0
MAX_UNAUTHENTICATED = 256
"""Number of connections before authentication; a further one makes the listener drop the oldest of them."""
SESSION_CHECK_S = 2.0
ACCEPT_PAUSE_S = 0.5
"""Seconds without accepting after this process ran out of descriptors."""
_MAX_PARTS = 256
_MAX_REASON = 500
"""Length of an error's text, in characters, when it is sent to a peer."""

PutEntry = Callable[[Entry], "tuple[bytes, bytes, object] | None"]
"""Function that puts an entry's blocks into Ray's object store.

Returns (object id, owner address, object that keeps it alive), or None if the memory was freed, resized or re-pointed.
"""


_TLS_ONLY = wire.pack_frame(wire.Refusal("it uses TLS, and this process does not: set RAY_USE_TLS=1 in all or in none"))


@dataclass(eq=False, slots=True)
class _Client:
    """One connection and the state of its requests. Belongs to the listener's thread."""

    number: int
    socket: socket.socket
    deadline: float
    nonce: bytes
    address: wire.Address
    """Address of this listener that the peer connected to; the proofs cover it."""
    authenticated: bool = False
    shaking: bool = False
    """True until TLS is established; before that, no message is sent or read."""
    spoke: bool = False
    """True if the peer has begun the handshake of TLS."""
    frames: wire.FrameBuffer = field(default_factory=lambda: wire.FrameBuffer(wire.MAX_HANDSHAKE_FRAME_BYTES))
    inbox: collections.deque[wire.Message] = field(default_factory=collections.deque)
    """Requests that arrived together with the one being served."""
    out: collections.deque[Part] = field(default_factory=collections.deque)
    """Parts of the answer that are not sent yet."""
    busy: bool = False
    """True while the second thread works for this peer."""
    watched: int = 0
    """Events for which the socket is registered; 0 if it is not registered."""
    held: dict[bytes, object] = field(default_factory=dict)
    """Objects put for this peer, by key, until the peer sends Release."""


class Listener:
    """A listener on a Unix and a TCP socket, from construction to `close`. Its state belongs to its thread."""

    def __init__(
        self,
        store: Store,
        secret: bytes,
        *,
        name: str,
        host: str,
        put_entry: PutEntry,
        session_ended: Callable[[], bool],
        streams: Mapping[bytes, TakeStream] | None = None,
        holdings: Callable[[int], wire.Holdings] | None = None,
    ) -> None:
        self._store = store
        self._secret = secret
        self._put_entry = put_entry
        self._helpers = {False: SecondThread("raylane-put"), True: SecondThread("raylane-device")}
        """Threads for work that waits; the one at True waits for kernels of the program, perhaps for long."""
        self._session_ended = session_ended
        self._streams = {} if streams is None else streams
        """Components that accept streams, by key. Written by other threads."""
        self._holdings = holdings
        """Function that answers a HoldingsQuery; runs on the listener's thread."""
        # First, because it fails for missing files, and nothing is open yet.
        self._tls = tls.server_context()
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, _Client] = {}
        self._unauthenticated: collections.OrderedDict[int, _Client] = collections.OrderedDict()
        self._next_number = 1
        self._callbacks: collections.deque[Callable[[], None]] = collections.deque()
        """Callbacks from other threads, run by the listener's thread."""
        self._closing = False
        self._accept_after = 0.0
        """Time (monotonic clock) from which to accept again after running out of descriptors; 0 while accepting."""
        self.name = name
        # If a step fails (no descriptors, no threads), the stack undoes the earlier ones and nothing stays open.
        with contextlib.ExitStack() as undo:
            undo.callback(self._selector.close)
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, self._wake)
            self._unix = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self._unix.bind("\0" + name)
            self._tcp = undo.enter_context(socket.create_server((host, 0), backlog=512))
            self._unix.listen(512)
            # The proofs cover this address, and readers connect to it: use the real port instead of 0.
            self.host, self.port = self._tcp.getsockname()[:2]
            for sock in (self._unix, self._tcp):
                sock.setblocking(False)
            self._register_servers()
            self._selector.register(self._wake, selectors.EVENT_READ, self._woken)
            self._thread = threading.Thread(target=self._run, name="raylane-listener", daemon=True)
            self._thread.start()
            undo.pop_all()  # from now on the thread owns the descriptors and closes them
        _listening.add(self)

    def close(self) -> None:
        """Stop the threads and close all links; wait a few seconds at most."""
        self._closing = True
        self.wake()
        self._thread.join(timeout=5)
        # After the join above: no new work can come any more.
        for helper in self._helpers.values():
            helper.close(5)

    def wake(self) -> None:
        """Wake the listener's thread; may be called from any thread."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def unauthenticated(self) -> int:
        """Return the number of connections that have not authenticated yet."""
        return len(self._unauthenticated)

    # The loop

    def _run(self) -> None:
        try:
            while not self._closing and not self._session_ended():
                # Wake at the next deadline even if no socket is ready. A new deadline is never earlier than the first.
                now = time.monotonic()
                until = now + (ACCEPT_PAUSE_S if self._accept_after else SESSION_CHECK_S)
                if self._unauthenticated:
                    until = min(until, next(iter(self._unauthenticated.values())).deadline)
                for key, events in self._selector.select(max(0.0, until - now)):
                    if isinstance(key.data, _Client):
                        self._serve(key.data, events)
                    else:
                        key.data(key.fileobj)
                while self._callbacks:
                    self._callbacks.popleft()()
                now = time.monotonic()
                while self._unauthenticated and (oldest := next(iter(self._unauthenticated.values()))).deadline <= now:
                    self._drop(oldest, "no proof in time")
                if self._accept_after and now >= self._accept_after:
                    self._accept_after = 0.0
                    self._register_servers()
        finally:
            # Closed by this thread, not by `close`: closing a socket that a selector waits on is a race.
            for peer in list(self._peers.values()):
                self._drop(peer, None)
            _listening.discard(self)
            self._selector.close()
            self._unix.close()
            self._tcp.close()
            os.close(self._wake)

    def close_in_child(self) -> None:
        """Close a forked child's copies of all sockets; open copies would keep a dead parent's addresses in use."""
        for peer in self._peers.values():
            peer.socket.close()
        self._unix.close()
        self._tcp.close()

    def _woken(self, _: object) -> None:
        # Reset the eventfd, or the selector reports it for ever. The callbacks run after all events of this round.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    # Connections

    def _accept(self, server: socket.socket) -> None:
        try:
            sock, _ = server.accept()
        except OSError as error:
            log.debug("accept: %s", error)
            exhausted = error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
            # The connection stays in the backlog, so the selector would report it again at once: accept none for a
            # while. The selector may have reported both sockets, and the other one came first.
            if exhausted and not self._accept_after:
                for listening in (self._unix, self._tcp):
                    self._selector.unregister(listening)
                self._accept_after = time.monotonic() + ACCEPT_PAUSE_S
            return
        sock.setblocking(False)
        address: wire.Address = self.name
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            address = self.host, self.port
            if self._tls is not None:
                try:
                    sock = tls.wrap(self._tls, sock, server=True)
                except OSError as error:
                    log.debug("accept: %s", error)
                    return
        elif uid_of(sock) not in (os.geteuid(), 0):
            # Any user can find the names of abstract sockets (/proc/net/unix) and connect. The processes of a cluster
            # run as one user, or as root.
            with contextlib.suppress(OSError), sock:
                sock.send(wire.pack_frame(wire.Refusal(f"only processes of user {os.geteuid()} are served here")))
            return
        if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
            # Drop the oldest: a member of the cluster authenticates within milliseconds, so new ones are more likely
            # to be members.
            self._drop(next(iter(self._unauthenticated.values())), "too many connections without proof")
        peer = _Client(
            number=self._next_number,
            socket=sock,
            deadline=time.monotonic() + HANDSHAKE_TIMEOUT_S,
            nonce=secrets.token_bytes(wire.NONCE_BYTES),
            address=address,
            shaking=isinstance(sock, tls.TlsSocket),
        )
        self._next_number += 1
        # Keyed by a number of its own: descriptors are reused, and callbacks of the second thread come late.
        self._peers[peer.number] = self._unauthenticated[peer.number] = peer
        if peer.shaking:
            self._watch(peer, selectors.EVENT_READ)  # the client begins the handshake of TLS
        else:
            self._challenge(peer)

    def _challenge(self, peer: _Client) -> None:
        self._send(peer, wire.Challenge(wire.VERSION, peer.nonce))
        self._advance(peer)

    def _shake(self, peer: _Client) -> None:
        """Continue the handshake of TLS. The limits of unauthenticated peers hold meanwhile."""
        if not isinstance(peer.socket, tls.TlsSocket):
            raise AssertionError("only connections with TLS have a handshake")
        peer.spoke = True
        try:
            peer.socket.do_handshake()
        except ssl.SSLWantReadError:
            self._watch(peer, selectors.EVENT_READ)
        except ssl.SSLWantWriteError:
            self._watch(peer, selectors.EVENT_WRITE)
        except OSError as error:  # OpenSSL has sent the peer an alert with the reason
            tls.drain(peer.socket)
            self._drop(peer, str(error))
        else:
            peer.shaking = False
            self._challenge(peer)

    def _register_servers(self) -> None:
        for sock in (self._unix, self._tcp):
            self._selector.register(sock, selectors.EVENT_READ, self._accept)

    def _drop(self, peer: _Client, why: str | None) -> None:
        if self._peers.pop(peer.number, None) is None:
            return
        self._unauthenticated.pop(peer.number, None)
        if why:
            log.debug("dropping link %d: %s", peer.number, why)
        self._watch(peer, 0)
        if peer.shaking and not peer.spoke:  # a client without TLS waits for this listener to begin
            tls.tell_plain(peer.socket, _TLS_ONLY)
        peer.socket.close()
        # Drop the references to tensors and Ray objects now; a callback may still refer to the peer.
        peer.out.clear()
        peer.held.clear()

    def _serve(self, peer: _Client, events: int) -> None:
        if peer.number not in self._peers:  # dropped by an earlier event of the same batch
            return
        if peer.shaking:
            self._shake(peer)
            return
        try:
            # Do not read while an answer is pending; this is the back-pressure on the peer.
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

    def _advance(self, peer: _Client) -> None:
        """Send what the socket accepts, serve the received requests one by one, and register for the next event."""
        try:
            self._flush(peer)
            while peer.inbox and not peer.out and not peer.busy and peer.number in self._peers:
                self._handle(peer, peer.inbox.popleft())
                self._flush(peer)
            if peer.number in self._peers:
                # With a request in hand the socket is not watched at all: a readable socket would wake the thread
                # again and again without being read.
                waiting = peer.busy or peer.inbox
                self._watch(peer, selectors.EVENT_WRITE if peer.out else 0 if waiting else selectors.EVENT_READ)
        except (OSError, wire.WireError) as error:
            self._drop(peer, str(error))
        except Exception:  # a defect in this code must end only this peer's link, not the listener
            log.exception("serving link %d", peer.number)
            self._drop(peer, "internal error")

    def _watch(self, peer: _Client, events: int) -> None:
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

    def _send(self, peer: _Client, message: wire.Message) -> None:
        """Queue a message; `_advance` sends it."""
        peer.out.append((memoryview(wire.pack_frame(message)), None))

    def _flush(self, peer: _Client) -> None:
        """Send as much of a peer's answer as the socket accepts, at most 16 batches of 4 MiB."""
        # sendmsg accepts at most IOV_MAX (1024) parts; fewer keep the lists short.
        most = _MAX_PARTS
        for _ in range(16):  # limited, so that a fast peer does not delay the others
            parts = next_parts(peer.out, most)
            if not parts:
                return
            try:
                sent = peer.socket.sendmsg(parts)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.EFAULT:
                    raise
                # A part's memory is unmapped: its owner freed it. EFAULT does not tell which part, so send single
                # parts until one fails, and replace that one.
                if len(parts) == 1:
                    blank(peer.out)
                most = 1
                continue
            most = _MAX_PARTS
            consume(peer.out, sent)

    # Messages

    def _handle(self, peer: _Client, message: wire.Message) -> None:
        if not peer.authenticated:
            self._authenticate(peer, message)
        elif isinstance(message, wire.ReadValue):
            self._read(peer, message.key, None)
        elif isinstance(message, wire.ReadParts):
            self._read(peer, message.key, wire.unpack_parts(message.parts))
        elif isinstance(message, wire.HeldQuery):
            self._send(peer, wire.HeldCount(self._store.held_for_callers()))
        elif isinstance(message, wire.HoldingsQuery) and self._holdings is not None:
            self._send(peer, self._holdings(message.most))
        elif isinstance(message, wire.Put):
            self._put(peer, message.key)
        elif isinstance(message, wire.ShareRequest):
            self._share(peer, message.key)
        elif isinstance(message, wire.Release):
            peer.held.pop(message.key, None)
        elif isinstance(message, wire.StreamRequest):
            self._hand_over(peer, message)
        else:
            self._drop(peer, f"sent {type(message).__name__}, which only a listener sends")

    def _authenticate(self, peer: _Client, message: wire.Message) -> None:
        """Check the client's proof and answer with this listener's own, or refuse the peer."""
        if not isinstance(message, wire.Hello) or message.version != wire.VERSION:
            reason = "expected a Hello of version " + str(wire.VERSION)
        elif not wire.proofs_equal(
            message.proof, wire.make_proof(self._secret, "client", peer.nonce, message.nonce, peer.address)
        ):
            reason = "wrong proof: not of this Ray cluster, or meant for another listener"
        else:
            peer.authenticated = True
            peer.frames.limit = wire.MAX_FRAME_BYTES
            self._unauthenticated.pop(peer.number, None)
            proof = wire.make_proof(self._secret, "listener", peer.nonce, message.nonce, peer.address)
            self._send(peer, wire.Welcome(proof))
            return
        self._refuse(peer, reason)

    def _refuse(self, peer: _Client, reason: str) -> None:
        if peer.number not in self._peers:
            return
        self._send(peer, wire.Refusal(reason))
        # Try once to send the reason; a peer that does not read it is dropped all the same.
        with contextlib.suppress(OSError):
            self._flush(peer)
        self._drop(peer, reason)

    def _hand_over(self, peer: _Client, message: wire.StreamRequest) -> None:
        take = self._streams.get(message.key)
        if take is None:
            self._refuse(peer, "this process has no such stream: the stream has ended, or was never announced")
            return
        if peer.inbox:
            # Bytes after the request belong to the stream's own protocol, and this buffer cannot be passed on.
            self._drop(peer, "sent more before its Stream request was answered")
            return
        # Forget the peer before the hand-over: from then on the socket belongs to the component.
        self._watch(peer, 0)
        del self._peers[peer.number]
        peer.socket.setblocking(True)  # the component uses threads that block
        take(peer.socket, message.member, message.level)

    def _intact(self, peer: _Client, key: bytes) -> Entry | None:
        """Return the requested entry; if its value was freed, send Gone to the peer and return None."""
        entry = self._store.get(key)
        if entry is not None and entry.is_intact():
            return entry
        self._send(peer, wire.Gone(key, moved=entry is not None))
        return None

    def _find(self, peer: _Client, key: bytes) -> tuple[Entry, bool] | None:
        """Return the requested entry, marked as read, and whether its creator has read it before.

        If the value was freed, send Gone to the peer and return None.
        """
        entry = self._intact(peer, key)
        if entry is None:
            return None
        # Marked before the transfer: a transfer that fails costs at most one needless warning in the producer.
        by_creator, _ = self._store.mark_read(entry, creator=False)
        return entry, by_creator

    def _read(self, peer: _Client, key: bytes, parts: list[tuple[int, int, int]] | None) -> None:
        """Send the blocks of a value, or these parts of them (block, offset, size)."""
        holding = self._find(peer, key)
        if holding is None:
            return
        entry, by_creator = holding
        if entry.on_device is None or entry.on_device.is_staged:
            self._send_blocks(peer, entry, parts, by_creator)
            return

        def answer(views: object) -> None:
            del views  # in host memory now
            self._send_blocks(peer, entry, parts, by_creator)

        self._work_for(peer, entry, entry.views, answer, "could not copy CUDA tensors to the host")

    def _send_blocks(
        self, peer: _Client, entry: Entry, parts: list[tuple[int, int, int]] | None, by_creator: bool
    ) -> None:
        views = entry.views()
        if parts is not None:
            sizes = [view.nbytes for view, _ in views]
            if any(block >= len(sizes) or offset + nbytes > sizes[block] for block, offset, nbytes in parts):
                self._refuse(peer, "a requested part lies outside the value")
                return
            views = [(views[block][0][offset : offset + nbytes], views[block][1]) for block, offset, nbytes in parts]

        def trailer() -> memoryview:
            # Checked when all bytes before it are sent: only then does the result cover all of them.
            return memoryview(wire.pack_frame(wire.Trailer(entry.is_intact(), entry.is_mutated(), by_creator)))

        self._send(peer, wire.Data(sum(view.nbytes for view, _ in views)))
        peer.out.extend(views)
        peer.out.append((trailer, entry))

    def _put(self, peer: _Client, key: bytes) -> None:
        holding = self._find(peer, key)
        if holding is None:
            return
        entry, by_creator = holding

        def answer(put: tuple[bytes, bytes, object] | None) -> wire.Message:
            if put is None:
                return wire.Gone(key, moved=True)
            object_id, owner, peer.held[key] = put
            return wire.PutReply(object_id, owner, entry.is_mutated(), by_creator)

        self._work_for(peer, entry, lambda: self._put_entry(entry), answer, "object store put failed")

    def _share(self, peer: _Client, key: bytes) -> None:
        entry = self._intact(peer, key)  # not `_find`: the reader counts its read by itself
        if entry is None:
            return

        def answer(segment: SharedSegment | None) -> wire.Message:
            if segment is None:
                return wire.Gone(key, moved=True)
            return wire.Shared(segment.path)

        self._work_for(peer, entry, lambda: self._store.share(entry), answer, "could not make a shared copy")

    def _work_for(
        self,
        peer: _Client,
        entry: Entry,
        work: Callable[[], _T],
        answer: Callable[[_T], wire.Message | None],
        failure: str,
    ) -> None:
        """Do something with an entry that may wait on another thread; then send its answer to a peer, if there is one.

        All work for one entry is done on the same thread.
        """
        peer.busy = True  # until `finish`, no other request of this peer is served

        def run() -> None:
            """Work on the other thread; the result goes back to the listener's thread as a callback."""
            try:
                result = work()
            except Exception as error:
                log.exception(failure)
                reason = f"{failure}: {error!r}"[:_MAX_REASON]
                self._callbacks.append(lambda: self._refuse(peer, reason))
            else:
                self._callbacks.append(lambda: finish(result))
            self.wake()

        def finish(result: _T) -> None:
            """Answer the peer, on the listener's thread."""
            if peer.number not in self._peers:  # the peer was dropped meanwhile
                return
            peer.busy = False
            if (message := answer(result)) is not None:
                self._send(peer, message)
            self._advance(peer)

        self._helpers[entry.on_device is not None].do(run)


_listening: weakref.WeakSet[Listener] = weakref.WeakSet()


def _close_in_child() -> None:
    # A copy, because a weak set can shrink during the iteration.
    for listener in list(_listening):
        listener.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)

"""Transports whose reader and source open a channel together, through which the source serves what the reader asks for.

    reader: ChannelLink                             source: ChannelServer, one thread for each channel
      Stream(CHANNELS)       ------------------------>  listener hands the connection over
      OpenChannel(backend)   ------------------------>
      RendezvousEntry ...    <----- rendezvous ------>  RendezvousEntry ...  then both send ChannelOpened
      (expects the blocks)
      Send(key)              ------------------------>
                             <------------------------  Data(bytes), or Gone
      (buffers fill)         <== channel: the blocks =  (sends)
                             <------------------------  Trailer

The reader prepares its buffers before it asks: a receive that is posted after the end of a connection would wait until
its timeout (gloo, torch 2.13). The answer Data proves that the source lived when the buffers were ready.

Every channel carries transfers in one direction, one after the other, so transfers cannot wait for each other in a
circle. Several transfers at a time, and transfers in the other direction, use channels of their own.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raylane.core import settings
from raylane.core.deadline import Deadline
from raylane.errors import (
    ProtocolError,
    RaylaneError,
    SourceLostError,
    TransportError,
    TransportUnavailableError,
)
from raylane.transport.backends.answers import answer_error, read_answer
from raylane.transport.backends.base import Backend, ChannelError, FetchResult, Process, ProcessPart
from raylane.transport.backends.pieces import Piece, pieces_of_entry, pieces_of_target
from raylane.transport.hold.blocks import allocate
from raylane.transport.link import wire
from raylane.transport.link.connection import Connection, Link, LinkPool
from raylane.transport.link.tls import cleartext_refusal
from raylane.transport.value.ticket import Ticket, timeout_error

log = logging.getLogger("raylane.transport")

CHANNELS = b"channels"
"""Key of the stream by which a listener hands connections to the channel server of its process."""


class Channel(abc.ABC):
    """One end of a way for bytes between two processes, for one transfer at a time. An error leaves it unusable."""

    @abc.abstractmethod
    def send(self, pieces: Sequence[Piece], deadline: Deadline) -> None:
        """Send pieces; wait until their memory may change. RuntimeError if the other process or the deadline ends."""

    @abc.abstractmethod
    def expect(self, pieces: Sequence[Piece]) -> Callable[[Deadline], None]:
        """Prepare memory for the pieces that the other end will send; return a function that waits for them.

        The function raises RuntimeError as `send`. Without that wait the channel cannot be used again.
        """

    def close(self) -> None:  # noqa: B027  # a default, not a duty
        """End the channel. This default is for channels that end with their last reference."""


class ChannelBackend(Backend):
    """A transport that moves blocks through channels. Subclasses open the two ends; everything else is here."""

    @abc.abstractmethod
    def open_channel(self, connection: Connection, rank: int, process: Process) -> Channel:
        """Open this end of a channel, of rank 0 in the source and 1 in the reader; wait for the other end.

        `connection` joins the two ends; its deadline limits the wait. TransportUnavailableError if the transport does
        not work between the two processes.
        """

    def prepare_source(self, process: Process, find: Callable[[str], Backend | None]) -> None:
        """Let readers open channels to this process."""
        process.streams.setdefault(CHANNELS, _channels_of(process).server(find).take)

    def fetch(self, ticket: Ticket, process: Process, deadline: Deadline) -> FetchResult:
        """Receive a value through a channel, which the first fetch opens; one that breaks is opened again once."""
        source, channels = ticket.origin(), _channels_of(process)
        for attempt in (1, 2):
            try:
                with channels.to(self).borrow((source.host, source.port), source, deadline) as link:
                    return _read(link, ticket, process)
            # RuntimeError is of torch or a channel. A connection that ended may also mean that the source's end of the
            # channel failed, so SourceLostError has to be proved.
            except (RuntimeError, SourceLostError) as error:
                if deadline.left_s() == 0:
                    raise timeout_error(ticket, deadline) from error
                process.check_alive(source)
                if attempt == 2:
                    raise TransportError(
                        f"two {self.name} channels to {source} broke during a transfer: {str(error).splitlines()[0]}. "
                        "Its source still holds the value: read it again, or with tensor_transport='tcp'",
                        source=source.label,
                    ) from error
        raise AssertionError("both attempts return or raise")

    def open(self, connection: Connection, rank: int, process: Process) -> Channel:
        """Open this end of a channel as `open_channel`, if this process may use the transport."""
        # Both ends check: neither sends in the clear because only the other one allows it.
        if self.capability.in_the_clear and (refusal := cleartext_refusal(self.name)) is not None:
            raise TransportUnavailableError(refusal)
        if (reason := self.missing()) is not None:
            raise TransportUnavailableError(f"tensor_transport={self.name!r} does not work in this process: {reason}")
        return self.open_channel(connection, rank, process)


def _channels_of(process: Process) -> Channels:
    return process.part(Channels, functools.partial(Channels, process))


def _read(link: ChannelLink, ticket: Ticket, process: Process) -> FetchResult:
    """Read a value through a channel. After an error the channel must be closed: it may still expect the value."""
    blocks = allocate(ticket, process.pool, on_device=link.on_device)
    wait = link.expect(blocks, [block.nbytes for block in ticket.blocks], ticket.devices)
    link.send(wire.Send(ticket.key))

    def receive() -> list[Any]:
        wait(link.deadline)
        return blocks

    answer = read_answer(link, ticket, ticket.nbytes, receive)
    if isinstance(answer, FetchResult):
        return answer
    raise answer_error(answer, ticket.origin(), ticket)


class Channels(ProcessPart):
    """The channels of this process, in both directions, by transport. Thread-safe."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._links: dict[str, LinkPool[ChannelLink]] = {}
        """Idle channels to sources, by transport."""
        self._server: ChannelServer | None = None
        """The ends of channels to readers; None before this process publishes."""
        self._lock = threading.Lock()  # guards the creation of the server

    def to(self, backend: ChannelBackend) -> LinkPool[ChannelLink]:
        """Return the idle channels of a transport to other processes."""
        pool = self._links.get(backend.name)
        if pool is None:
            open_link = functools.partial(ChannelLink, backend=backend, process=self._process)
            # Atomic. Of two threads that come here at once, one drops its pool, which has no thread and no link yet.
            pool = self._links.setdefault(backend.name, self._process.link_pool(open_link))
        return pool

    def server(self, find: Callable[[str], Backend | None]) -> ChannelServer:
        """Return the server for readers; `find` returns the transport of a name."""
        with self._lock:
            if self._server is None:
                self._server = ChannelServer(self._process, find)
            return self._server

    def stats(self) -> dict[str, int]:
        """Return the numbers of idle channels to sources, and of channels that readers have opened."""
        return {
            "idle_channels": sum(map(len, self._links.values())),
            "served_channels": 0 if self._server is None else len(self._server),
        }

    def close(self) -> None:
        """Close all channels."""
        for pool in self._links.values():
            pool.close()
        if self._server is not None:
            self._server.close()


class ChannelLink(Link):
    """The reader's end of a channel, and of the connection that controls it."""

    def __init__(
        self,
        address: wire.Address,
        secret: bytes,
        deadline: Deadline,
        *,
        client: str,
        peer: str,
        backend: ChannelBackend,
        process: Process,
    ) -> None:
        """Connect to a listener and open a channel of a transport; waits until the deadline."""
        super().__init__(address, secret, deadline, client=client, peer=peer)
        try:
            self.send(wire.StreamRequest(CHANNELS, 0, 0))
            answer = self.receive()
            if not isinstance(answer, wire.Streaming):
                raise TransportUnavailableError(
                    f"{peer} opens no channels: {getattr(answer, 'reason', type(answer).__name__)}"
                )
            self.send(wire.OpenChannel(backend.name))
            self.on_device = backend.capability.on_device
            self.channel = backend.open(self, 1, process)
        except BaseException:
            self.close()
            raise

    def expect(
        self, blocks: Sequence[Any], sizes: Sequence[int], devices: Mapping[int, int]
    ) -> Callable[[Deadline], None]:
        """Prepare memory, as `hold.blocks.allocate` makes it, for a value; as `Channel.expect`."""
        return self.channel.expect(pieces_of_target(blocks, sizes, devices if self.on_device else {}))

    def close(self) -> None:
        """Close the connection and the channel; the source then closes its ends."""
        super().close()
        channel = self.__dict__.pop("channel", None)
        if channel is not None:
            channel.close()


class ChannelServer:
    """The source's end of all channels of this process."""

    def __init__(self, process: Process, find: Callable[[str], Backend | None]) -> None:
        """Serve the values of a process's store; `find` returns the transport of a name."""
        self._process, self._find = process, find
        self._lock = threading.Lock()  # guards the two below
        self._open: set[Connection] = set()
        self._closed = False

    def take(self, sock: socket.socket, member: int, level: int) -> None:
        """Serve an authenticated connection on a thread of its own."""
        connection = Connection(sock, Deadline(settings.TIMEOUT_S.read()), peer="a reader")
        with self._lock:
            if not self._closed:
                self._open.add(connection)
                # RuntimeError if the system starts no more threads: the listener then drops the connection.
                threading.Thread(target=self._serve, args=(connection,), name="raylane-channel", daemon=True).start()
                return
        connection.close()

    def close(self) -> None:
        """Close all connections; their threads end."""
        with self._lock:
            self._closed = True
            connections = list(self._open)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes the socket

    def __len__(self) -> int:
        with self._lock:
            return len(self._open)

    def _serve(self, connection: Connection) -> None:
        channel: Channel | None = None
        try:
            connection.send(wire.Streaming(time.perf_counter()))
            meet = connection.receive()
            if not isinstance(meet, wire.OpenChannel):
                raise ProtocolError(f"expected Meet, got {type(meet).__name__}")
            try:
                backend = self._find(meet.backend)
                if not isinstance(backend, ChannelBackend):
                    raise TransportUnavailableError(f"tensor_transport={meet.backend!r} is not registered here")
                channel = backend.open(connection, 0, self._process)
            except (TransportUnavailableError, RuntimeError) as error:
                connection.send(wire.Refusal(str(error)[:500]))
                raise
            while True:
                connection.deadline = Deadline(None)  # until the reader wants the next value, or closes
                message = connection.receive()
                connection.deadline = Deadline(settings.TIMEOUT_S.read())
                if not isinstance(message, wire.Send):
                    raise ProtocolError(f"expected Send, got {type(message).__name__}")
                self._send(connection, channel, message.key, on_device=backend.capability.on_device)
        except (RaylaneError, RuntimeError) as error:  # torch raises RuntimeError when a channel breaks
            log.debug("a channel ended: %s", error)
        except Exception:  # a defect: end this channel only
            log.exception("serving a channel")
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
            if channel is not None:
                channel.close()

    def _send(self, connection: Connection, channel: Channel, key: bytes, *, on_device: bool) -> None:
        entry = self._process.store.get(key)
        if entry is None or not entry.is_intact():
            connection.send(wire.Gone(key, moved=entry is not None))
            return
        by_creator, _ = self._process.store.mark_read(entry, creator=False)
        pieces = pieces_of_entry(entry, self._process.pool, on_device=on_device)
        if pieces is None:
            connection.send(wire.Gone(key, moved=True))
            return
        connection.send(wire.Data(entry.nbytes))
        try:
            channel.send(pieces, connection.deadline)
        except ChannelError as error:  # such as a card without memory: the reader needs to know
            connection.send(wire.Refusal(str(error)[:500]))
            raise
        connection.send(wire.Trailer(entry.is_intact(), entry.is_mutated(), by_creator))

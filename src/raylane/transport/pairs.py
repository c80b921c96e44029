"""Two-sided transfers: a reader and a source open a channel together, and the source sends what the reader asks for.

    reader: PairLink                                source: PairServer, one thread for each channel
      Stream(PAIRS)          ------------------------>  listener hands the connection over
      Meet(backend)          ------------------------>
      Word ...               <----- rendezvous ------>  Word ...             then both send Met
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

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raylane.core.deadline import Deadline, default_timeout_s
from raylane.core.segment import BufferPool
from raylane.errors import ProtocolError, RaylaneError, TransportUnavailableError
from raylane.transport import wire
from raylane.transport.cuda_driver import CudaError
from raylane.transport.cuda_ipc_channel import open_ipc
from raylane.transport.link import Connection, Link
from raylane.transport.managers import ManagerError, open_managed
from raylane.transport.nixl_agent import NixlError
from raylane.transport.nixl_agents import Agents
from raylane.transport.nixl_channel import open_nixl
from raylane.transport.pieces import pieces_of_entry, pieces_of_target
from raylane.transport.store import Store
from raylane.transport.tls import IN_THE_CLEAR, cleartext_refusal

__all__ = ["PAIRS", "PairLink", "PairServer"]

log = logging.getLogger("raylane.transport")

PAIRS = b"pairs"
"""Key of the stream by which a listener hands connections to the pair server of its process."""


class PairLink(Link):
    """The reader's end of a channel, and of the connection that controls it."""

    def __init__(
        self,
        address: wire.Address,
        secret: bytes,
        deadline: Deadline,
        *,
        client: str,
        peer: str,
        backend: str,
        host: str,
        nixl: Agents,
    ) -> None:
        """Connect to a listener and open a channel; waits until the deadline.

        `host` is the address of this node, and `nixl` has the agents of this process.
        """
        super().__init__(address, secret, deadline, client=client, peer=peer)
        try:
            self.send(wire.Stream(PAIRS, 0, 0))
            answer = self.receive()
            if not isinstance(answer, wire.Streaming):
                raise TransportUnavailableError(
                    f"{peer} opens no channels: {getattr(answer, 'reason', type(answer).__name__)}"
                )
            self.send(wire.Meet(backend))
            self.channel = _open(backend, self, 1, host, nixl)
        except BaseException:
            self.close()
            raise

    def expect(
        self, blocks: Sequence[Any], sizes: Sequence[int], devices: Mapping[int, int]
    ) -> Callable[[Deadline], None]:
        """Prepare memory, as `backends.base.allocate` makes it, for a value; as `Channel.expect`."""
        there = devices if self.channel.on_device else {}
        wait: Callable[[Deadline], None] = self.channel.expect(pieces_of_target(blocks, sizes, there))
        return wait

    def close(self) -> None:
        """Close the connection and the channel; the source then closes its ends."""
        super().close()
        _end(self.__dict__.pop("channel", None))


class PairServer:
    """The source's end of all channels of this process."""

    def __init__(self, store: Store, pool: BufferPool, host: str, nixl: Agents) -> None:
        """Serve values of `store`; `pool` gives memory for small blocks. The other arguments are as in PairLink."""
        self._store, self._pool, self._host, self._nixl = store, pool, host, nixl
        self._lock = threading.Lock()  # guards the two below
        self._open: set[Connection] = set()
        self._closed = False

    def take(self, sock: socket.socket, member: int, level: int) -> None:
        """Serve an authenticated connection on a thread of its own."""
        connection = Connection(sock, Deadline(default_timeout_s()), peer="a reader")
        with self._lock:
            if not self._closed:
                self._open.add(connection)
                # RuntimeError if the system starts no more threads: the listener then drops the connection.
                threading.Thread(target=self._serve, args=(connection,), name="raylane-pair", daemon=True).start()
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
        channel = None
        try:
            connection.send(wire.Streaming([], time.perf_counter()))
            meet = connection.receive()
            if not isinstance(meet, wire.Meet):
                raise ProtocolError(f"expected Meet, got {type(meet).__name__}")
            try:
                channel = _open(meet.backend, connection, 0, self._host, self._nixl)
            except (TransportUnavailableError, RuntimeError) as error:
                connection.send(wire.Refusal(str(error)[:500]))
                raise
            while True:
                connection.deadline = Deadline(None)  # until the reader wants the next value, or closes
                message = connection.receive()
                connection.deadline = Deadline(default_timeout_s())
                if not isinstance(message, wire.Send):
                    raise ProtocolError(f"expected Send, got {type(message).__name__}")
                self._send(connection, channel, message.key)
        except (RaylaneError, RuntimeError) as error:  # torch raises RuntimeError when a channel breaks
            log.debug("a channel ended: %s", error)
        except Exception:  # a defect: end this channel only
            log.exception("serving a channel")
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
            _end(channel)

    def _send(self, connection: Connection, channel: Any, key: bytes) -> None:
        entry = self._store.get(key)
        if entry is None or not entry.is_intact():
            connection.send(wire.Gone(key, moved=entry is not None))
            return
        by_creator, _ = self._store.mark_read(entry, creator=False)
        pieces = pieces_of_entry(entry, self._pool, on_device=channel.on_device)
        if pieces is None:
            connection.send(wire.Gone(key, moved=True))
            return
        connection.send(wire.Data(entry.nbytes))
        try:
            channel.send(pieces, connection.deadline)
        except (ManagerError, NixlError, CudaError) as error:  # such as a card without memory: the reader needs to know
            connection.send(wire.Refusal(str(error)[:500]))
            raise
        connection.send(wire.Trailer(entry.is_intact(), entry.is_mutated(), by_creator))


def _end(channel: Any) -> None:
    """End a channel that does not end with its last reference."""
    if hasattr(channel, "close"):
        channel.close()


def _open(backend: str, connection: Connection, rank: int, host: str, nixl: Agents) -> Any:
    """Open this end (rank 0 or 1) of a channel of this backend."""
    # Both ends check: neither sends in the clear because only the other one allows it.
    why = cleartext_refusal(backend) if backend in IN_THE_CLEAR else None
    if why is not None:
        raise TransportUnavailableError(why)
    if backend == "nixl":
        return open_nixl(connection, rank, nixl)
    if backend == "cuda_ipc":
        return open_ipc(connection, rank)
    # torch is loaded here, not at the top: graphs import the transport and must not load torch.
    from raylane.transport.torch_channels import CHANNELS, open_channel

    if backend in CHANNELS:
        return open_channel(backend, connection, rank, host)
    return open_managed(backend, connection, rank)

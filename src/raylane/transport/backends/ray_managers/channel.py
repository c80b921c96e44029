"""Tensor transports that others wrote for Ray (`TensorTransportManager`), as channels of raylane.

A manager moves lists of tensors between two processes. Here each piece of a value is a flat uint8 tensor, and what Ray
passes to the readers, the metadata of the manager, travels over the authenticated connection of the channel:

    reader                                          source
                                                      extract_tensor_transport_metadata
                              <-----------------------  RendezvousEntry(object id, metadata)
      recv_multiple_tensors   <==== the manager =====>  send_multiple_tensors, if it is two-sided
      Taken                   ----------------------->
                                                      garbage_collect

A manager's call runs on a thread of its own, because nothing bounds the time it takes. If the other process or the
deadline ends first, `abort_transport` ends the call where the manager can do that; else the thread is left behind.
"""

from __future__ import annotations

import functools
import logging
import os
import pickle
import secrets
import select
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import ray

from raylane import _ray
from raylane.core.deadline import Deadline
from raylane.errors import ProtocolError
from raylane.transport.backends.base import ChannelError
from raylane.transport.backends.channels import Channel
from raylane.transport.backends.pieces import Piece
from raylane.transport.backends.ray_managers.registered import Registered
from raylane.transport.link import wire
from raylane.transport.link.connection import Connection

log = logging.getLogger("raylane.transport")

ABORT_S = 5.0
"""Seconds in which a call must end after it was aborted."""


class ManagerError(ChannelError):
    """A manager failed, or the other process or the deadline ended during its call. The channel must be closed."""


class ManagerChannel(Channel):
    """One end of a channel, see `channels.Channel`."""

    def __init__(self, registered: Registered, connection: Connection, reader: Any) -> None:
        """Use a connection; `reader` is the handle of the reader's actor, None for other processes."""
        self._manager, self._device, self._name = registered.manager, registered.device, registered.name
        self._connection, self._reader = connection, reader

    def send(self, pieces: Sequence[Piece], deadline: Deadline) -> None:
        """Publish the pieces with the manager, and wait until the reader has them."""
        manager, connection, name = self._manager, self._connection, secrets.token_hex(16)
        # On the CPU these are the published bytes themselves, which the pieces keep alive.
        tensors = [tensor.to(self._device) for tensor in _tensors(pieces)]
        try:
            terms = manager.extract_tensor_transport_metadata(name, tensors)
        except Exception as error:
            raise self._refused(error) from error
        try:
            try:
                communicator = manager.get_communicator_metadata(this_actor(), self._reader, self._name.upper())
            except Exception as error:
                raise self._refused(error) from error
            connection.send(wire.RendezvousEntry(name, _ray.dumps((terms, communicator))))
            if not manager.is_one_sided():
                call = functools.partial(manager.send_multiple_tensors, tensors, terms, communicator)
                self._run(call, name, communicator, deadline, peer_may_send=True)
            taken = connection.receive()
            if not isinstance(taken, wire.Taken):
                raise ProtocolError(f"expected Taken, got {type(taken).__name__}")
        finally:
            # In every case, because the reader asks for the value anew after an error.
            manager.garbage_collect(name, terms, tensors)

    def expect(self, pieces: Sequence[Piece]) -> Callable[[Deadline], None]:
        """Return a function that receives the pieces."""
        return functools.partial(self._take, pieces)

    def _take(self, pieces: Sequence[Piece], deadline: Deadline) -> None:
        message = self._connection.receive()
        if isinstance(message, wire.Refusal):
            raise ManagerError(message.reason)
        if not isinstance(message, wire.RendezvousEntry):
            raise ProtocolError(f"{self._connection.peer} sent {type(message).__name__} instead of metadata")
        terms, communicator = pickle.loads(message.value)
        targets = _tensors(pieces)
        # Tensors of a device cannot be received in place.
        offered = targets if self._device == "cpu" else None
        call = functools.partial(
            self._manager.recv_multiple_tensors, message.key, terms, communicator, target_buffers=offered
        )
        received = self._run(call, message.key, communicator, deadline, peer_may_send=False)
        if [part.numel() for part in received] != [part.numel() for part in targets]:
            raise ManagerError(f"{type(self._manager).__name__} returned tensors of other sizes than were sent")
        for target, tensor in zip(targets, received, strict=True):
            if target.data_ptr() != tensor.data_ptr():  # the manager did not use the target buffers
                target.copy_(tensor)
        # Only now may the source collect the transfer: a one-sided manager reads until its call returns.
        self._connection.send(wire.Taken())

    def _run(
        self, call: Callable[[], Any], name: str, communicator: Any, deadline: Deadline, *, peer_may_send: bool
    ) -> Any:
        """Return the result of a manager's call; ManagerError if it fails, or the peer or the deadline ends first."""
        result: Future[Any] = Future()
        done = os.eventfd(0, os.EFD_CLOEXEC)
        # An eventfd, because the thread below waits for the end of the call and for the connection at the same time.
        result.add_done_callback(lambda _: os.eventfd_write(done, 1))
        try:
            threading.Thread(target=_fill, args=(result, call), name="raylane-manager", daemon=True).start()
        except BaseException:
            os.close(done)
            raise
        end = _wait(done, self._connection.socket, deadline, peer_may_send=peer_may_send)
        if end is not None:
            self._abort(result, name, communicator)
        # After the write: callbacks run in the order in which they were added.
        result.add_done_callback(lambda _: os.close(done))
        if end is not None:
            if _has_data(self._connection.socket):
                message = self._connection.receive()
                if isinstance(message, wire.Refusal):
                    end = message.reason or end
            raise ManagerError(end)
        if (error := result.exception()) is not None:
            raise self._refused(error) from error
        return result.result()

    def _abort(self, result: Future[Any], name: str, communicator: Any) -> None:
        manager = self._manager
        if manager.can_abort_transport():
            try:
                manager.abort_transport(name, communicator)
            except Exception as error:
                log.warning("%s could not abort a transfer: %r", type(manager).__name__, error)
            # The call must have ended before the memory is used again.
            if wait([result], ABORT_S).done:
                return
        log.warning("a thread waits in %s for a transfer whose other end is gone", type(manager).__name__)

    def _refused(self, error: BaseException) -> ManagerError:
        return ManagerError(f"{type(self._manager).__name__}: {type(error).__name__}: {error}")


def _tensors(pieces: Sequence[Piece]) -> list[Any]:
    # torch is loaded by whoever has tensors to send, and not by graphs, which import this module through the listener.
    import torch

    return [torch.frombuffer(piece.buffer, dtype=torch.uint8) for piece in pieces]


def _fill(result: Future[Any], call: Callable[[], Any]) -> None:
    try:
        value = call()
    except BaseException as error:
        result.set_exception(error)
    else:
        result.set_result(value)


def _wait(done: int, sock: socket.socket, deadline: Deadline, *, peer_may_send: bool) -> str | None:
    """Wait for an eventfd; return why the wait ended before, None if it did not."""
    poll = select.poll()
    poll.register(done, select.POLLIN)
    poll.register(sock, select.POLLIN | select.POLLRDHUP)
    while True:
        remaining_s = deadline.left_s()
        ready = [fd for fd, _ in poll.poll(None if remaining_s is None else remaining_s * 1000)]
        if done in ready:
            return None
        if not ready:
            return "the deadline passed"
        if not peer_may_send or not _has_data(sock):
            return "the other process ended the transfer"
        poll.unregister(sock)  # it is done before this end, and says so; later end of the connection shows there, too


def _has_data(sock: socket.socket) -> bool:
    try:
        return bool(sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:
        return False


def this_actor() -> Any:
    """Return the handle of this process's actor, None in other processes."""
    return None if _ray.current_actor_id() is None else ray.get_runtime_context().current_actor

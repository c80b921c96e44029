"""cuda_ipc: the source tells where its CUDA tensors lie, and a reader of its host copies them on the GPU.

    reader                                          source
                              <-----------------------  Allocations, then the bytes of tensors in host memory
      (maps, copies, unmaps)                            (keeps the value)
      Taken                   ----------------------->

The source answers Taken with the state of the memory, as in every channel (`channels`). It keeps the value without a
limit in time until then, or until the connection ends, which the end of the reader does: CUDA does not define what a
mapping shows after its owner has given the memory back to the driver.

Written after the documentation of CUDA 12; run on one GPU, never between two (`tests/gpu`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from raylane.core.deadline import Deadline
from raylane.errors import ProtocolError, TransportUnavailableError
from raylane.transport.backends.base import Capability, Process
from raylane.transport.backends.channels import Channel, ChannelBackend
from raylane.transport.backends.cuda import driver as cuda_driver
from raylane.transport.backends.pieces import Piece, receive_host_pieces, send_host_pieces
from raylane.transport.link import wire
from raylane.transport.link.connection import Connection

MAX_PLACES = 4096
"""Number of pieces in one frame: frames are limited (`wire.MAX_FRAME_BYTES`)."""
NEVER = "never"
"""Key of the RendezvousEntry in which the source says why its memory can never be shared."""


class IpcChannel(Channel):
    """One end of a channel, see `channels.Channel`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, pieces: Sequence[Piece], deadline: Deadline) -> None:
        """Tell where the pieces lie, and wait until the reader has copied them."""
        del deadline  # that of the connection, which every message obeys
        places = []
        try:
            for piece in pieces:
                if piece.on_device:
                    device, block = piece.memory.device, piece.memory.block
                    handle, offset = cuda_driver.allocation_of(block.start, device)
                    places.append((handle, offset, block.nbytes, cuda_driver.uuid_of(device)))
        except cuda_driver.CudaError as error:
            if error.permanent:
                self._connection.send(wire.RendezvousEntry(NEVER, str(error).encode()))
            raise
        for first in range(0, max(1, len(places)), MAX_PLACES):
            some = places[first : first + MAX_PLACES]
            self._connection.send(wire.Allocations(some, first + MAX_PLACES < len(places)))
        send_host_pieces(self._connection, pieces)
        self._connection.deadline = Deadline(None)
        taken = self._connection.receive()
        if not isinstance(taken, wire.Taken):
            raise ProtocolError(f"expected Taken, got {type(taken).__name__}")

    def expect(self, pieces: Sequence[Piece]) -> Callable[[Deadline], None]:
        """Return a function that copies the pieces; nothing has to be prepared before the source is asked."""
        return functools.partial(self._take, pieces)

    def _take(self, pieces: Sequence[Piece], deadline: Deadline) -> None:
        del deadline
        connection = self._connection
        places: list[wire.DevicePlace] = []
        more = True
        while more:
            answer = connection.receive()
            if isinstance(answer, wire.RendezvousEntry) and answer.key == NEVER:
                raise TransportUnavailableError(f"{connection.peer}: {answer.value.decode()}")
            if isinstance(answer, wire.Refusal):  # such as a device without memory
                raise cuda_driver.CudaError(str(connection.peer), 0, answer.reason)
            if not isinstance(answer, wire.Allocations):
                raise ProtocolError(f"{connection.peer} answered {type(answer).__name__} instead of Allocations")
            places += answer.places
            more = answer.more
        targets = [piece for piece in pieces if piece.on_device]
        # Compared before the copy: the sizes decide how far it writes.
        if [place[2] for place in places] != [piece.memory.block.nbytes for piece in targets]:
            raise ProtocolError(f"{connection.peer} offered memory of other sizes than the value has")
        receive_host_pieces(connection, pieces)
        try:
            _copy(targets, places)
        except cuda_driver.CudaError as error:
            if not error.permanent:
                raise
            # The memory cannot be reached from here, now and later: another transport may do it.
            raise TransportUnavailableError(
                f"cuda_ipc cannot bring tensors of {connection.peer} to this process: {error}. Use "
                "tensor_transport='nccl', or 'host'"
            ) from error
        connection.send(wire.Taken())


def _copy(pieces: Sequence[Piece], places: Sequence[wire.DevicePlace]) -> None:
    """Copy from another process's memory into these pieces; wait for the copies."""
    import torch

    from raylane.transport.hold.device_memory import on_own_stream

    mine = [cuda_driver.uuid_of(number) for number in range(torch.cuda.device_count())]
    # One context for each mapping, so pieces are grouped by the devices of both sides.
    routes = [
        (cuda_driver.pick_device(p[3], mine, piece.memory.device), piece)
        for p, piece in zip(places, pieces, strict=True)
    ]
    for device in sorted({opened for opened, _ in routes}):
        some = [(p, piece) for p, (opened, piece) in zip(places, routes, strict=True) if opened == device]
        with cuda_driver.mapped([handle for (handle, *_), _ in some], device) as start:
            for target in {piece.buffer.device for _, piece in some}:
                with on_own_stream(target, after_current=True) as stream:
                    for (handle, offset, nbytes, _), piece in some:
                        if piece.buffer.device == target:
                            source = start[handle] + offset
                            cuda_driver.copy_async(piece.memory.block.start, source, nbytes, stream.cuda_stream)


class CudaIpcBackend(ChannelBackend):
    """Copies between processes on one host, of memory that the source lets the reader map."""

    name = "cuda_ipc"
    capability = Capability(
        summary="copied on the GPU from the source's mapped memory",
        rank=20,
        same_host=True,
        needs_device=True,
        on_device=True,
        remedy="nothing without CUDA tensors. For them, give both actors a GPU of the same host (num_gpus).",
    )

    def open_channel(self, connection: Connection, rank: int, process: Process) -> Channel:
        """Open an end of a channel. TransportUnavailableError if a process has no CUDA."""
        try:
            cuda_driver.driver()
        except cuda_driver.CudaError as error:
            raise TransportUnavailableError(f"cuda_ipc needs a CUDA device in both processes: {error}") from error
        if rank == 0:
            connection.send(wire.ChannelOpened())
        elif isinstance(answer := connection.receive(), wire.Refusal):
            raise TransportUnavailableError(f"{connection.peer} cannot open the channel: {answer.reason}")
        elif not isinstance(answer, wire.ChannelOpened):
            raise ProtocolError(f"{connection.peer} sent {type(answer).__name__} instead of ChannelOpened")
        return IpcChannel(connection)

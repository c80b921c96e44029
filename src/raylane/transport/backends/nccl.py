"""nccl: CUDA tensors go from GPU to GPU through NCCL; neither process copies them to the host.

Every process needs a GPU of its own. Run between two processes on one GPU only, which NCCL took for two hosts.
"""

from __future__ import annotations

import functools
import math
import select
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from raylane.core.deadline import Deadline
from raylane.core.process.environment import variables
from raylane.errors import TransportUnavailableError
from raylane.transport.backends.base import Capability, Process
from raylane.transport.backends.channels import Channel, ChannelBackend
from raylane.transport.backends.pieces import Piece, receive_host_pieces, send_host_pieces
from raylane.transport.backends.torch_group import Rendezvous, time_limit
from raylane.transport.hold.device_memory import publishing_device
from raylane.transport.link.connection import Connection


class NcclBackend(ChannelBackend):
    """Transfer through a NCCL process group of source and reader."""

    name = "nccl"
    capability = Capability(
        summary="sent by the source through NCCL, from GPU to GPU",
        rank=None,
        same_host=True,
        across_hosts=True,
        two_sided=True,
        needs_device=True,
        on_device=True,
        in_the_clear=True,
        remedy="nothing if cuda_ipc works. For nccl, give each actor a GPU of its own (num_gpus=1).",
    )

    def missing(self) -> str | None:
        """Return that torch has no NCCL or the process no GPU, or None."""
        if not dist.is_nccl_available():
            return "its torch is built without NCCL; use tensor_transport='gloo'"
        if not torch.cuda.is_available():
            return "it has no CUDA device; give the actor a GPU (num_gpus), or use tensor_transport='gloo'"
        return None

    def open_channel(self, connection: Connection, rank: int, process: Process) -> Channel:
        """Open this end of a process group of two."""
        store = Rendezvous(connection)
        channel = NcclChannel(store, rank, connection)
        store.finish()
        return channel


_NCCL_SETTINGS = {
    # torch ends the process when a peer is lost, or when its watchdog is late. Here an error ends the channel only.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # Waiting would not end with the deadline: `_run` asks instead.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
}
_LOOK_MS = 1


class NcclChannel(Channel):
    """NCCL between one device of each process: that of the published value, and the current one of the reader.

    Tensors of other devices are copied there first. Tensors in host memory travel over the connection.
    """

    def __init__(self, store: Store, rank: int, connection: Connection) -> None:
        deadline = connection.deadline
        self._connection = connection
        self._peer = 1 - rank
        # Channels are served on threads of raylane, whose current device is always 0.
        self._device = torch.device("cuda", torch.cuda.current_device() if rank else publishing_device())
        self._stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = time_limit(Deadline(None))  # the deadlines of transfers are watched here
        remaining_s = deadline.left_s()
        limit = {} if remaining_s is None else {"TORCH_NCCL_NONBLOCKING_TIMEOUT": str(math.ceil(remaining_s))}
        with variables(_NCCL_SETTINGS | limit):  # torch reads these when it creates a group
            self._group: Any = nccl(store, rank, 2, options)
        # NCCL connects at the first transfer, and needs the rendezvous for it.
        try:
            self._run([torch.zeros(1, dtype=torch.uint8, device=self._device)], deadline, send=rank == 0)
        except RuntimeError as error:
            if deadline.left_s() == 0 or _has_ended(connection):
                raise  # says nothing about NCCL here
            raise TransportUnavailableError(
                f"NCCL cannot connect this process to {connection.peer}: {str(error).splitlines()[0]}. Two processes "
                "on one GPU need tensor_transport='cuda_ipc'"
            ) from error

    def close(self) -> None:
        """End the group with whatever it does; torch would wait for it, and warn."""
        self._group.abort()

    def send(self, pieces: Sequence[Piece], deadline: Deadline) -> None:
        """Send pieces; wait until they are sent."""
        send_host_pieces(self._connection, pieces)
        self._run([piece.buffer for piece in pieces if piece.on_device], deadline, send=True)

    def expect(self, pieces: Sequence[Piece]) -> Callable[[Deadline], None]:
        """Return a function that receives the pieces; nothing has to be prepared."""
        return functools.partial(self._take, pieces)

    def _take(self, pieces: Sequence[Piece], deadline: Deadline) -> None:
        receive_host_pieces(self._connection, pieces)
        self._run([piece.buffer for piece in pieces if piece.on_device], deadline, send=False)

    def _run(self, tensors: Sequence[torch.Tensor], deadline: Deadline, *, send: bool) -> None:
        """Send or receive tensors; RuntimeError if the deadline or the connection ends first."""
        with torch.cuda.device(self._device):
            # Kernels before may still use memory that the allocator gave to the tensors.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                local = [source if source.device == self._device else source.to(self._device) for source in tensors]
                call = self._group.send if send else self._group.recv
                for work in [call([tensor], self._peer, 0) for tensor in local]:
                    work.wait()  # makes the stream wait, not this thread
                for tensor, received in zip(tensors, local, strict=True):
                    if not send and received is not tensor:
                        tensor.copy_(received)
                done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
                done.record()
            while not done.query():
                # The other process may have died: NCCL alone would wait for ever.
                if _has_ended(self._connection, _LOOK_MS) or deadline.left_s() == 0:
                    self._group.abort()
                    raise RuntimeError("the other process left, or the deadline passed")


def _has_ended(connection: Connection, wait_ms: int = 0) -> bool:
    """Return True if the other end has closed a connection; wait for it at most so long."""
    poll = select.poll()
    poll.register(connection.socket, select.POLLRDHUP)
    return bool(poll.poll(wait_ms))

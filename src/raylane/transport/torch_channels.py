"""Channels of torch between two processes, and the rendezvous that opens them. Loaded on first use: imports torch.

A channel is a process group of two, apart from every group that the user's program creates. Both ends open it at the
same time over an authenticated connection (`pairs`), on which they exchange what torch would put into a store.
"""

from __future__ import annotations

import functools
import math
import select
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from raylane.core.deadline import Deadline
from raylane.core.variables import variables
from raylane.errors import TransportUnavailableError
from raylane.transport import wire
from raylane.transport.cuda_ipc_channel import receive_host_pieces, send_host_pieces
from raylane.transport.device_memory import publishing_device
from raylane.transport.link import Connection
from raylane.transport.pieces import Piece

__all__ = ["CHANNELS", "Channel", "missing", "open_channel"]

NO_LIMIT_S = 10 * 365 * 86400.0
"""Limit in seconds that stands for none: torch takes no infinite time."""


class Channel(Protocol):
    """Way for bytes between two processes, one transfer at a time. An error leaves it unusable."""

    on_device: bool
    """True if it takes pieces in the memory of devices."""

    def send(self, pieces: Sequence[Piece], deadline: Deadline) -> None:
        """Send pieces; wait until their memory may change. RuntimeError if the other process or the deadline ends."""

    def expect(self, pieces: Sequence[Piece]) -> Callable[[Deadline], None]:
        """Prepare memory for the pieces that the other end will send; return a function that waits for them.

        The function raises RuntimeError as `send`. Without that wait the channel cannot be used again.
        """


class _Rendezvous(Store):
    """Store of one channel: each end has what itself and the other end have set. Used by one thread."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = data
        self._connection.send(wire.Word(key, data))

    def get(self, key: str) -> bytes:
        while key not in self._values:
            self._take(self._connection.receive())
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:  # NCCL's monitor asks every second
        return all(key in self._values for key in keys)

    def finish(self) -> None:
        """Tell the other end that this one is open, and wait for the same; words that nobody needs are dropped."""
        self._connection.send(wire.Met())
        while not isinstance(message := self._connection.receive(), wire.Met):
            self._take(message)

    def _take(self, message: wire.Message) -> None:
        if isinstance(message, wire.Refusal):
            raise TransportUnavailableError(f"{self._connection.peer} cannot open the channel: {message.reason}")
        if not isinstance(message, wire.Word):
            raise TransportUnavailableError(
                f"{self._connection.peer} sent {type(message).__name__} instead of its part of the rendezvous"
            )
        self._values[message.key] = message.value


class _GlooChannel:
    """gloo over TCP between the addresses of the two nodes."""

    on_device = False

    def __init__(self, store: Store, rank: int, host: str, deadline: Deadline, connection: Connection) -> None:
        del connection  # gloo opens its own
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        # By address: gloo would otherwise resolve the name of the host, which need not lead to this node.
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = _limit(deadline)
        self._group: Any = gloo(store, rank, 2, options)
        self._peer = 1 - rank

    def send(self, pieces: Sequence[Piece], deadline: Deadline) -> None:
        _wait([self._group.send([one], self._peer, i) for i, one in enumerate(_tensors(pieces))], deadline)

    def expect(self, pieces: Sequence[Piece]) -> Callable[[Deadline], None]:
        works = [self._group.recv([one], self._peer, i) for i, one in enumerate(_tensors(pieces))]
        return functools.partial(_wait, works)


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


class _NcclChannel:
    """NCCL between one device of each process: that of the published value, and the current one of the reader.

    Tensors of other devices are copied there first. Tensors in host memory travel over the connection.
    """

    on_device = True

    def __init__(self, store: Store, rank: int, host: str, deadline: Deadline, connection: Connection) -> None:
        self._connection = connection
        self._peer = 1 - rank
        # Channels are served on threads of raylane, whose current device is always 0.
        self._device = torch.device("cuda", torch.cuda.current_device() if rank else publishing_device())
        self._stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = _limit(Deadline(None))  # the deadlines of transfers are watched here
        left = deadline.left_s()
        limit = {} if left is None else {"TORCH_NCCL_NONBLOCKING_TIMEOUT": str(math.ceil(left))}
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
        send_host_pieces(self._connection, pieces)
        self._run([piece.buffer for piece in pieces if piece.on_device], deadline, send=True)

    def expect(self, pieces: Sequence[Piece]) -> Callable[[Deadline], None]:
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
                here = [one if one.device == self._device else one.to(self._device) for one in tensors]
                call = self._group.send if send else self._group.recv
                for work in [call([tensor], self._peer, 0) for tensor in here]:
                    work.wait()  # makes the stream wait, not this thread
                for tensor, received in zip(tensors, here, strict=True):
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


def _tensors(pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """Return the pieces, and one byte that marks their end."""
    # The user may have set another default device (`torch.device("meta")`).
    end = torch.zeros(1, dtype=torch.uint8, device="cpu")
    return [*(torch.frombuffer(one.buffer, dtype=torch.uint8) for one in pieces), end]


def _wait(works: Sequence[Any], deadline: Deadline) -> None:
    # The last one first. When a connection ends, gloo (torch 2.13) tells every transfer that has not begun, but not
    # the one in progress, which then waits until its timeout. Messages arrive in order, so the byte at the end is the
    # last to be in progress.
    for work in reversed(works):
        work.wait(_limit(deadline))


CHANNELS: Mapping[str, Callable[[Store, int, str, Deadline, Connection], Channel]] = {
    "gloo": _GlooChannel,
    "nccl": _NcclChannel,
}
"""Makers of channels by the name of the transport."""


def missing(backend: str) -> str | None:
    """Return why this process cannot open channels of a backend, None if it can."""
    if backend not in CHANNELS:
        return f"this raylane has no channel {backend!r}; it has {', '.join(CHANNELS)}"
    if backend == "nccl":
        return missing_nccl()
    if not dist.is_gloo_available():
        return "its torch is built without gloo; use tensor_transport='tcp'"
    return None


def missing_nccl() -> str | None:
    """Return why this process cannot use NCCL, None if it can."""
    if not dist.is_nccl_available():
        return "its torch is built without NCCL; use tensor_transport='gloo'"
    if not torch.cuda.is_available():
        return "it has no CUDA device; give the actor a GPU (num_gpus), or use tensor_transport='gloo'"
    return None


def open_channel(backend: str, connection: Connection, rank: int, host: str) -> Channel:
    """Open this end (rank 0 or 1) of a channel; waits for the other end until the deadline of the connection."""
    if (reason := missing(backend)) is not None:
        raise TransportUnavailableError(reason)
    store = _Rendezvous(connection)
    channel = CHANNELS[backend](store, rank, host, connection.deadline, connection)
    store.finish()
    return channel


def _limit(deadline: Deadline) -> timedelta:
    left = deadline.left_s()
    return timedelta(seconds=NO_LIMIT_S if left is None else max(left, 1e-3))

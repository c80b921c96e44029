"""Channels of torch between two processes, and the rendezvous that opens them. Loaded on first use: imports torch.

A channel is a process group of two, apart from every group that the user's program creates. Both ends open it at the
same time over an authenticated connection (`pairs`), on which they exchange what torch would put into a store.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from raylane.core.deadline import Deadline
from raylane.errors import TransportUnavailableError
from raylane.transport import wire
from raylane.transport.link import Connection
from raylane.transport.pieces import Piece

__all__ = ["CHANNELS", "Channel", "missing", "open_channel"]

NO_LIMIT_S = 10 * 365 * 86400.0
"""Limit in seconds that stands for none: torch takes no infinite time."""


class Channel(Protocol):
    """Way for bytes between two processes, one transfer at a time. An error leaves it unusable."""

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

    def __init__(self, store: Store, rank: int, host: str, deadline: Deadline) -> None:
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


def _tensors(pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """Return the pieces, and one byte that marks their end."""
    return [*(torch.frombuffer(one.buffer, dtype=torch.uint8) for one in pieces), torch.zeros(1, dtype=torch.uint8)]


def _wait(works: Sequence[Any], deadline: Deadline) -> None:
    # The last one first. When a connection ends, gloo (torch 2.13) tells every transfer that has not begun, but not
    # the one in progress, which then waits until its timeout. Messages arrive in order, so the byte at the end is the
    # last to be in progress.
    for work in reversed(works):
        work.wait(_limit(deadline))


CHANNELS: Mapping[str, Callable[[Store, int, str, Deadline], Channel]] = {"gloo": _GlooChannel}
"""Makers of channels by the name of the transport."""


def missing(backend: str) -> str | None:
    """Return why this process cannot open channels of a backend, None if it can."""
    if backend not in CHANNELS:
        return f"this raylane has no channel {backend!r}; it has {', '.join(CHANNELS)}"
    if not dist.is_gloo_available():
        return "its torch is built without gloo; use tensor_transport='tcp'"
    return None


def open_channel(backend: str, connection: Connection, rank: int, host: str) -> Channel:
    """Open this end (rank 0 or 1) of a channel; waits for the other end until the deadline of the connection."""
    if (reason := missing(backend)) is not None:
        raise TransportUnavailableError(reason)
    store = _Rendezvous(connection)
    channel = CHANNELS[backend](store, rank, host, connection.deadline)
    store.finish()
    return channel


def _limit(deadline: Deadline) -> timedelta:
    left = deadline.left_s()
    return timedelta(seconds=NO_LIMIT_S if left is None else max(left, 1e-3))

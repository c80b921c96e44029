"""Rendezvous of two processes that form a process group of torch, for the transports gloo and nccl.

A channel is a process group of two, apart from every group that the user's program creates. Both ends open it at the
same time over an authenticated connection (`channels`), on which they exchange what torch would put into a store.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from raylane.core.deadline import Deadline
from raylane.errors import TransportUnavailableError
from raylane.transport.link import wire
from raylane.transport.link.connection import Connection

NO_LIMIT_S = 10 * 365 * 86400.0
"""Limit in seconds that stands for none: torch takes no infinite time."""


class Rendezvous(Store):
    """Store of one channel: each end has what itself and the other end have set. Used by one thread."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = data
        self._connection.send(wire.RendezvousEntry(key, data))

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
        self._connection.send(wire.ChannelOpened())
        while not isinstance(message := self._connection.receive(), wire.ChannelOpened):
            self._take(message)

    def _take(self, message: wire.Message) -> None:
        if isinstance(message, wire.Refusal):
            raise TransportUnavailableError(f"{self._connection.peer} cannot open the channel: {message.reason}")
        if not isinstance(message, wire.RendezvousEntry):
            raise TransportUnavailableError(
                f"{self._connection.peer} sent {type(message).__name__} instead of its part of the rendezvous"
            )
        self._values[message.key] = message.value


def time_limit(deadline: Deadline) -> timedelta:
    """Return the rest of a deadline as torch wants it."""
    remaining_s = deadline.left_s()
    return timedelta(seconds=NO_LIMIT_S if remaining_s is None else max(remaining_s, 1e-3))

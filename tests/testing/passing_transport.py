"""A transport of another package: one file. Its blocks travel over the connection that controls the channel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from raylane.core.deadline import Deadline
from raylane.transport.backends.base import Capability, Process
from raylane.transport.backends.channels import Channel, ChannelBackend
from raylane.transport.backends.pieces import Piece, receive_host_pieces, send_host_pieces
from raylane.transport.link.connection import Connection


class PassingChannel(Channel):
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, pieces: Sequence[Piece], deadline: Deadline) -> None:
        send_host_pieces(self._connection, pieces)

    def expect(self, pieces: Sequence[Piece]) -> Callable[[Deadline], None]:
        return functools.partial(self._receive, pieces)

    def _receive(self, pieces: Sequence[Piece], deadline: Deadline) -> None:
        receive_host_pieces(self._connection, pieces)


class PassingBackend(ChannelBackend):
    name = "passing"
    capability = Capability(
        summary="over the connection that controls the channel",
        rank=None,
        same_process=True,
        same_host=True,
        across_hosts=True,
        two_sided=True,
    )

    def open_channel(self, connection: Connection, rank: int, process: Process) -> Channel:
        return PassingChannel(connection)

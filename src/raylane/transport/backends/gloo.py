"""gloo: the source sends the blocks through a process group of torch's gloo backend.

For programs that ask for it by name. `auto` takes `host` or `tcp`, which need no channel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from raylane import _ray
from raylane.core.deadline import Deadline
from raylane.transport.backends.base import Capability, Process
from raylane.transport.backends.channels import Channel, ChannelBackend
from raylane.transport.backends.pieces import Piece
from raylane.transport.backends.torch_group import Rendezvous, time_limit
from raylane.transport.link.connection import Connection


class GlooBackend(ChannelBackend):
    """Transfer through a gloo process group of source and reader."""

    name = "gloo"
    capability = Capability(
        summary="sent by the source through gloo",
        rank=None,
        same_process=True,
        same_host=True,
        across_hosts=True,
        two_sided=True,
        in_the_clear=True,
        remedy="nothing if tcp works. For gloo, allow TCP connections between these hosts, on all ports.",
    )

    def missing(self) -> str | None:
        """Return that torch has no gloo, or None."""
        return None if dist.is_gloo_available() else "its torch is built without gloo; use tensor_transport='tcp'"

    def open_channel(self, connection: Connection, rank: int, process: Process) -> Channel:
        """Open this end of a process group of two."""
        store = Rendezvous(connection)
        channel = GlooChannel(store, rank, connection.deadline)
        store.finish()
        return channel


class GlooChannel(Channel):
    """gloo over TCP between the addresses of the two nodes."""

    def __init__(self, store: Store, rank: int, deadline: Deadline) -> None:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        # By address: gloo would otherwise resolve the name of the host, which need not lead to this node.
        options._devices = [gloo.create_device(hostname=_ray.node_ip())]
        options._timeout = time_limit(deadline)
        self._group: Any = gloo(store, rank, 2, options)
        self._peer = 1 - rank

    def send(self, pieces: Sequence[Piece], deadline: Deadline) -> None:
        """Send pieces; wait until they are sent."""
        _wait([self._group.send([tensor], self._peer, i) for i, tensor in enumerate(_tensors(pieces))], deadline)

    def expect(self, pieces: Sequence[Piece]) -> Callable[[Deadline], None]:
        """Begin to receive pieces; return a function that waits for them."""
        works = [self._group.recv([tensor], self._peer, i) for i, tensor in enumerate(_tensors(pieces))]
        return functools.partial(_wait, works)


def _tensors(pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """Return the pieces, and one byte that marks their end."""
    # The user may have set another default device (`torch.device("meta")`).
    end = torch.zeros(1, dtype=torch.uint8, device="cpu")
    return [*(torch.frombuffer(piece.buffer, dtype=torch.uint8) for piece in pieces), end]


def _wait(works: Sequence[Any], deadline: Deadline) -> None:
    # The last one first. When a connection ends, gloo (torch 2.13) tells every transfer that has not begun, but not
    # the one in progress, which then waits until its timeout. Messages arrive in order, so the byte at the end is the
    # last to be in progress.
    for work in reversed(works):
        work.wait(time_limit(deadline))

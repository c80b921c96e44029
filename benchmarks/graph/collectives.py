"""Collectives of the benchmark `graph`: the actors, and the graph of each contender, which sums 1 MB over all actors.

In every graph an actor gives a tensor that it keeps, and sends the driver one number of the sum.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import ray
from ray import dag
from ray.experimental import collective
from ray.experimental.channel.cpu_communicator import CPUCommunicator

import raylane

FLOATS = 262_144
"""Elements of the tensor: 1 MB of float32."""


class Reducer:
    """Actor with one tensor of ones."""

    def __init__(self) -> None:
        import torch

        self.tensor = torch.ones(FLOATS)

    def pid(self) -> int:
        return os.getpid()

    def give(self, _: Any) -> Any:
        return self.tensor

    def take(self, tensor: Any) -> float:
        return float(tensor[-1])

    def join(self, port: int, rank: int, size: int) -> None:
        """Open torch's default process group, as a program of the user would."""
        import torch.distributed as dist

        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)

    def reduce(self, _: Any) -> float:
        """Sum in the method itself, without changing the tensor that the actor keeps."""
        import torch.distributed as dist

        # The other contenders give new memory too.
        total = self.tensor.clone()
        dist.all_reduce(total)
        return self.take(total)


def bind_raylane(actors: Sequence[Any]) -> Any:
    """Return raylane's graph."""
    with raylane.InputNode() as x:
        summed = raylane.graph.allreduce.bind([raylane.bind(actor.give, x) for actor in actors])
        return raylane.MultiOutputNode([raylane.bind(a.take, value) for a, value in zip(actors, summed, strict=True)])


def bind_in_method(actors: Sequence[Any]) -> Any:
    """Return a graph of raylane whose methods call torch.distributed."""
    with raylane.InputNode() as x:
        return raylane.MultiOutputNode([raylane.bind(actor.reduce, x) for actor in actors])


def bind_ray(actors: Sequence[Any]) -> Any:
    """Return Ray's graph. Its only communicator for CPUs is one actor that adds the tensors of all."""
    with dag.InputNode() as x:
        shares = [actor.give.bind(x) for actor in actors]
        summed = collective.allreduce.bind(shares, transport=CPUCommunicator(len(actors), list(actors)))
        return dag.MultiOutputNode([a.take.bind(value) for a, value in zip(actors, summed, strict=True)])


def open_groups(actors: Sequence[Any], timeout_s: float) -> None:
    """Open torch's default process group in all actors."""
    # A port that is free now; nothing else on this machine takes it within the next second.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.get([a.join.remote(port, rank, len(actors)) for rank, a in enumerate(actors)], timeout=timeout_s)

"""A worker that takes part in collectives, and forms its process groups again."""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist

CALLS = "calls that this worker has ended"


class Summer:
    """Sums over all ranks, and counts its calls."""

    def __init__(self, is_reluctant: bool = False) -> None:
        self.is_reluctant = is_reluctant
        self.calls = 0
        self.form()

    def form(self) -> None:
        dist.init_process_group("gloo")
        # Pairs, as tensor parallelism has them: a rank may wait for one that waits for the dead one.
        pairs = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size() - 1, 2)]
        self.pair = pairs[dist.get_rank() // 2] if dist.get_rank() // 2 < len(pairs) else None

    def on_regroup(self, rank: int, world: int) -> None:
        assert (rank, world) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        if self.is_reluctant:
            raise RuntimeError("this worker cannot form its groups again")
        self.form()

    def sum(self, number: float, dies: int | None = None, raises: int | None = None) -> tuple[float, int, int]:
        """Return the sum over all ranks, the number of this worker's calls, and its process."""
        rank = dist.get_rank()
        if rank == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == raises:
            raise ValueError(f"rank {rank} leaves the step")
        tensor = torch.full((1000,), number)
        if self.pair is not None:
            dist.all_reduce(tensor, group=self.pair)
            tensor.fill_(number)
        dist.all_reduce(tensor)
        self.calls += 1
        return float(tensor[0]), self.calls, os.getpid()

    def quiet(self) -> int:
        return os.getpid()

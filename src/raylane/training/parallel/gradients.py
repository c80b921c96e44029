"""Sum of the gradients of all workers, for a model that every worker holds whole (`mesh.shards_parameters`).

On several hosts, and on GPUs, the sum is one all-reduce. CPU workers of one host use shared memory instead, because
gloo moves every byte through sockets (10 MB, two workers: 14 ms; through shared memory 4 ms):

    slot 0     gradients of rank 0     written by rank 0
    slot 1     gradients of rank 1     written by rank 1
    ...
    result     sum over the slots      rank r writes the r-th part of it

    write own slot | barrier | add one part of all slots into the result | barrier | copy the result

A rank writes its slot again, or its part of the result, only after all ranks have passed the barriers behind the reads
of the step before. Called by `step`; made by `build`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from raylane.core.memory.segment import Segment
from raylane.training.parallel.mesh import SHARED_BYTES, shares_gradients
from raylane.training.parallel.sharded import gathered

_DATA_AT = 4096
"""Offset of the numbers in the segment, whose first page has a key of its own."""


class GradientSum:
    """Sum of the gradients over all workers of the default process group; all calls are collective."""

    def __init__(
        self, numel: int, num_parameters: int, device: torch.device, *, shared_bytes: int = SHARED_BYTES
    ) -> None:
        """Prepare sums for `num_parameters` parameters of `numel` float32 numbers in all.

        Shares memory if all workers can, and if that takes at most `shared_bytes`.
        """
        numel += num_parameters  # one mark each: see `__call__`
        self._world = dist.get_world_size()
        self._shared: Tensor | None = None
        """float32 [workers + 1, numel]: one slot for each worker, then the result; None for an all-reduce."""
        if device.type == "cpu" and shares_gradients(numel, self._world, shared_bytes):
            self._shared = _share(self._world + 1, numel)

    def __call__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replace each gradient by its sum over all workers; one that no worker has stays None."""
        if self._world == 1:
            return
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        # A gradient that this worker lacks counts as zeros, because all workers must join the same parts. The marks
        # tell whether any worker has it: an optimizer skips a parameter without a gradient, but decays one with zeros.
        gradients = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in trained]
        marks = torch.tensor([float(parameter.grad is not None) for parameter in trained], device=gradients[0].device)
        flat = self._sum([*(gradient.reshape(-1) for gradient in gradients), marks])
        *parts, present = torch.split(flat, [*(parameter.numel() for parameter in trained), len(trained)])
        # Views of the sum replace the gradients, so nothing is copied back.
        for parameter, part, count in zip(trained, parts, present.tolist(), strict=True):
            parameter.grad = part.view_as(parameter) if count else None

    def _sum(self, gradients: list[Tensor]) -> Tensor:
        """Return the sum of the joined gradients, float32 [n], in memory of this process."""
        if self._shared is None:
            flat = torch.cat(gradients)
            dist.all_reduce(flat)
            return flat
        rank, length = dist.get_rank(), sum(gradient.numel() for gradient in gradients)
        slots, result = self._shared[:-1, :length], self._shared[-1, :length]
        # The join of the gradients is needed anyway, so writing it into the slot costs nothing more.
        torch.cat(gradients, out=slots[rank])
        dist.barrier()
        part = slice(length * rank // self._world, length * (rank + 1) // self._world)
        torch.sum(slots[:, part], 0, out=result[part])
        dist.barrier()
        # A copy, because clipping changes gradients in place, and every worker would scale the shared result.
        return result.clone()


def _share(rows: int, numel: int) -> Tensor | None:
    """Return zeros [rows, numel] that all workers map; None on all of them if one cannot map the memory of rank 0."""
    created = Segment.make(_DATA_AT + rows * numel * 4) if dist.get_rank() == 0 else None
    path, segment = gathered(created.path if created else "")[0], created
    if segment is None:
        with suppress(OSError):  # rank 0 is on another host, or its memory is hidden from this process
            segment = Segment.open(path)
    # Rank 0 keeps its descriptor until all ranks have opened it, and all ranks take the same way.
    answers = gathered(segment is not None)
    if created is not None:
        created.close_fd()
    if segment is None or not all(answers):
        return None
    return torch.frombuffer(segment.memory, dtype=torch.float32, offset=_DATA_AT).view(rows, numel)

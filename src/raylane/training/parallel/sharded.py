"""Conversion of sharded tensors: to whole ones, to the part of this worker, and back. Plain tensors pass unchanged.

Also the exchange of plain values among workers.
"""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

T = TypeVar("T")


def gathered(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all workers of a group (None: of all workers), in the order of their ranks. Collective."""
    values: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor that may be sharded as a whole one. Collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this worker holds; it shares memory with the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def divided(values: Tensor, like: Tensor) -> Tensor:
    """Return whole values sharded as `like`, without communication."""
    if not isinstance(like, DTensor):
        return values
    return distribute_tensor(values, like.device_mesh, like.placements, src_data_rank=None)

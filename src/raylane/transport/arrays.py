"""`raylane.empty` and `empty_like`: arrays and tensors whose memory is handed over without a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from raylane.core import handover

__all__ = ["empty", "empty_like"]


def empty(shape: int | Sequence[int], dtype: Any) -> Any:
    """Return a new array or tensor in memory that an edge of a compiled graph hands over without copying it.

    A torch dtype gives a CPU tensor, any other dtype a NumPy array; row-major, not initialised. Slices along the first
    axis are handed over as well. Everywhere else it behaves like any other array: `raylane.put` keeps it and its
    readers fetch it, other hosts get a copy.

    **Do not write to it while an execution that got it is under way**, nor while a receiver keeps it: all of them see
    the same memory. Receivers get read-only NumPy arrays; a tensor is received in place by a single reader, which must
    not write to it either, and copied by each of several readers of one host.

    The memory is freed when the last array over it is garbage, in any process. Each array takes a file descriptor, and
    writing the pages of new memory for the first time costs about 0.8 ms per MB: create it once and use it again.

    ValueError if a length is negative, or if the dtype holds Python objects; OSError if there is no descriptor left.
    """
    lengths = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(length < 0 for length in lengths):
        raise ValueError(f"empty: the lengths of an array are 0 or more, got the shape {lengths}")
    count = math.prod(lengths)
    tensor = isinstance(dtype, torch.dtype)
    kind: Any = dtype if tensor else np.dtype(dtype)
    if not tensor and kind.hasobject:
        raise ValueError(f"empty: {kind} holds Python objects, which another process cannot see; use a plain dtype")
    # Nothing to hand over, and a region cannot be empty.
    if not count * kind.itemsize:
        return torch.empty(lengths, dtype=kind, device="cpu") if tensor else np.empty(lengths, kind)
    # The array refers to this memory, which keeps the region and its descriptor alive.
    memory = handover.make(count * kind.itemsize)
    if tensor:
        return torch.frombuffer(memory, dtype=kind, count=count, offset=handover.DATA_OFFSET).view(lengths)
    return np.frombuffer(memory, kind, count, handover.DATA_OFFSET).reshape(lengths)


def empty_like(array: Any) -> Any:
    """Return `empty` of the shape and dtype of an array or of a CPU tensor.

    TypeError if it is neither, ValueError if it lies on another device.
    """
    if isinstance(array, torch.Tensor) and array.device.type != "cpu":
        raise ValueError(f"empty_like: the tensor is on {array.device}; memory that is handed over is host memory")
    if not isinstance(array, torch.Tensor | np.ndarray):
        raise TypeError(f"empty_like: {type(array).__name__} is neither a NumPy array nor a tensor")
    return empty(tuple(array.shape), array.dtype)

"""`raylane.empty`, `empty_like` and `in_use`: arrays and tensors whose memory is handed over without a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from raylane.core import handover
from raylane.transport.value.leaf_memory import leaf_address


def empty(shape: int | Sequence[int], dtype: Any) -> Any:
    """Return a new array or tensor in memory that an edge of a compiled graph hands over without copying it.

    A torch dtype gives a CPU tensor, any other dtype a NumPy array; row-major, not initialised. Slices along the first
    axis are handed over as well. Everywhere else it behaves like any other array: `raylane.put` keeps it and its
    readers fetch it, other hosts get a copy.

    **Do not write to it while `in_use` is above 0**: receivers see the same memory. They cannot change it: NumPy
    arrays arrive read-only, and what the one receiver of a tensor writes into it stays in that process (copy on write);
    each of several receivers of one host gets a copy of a tensor.

    The memory is freed when the last array over it is garbage, in all processes; only the descriptor may stay until the
    graph sends again or ends. Each array takes a file descriptor, and writing the pages of new memory for the first
    time costs about 0.8 ms per MB: create it once and use it again.

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


def in_use(array: Any) -> int:
    """Return how many values in the memory of an array of `empty` are held by receivers or on their way. Does not wait.

    Counted for the whole memory, also where `array` is a part of it; in every graph; once for each receiver of each
    message. At 0 the memory may be written. Otherwise take new memory:

        if raylane.in_use(self.buffer):
            self.buffer = raylane.empty_like(self.buffer)

    A receiver that died counts for ever. ValueError if the array does not lie in memory of `empty` that this process
    has made, TypeError if it is no array or CPU tensor.
    """
    if not (isinstance(array, np.ndarray) or (isinstance(array, torch.Tensor) and array.is_cpu)):
        raise TypeError(f"in_use: {type(array).__name__} is neither a NumPy array nor a CPU tensor")
    if 0 in array.shape:  # without elements nothing is handed over
        return 0
    region = handover.region_at(leaf_address(array))
    if region is None:
        raise ValueError(
            "in_use: the memory of this array was not made by raylane.empty in this process. Pass such an array"
        )
    return region.reader_count

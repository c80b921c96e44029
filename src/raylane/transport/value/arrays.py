"""`raylane.empty` and `empty_like`: arrays and tensors whose memory is handed over without a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from raylane.core.memory import regions


def empty(shape: int | Sequence[int], dtype: Any) -> Any:
    """Return a new array or tensor in shared memory, which readers on this host map instead of copying it.

    A torch dtype gives a CPU tensor, any other dtype a NumPy array; row-major, not initialised. It behaves like any
    other array. Edges of compiled graphs hand it over, and readers of a published value (`raylane.method`, `put`) map
    it; so are its slices, of a graph only those along the first axis. Other hosts get a copy.

    **Do not write to it unless `raylane.is_free(array)`**: readers see the same memory. What they write themselves
    stays in their process (copy on write); arrays that arrive by a graph are read-only, and each of several receivers
    of one host gets a copy of a tensor. `raylane.Buffers` is a ring of such arrays that gives out only free ones.

    When the last array over it is garbage and no other process reads it, the memory is used again for the next array of
    about its size; unused memory is freed after `RAYLANE_POOL_IDLE_S` (60 s), and at once beyond `RAYLANE_POOL_BYTES`.
    Writing to new memory takes about 1 ms per MB, to used memory 0.08. Each array takes a file descriptor.

    ValueError if a length is negative, or if the dtype holds Python objects; OSError if there is no descriptor left.
    """
    form = Form.of(shape, dtype, where="empty")
    # Nothing to hand over, and a region cannot be empty.
    if not form.nbytes:
        return form.over(bytearray(1), 0)
    # The array refers to this memory, which keeps the region and its descriptor alive.
    return form.over(regions.make(form.nbytes), regions.DATA_OFFSET)


class Form(NamedTuple):
    """Shape and dtype of an array, or of a CPU tensor if the dtype is one of torch."""

    shape: tuple[int, ...]
    dtype: Any

    @classmethod
    def of(cls, shape: int | Sequence[int], dtype: Any, *, where: str) -> Form:
        """Return the form for the arguments of a public function, which the error names."""
        lengths = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(length < 0 for length in lengths):
            raise ValueError(f"{where}: the lengths of an array are 0 or more, got the shape {lengths}")
        kind = dtype if isinstance(dtype, torch.dtype) else np.dtype(dtype)
        if isinstance(kind, np.dtype) and kind.hasobject:
            raise ValueError(
                f"{where}: {kind} holds Python objects, which another process cannot see; use a plain dtype"
            )
        return cls(lengths, kind)

    @property
    def nbytes(self) -> int:
        """Size of the array."""
        return math.prod(self.shape) * int(self.dtype.itemsize)

    def over(self, memory: Any, offset: int) -> Any:
        """Return the array over writable memory, from this offset on; it keeps the memory alive."""
        count = math.prod(self.shape)
        if isinstance(self.dtype, torch.dtype):
            if not self.nbytes:  # torch refuses to make nothing of memory
                return torch.empty(self.shape, dtype=self.dtype, device="cpu")
            return torch.frombuffer(memory, dtype=self.dtype, count=count, offset=offset).view(self.shape)
        return np.frombuffer(memory, self.dtype, count, offset).reshape(self.shape)


def empty_like(array: Any) -> Any:
    """Return `empty` of the shape and dtype of an array or of a CPU tensor.

    TypeError if it is neither, ValueError if it lies on another device.
    """
    if isinstance(array, torch.Tensor) and array.device.type != "cpu":
        raise ValueError(f"empty_like: the tensor is on {array.device}; memory that is handed over is host memory")
    if not isinstance(array, torch.Tensor | np.ndarray):
        raise TypeError(f"empty_like: {type(array).__name__} is neither a NumPy array nor a tensor")
    return empty(tuple(array.shape), array.dtype)

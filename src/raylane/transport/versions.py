"""Where torch counts the in-place writes to a tensor, so that a one-sided reader can see whether there were any.

`tensor._version` reads a 32-bit counter that the tensor's TensorImpl points to (VariableVersion in torch's
c10/core/TensorImpl.h). Neither offset is part of any interface, so both are found once per process by experiment: of
all words that look like pointers, the one behind which a number follows `_version` through a series of writes. Where
the experiment does not give exactly one answer, there is no address, and host reads tell nothing of writes (`raylane
doctor` says so).
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Iterable

import torch

from raylane.core import vm
from raylane.core.segment import address_of

_IMPL_BYTES = 256
_COUNTER_BYTES = 32


def _peek(address: int, nbytes: int) -> bytes | None:
    """Bytes of this very process; None, and no crash, if nothing is mapped there."""
    buffer = ctypes.create_string_buffer(nbytes)
    try:
        vm.read(os.getpid(), [(address, address_of(buffer), nbytes)])
    except OSError:
        return None
    return buffer.raw


def _candidates(tensor: torch.Tensor) -> set[tuple[int, int]]:
    """(offset of a pointer in the TensorImpl, offset behind it) of everything that equals the version now."""
    found = set()
    impl = _peek(tensor._cdata, _IMPL_BYTES)
    if impl is None:
        return set()
    for offset, (pointer,) in zip(range(0, _IMPL_BYTES, 8), struct.iter_unpack("<Q", impl), strict=True):
        counter = _peek(pointer, _COUNTER_BYTES) if pointer > 1 << 16 else None
        if counter is not None:
            words = struct.unpack(f"<{_COUNTER_BYTES // 4}I", counter)
            found |= {(offset, 4 * i) for i, word in enumerate(words) if word == tensor._version}
    return found


@functools.cache
def counter_offsets() -> tuple[int, int] | None:
    """The two offsets, or None if they cannot be told."""
    found: set[tuple[int, int]] | None = None
    for writes in (3, 1, 17):
        tensor = torch.zeros(2)
        for _ in range(writes):
            tensor.add_(1)
            seen = _candidates(tensor)
            found = seen if found is None else found & seen
    return found.pop() if found is not None and len(found) == 1 else None


def counters(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """(address of the counter, its value) of each tensor, views of one storage once. Empty if addresses are unknown.

    The counters live as long as their tensors, which the caller keeps.
    """
    offsets = counter_offsets()
    if offsets is None:
        return []
    pointer_at, counter_at = offsets
    found = {}
    for tensor in tensors:
        pointer = ctypes.c_uint64.from_address(tensor._cdata + pointer_at).value
        found[pointer + counter_at] = tensor._version
    return list(found.items())

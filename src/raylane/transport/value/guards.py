"""Checks that published memory still exists and is unwritten: by objects in this process, by addresses from outside.

*Footprints* are the check inside the producing process. A footprint records where the memory of a leaf lies, read
through public calls only; it changes when the owner frees, resizes or re-points the memory.

*Guards* let a one-sided reader make the same check without the producer's help. Guards are ranges of the producer's
memory that hold the pointers and sizes behind a leaf. The reader fetches them right after the data and compares their
digest with the ticket's. c10::StorageImpl changes its pointer before it releases the memory, so unchanged guards mean
that nothing read before was released. (`ndarray.resize(refcheck=False)` releases first and changes the pointer some
hundred nanoseconds later; only a checksum closes that window.)

*Write counters* reveal in-place writes: `tensor._version` is a 32-bit counter behind the tensor's TensorImpl.

    TensorImpl   ... storage pointer ──> StorageImpl  refcount, [data pointer, deleter, context, device, size]
                     counter pointer ──> [32-bit write counter]
    ndarray      header, [data pointer, ndim, dims pointer ──> [dims]]              [...] = compared by a reader

None of these offsets is part of an interface. They are determined once per process by experiment: among all words of
the object, those that follow the public value through a series of changes (c10/core/TensorImpl.h,
c10/core/StorageImpl.h, numpy/ndarraytypes.h). Where the experiment gives no unique answer there are no guards, and
`host` refuses such values.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from raylane.core.memory.layout import address_of
from raylane.core.process import vm

_IMPL_BYTES = 256
_STORAGE_BYTES = 128
_COUNTER_BYTES = 32
_ARRAY_HEADER = object.__basicsize__
_ARRAY_BYTES = 24
"""Size of three fields: data pointer, number of dimensions (4 bytes and padding), pointer to the dimensions."""
DIGEST_BYTES = 16

GuardRange = tuple[int, int]
"""Range of memory: (address in the producing process, size in bytes)."""


class _TorchLayout(NamedTuple):
    """Offsets in bytes of the storage pointer in a TensorImpl, and of data pointer and size in a StorageImpl."""

    storage_at: int
    data_at: int
    size_at: int


def _peek(address: int, nbytes: int) -> bytes | None:
    """Return bytes of this process, or None (instead of a crash) if the address is not mapped."""
    buffer = ctypes.create_string_buffer(nbytes)
    try:
        # A system call reports EFAULT where a direct access would end this process with SIGSEGV.
        vm.read(os.getpid(), [(address, address_of(buffer), nbytes)])
    except OSError:
        return None
    return buffer.raw


def _words_equal(address: int, nbytes: int, value: int) -> set[int]:
    """Return the offsets of all 8-byte words in a range that equal `value`."""
    words = _peek(address, nbytes)
    if words is None:
        return set()
    return {8 * i for i, (word,) in enumerate(struct.iter_unpack("<Q", words)) if word == value}


# Write counters


def _counter_candidates(tensor: torch.Tensor) -> set[tuple[int, int]]:
    """Return the offset pairs (pointer in the TensorImpl, word behind that pointer) whose word equals `_version`."""
    candidates = set()
    impl = _peek(tensor._cdata, _IMPL_BYTES)
    if impl is None:
        return set()
    for offset, (pointer,) in zip(range(0, _IMPL_BYTES, 8), struct.iter_unpack("<Q", impl), strict=True):
        # Small words are sizes or flags, not pointers: Linux maps nothing below vm.mmap_min_addr (64 KiB).
        counter = _peek(pointer, _COUNTER_BYTES) if pointer > 1 << 16 else None
        if counter is not None:
            words = struct.unpack(f"<{_COUNTER_BYTES // 4}I", counter)
            candidates |= {(offset, 4 * i) for i, word in enumerate(words) if word == tensor._version}
    return candidates


@functools.cache
def counter_offsets() -> tuple[int, int] | None:
    """Return the two offsets of the write counter, or None if the experiment is ambiguous."""
    common: set[tuple[int, int]] | None = None
    for writes in (3, 1, 17):
        tensor = torch.zeros(2, device="cpu")
        for _ in range(writes):
            tensor.add_(1)
            seen = _counter_candidates(tensor)
            common = seen if common is None else common & seen
    return common.pop() if common is not None and len(common) == 1 else None


def write_counters(tensors: Iterable[torch.Tensor]) -> list[GuardRange]:
    """Return the range of each tensor's write counter (shared by views of one tensor); empty if offsets are unknown.

    The counters live as long as their tensors; the caller must keep the tensors.
    """
    offsets = counter_offsets()
    if offsets is None:
        return []
    pointer_at, counter_at = offsets
    word = ctypes.c_uint64.from_address
    return list(dict.fromkeys((word(tensor._cdata + pointer_at).value + counter_at, 4) for tensor in tensors))


# Footprints


def owners_of(leaf: Any) -> Iterator[Any]:
    """Yield the leaf and then every array or tensor whose memory it borrows, up to the last known owner."""
    yield leaf
    lender = leaf
    while not isinstance(lender, torch.Tensor):
        # Between two arrays may lie a memoryview (`numpy.frombuffer`) or NumPy's own holder (`as_strided`).
        lender = lender.obj if isinstance(lender, memoryview) else getattr(lender, "base", None)
        if lender is None:
            return
        if isinstance(lender, np.ndarray | torch.Tensor):
            yield lender


def footprint(leaf: Any) -> tuple[int, ...]:
    """Return the present location of a leaf's memory: its storage object, addresses, and sizes of the owners."""
    if isinstance(leaf, torch.Tensor):
        storage = leaf.untyped_storage()
        # `_cdata` tells a new storage from a freed one whose memory it reuses.
        return storage._cdata, leaf.data_ptr(), storage.data_ptr(), storage.nbytes()
    words: list[int] = []
    for owner in owners_of(leaf):
        if isinstance(owner, torch.Tensor):
            words += footprint(owner)
        else:
            words.append(owner.__array_interface__["data"][0])
            if owner.flags.owndata:
                words.append(owner.nbytes)
    return tuple(words)


# Guards


@functools.cache
def torch_layout() -> _TorchLayout | None:
    """Return the offsets of a tensor's pointers and size, or None if the experiment is ambiguous."""
    # On a tensor made here, whose every change is known; the layout is the same for all tensors of this torch build.
    tensor = torch.zeros(2, device="cpu")
    storage = tensor.untyped_storage()
    pointers = datas = sizes = None
    # Growing and shrinking, so that no unrelated word equals the pointer and the size in all four rounds.
    for nbytes in (40, 4096, 72, 1 << 20):
        storage.resize_(nbytes)
        seen = (
            _words_equal(tensor._cdata, _IMPL_BYTES, storage._cdata),
            _words_equal(storage._cdata, _STORAGE_BYTES, storage.data_ptr()),
            _words_equal(storage._cdata, _STORAGE_BYTES, nbytes),
        )
        pointers = seen[0] if pointers is None else pointers & seen[0]
        datas = seen[1] if datas is None else datas & seen[1]
        sizes = seen[2] if sizes is None else sizes & seen[2]
    # The size follows the data pointer in StorageImpl; several data pointers may be found (the context repeats it).
    if not (pointers and datas and sizes) or len(pointers) > 1 or len(sizes) > 1 or min(datas) >= min(sizes):
        return None
    return _TorchLayout(pointers.pop(), min(datas), sizes.pop())


@functools.cache
def array_layout_known() -> bool:
    """Return True if arrays of this NumPy have the layout that `_ARRAY_BYTES` describes."""
    return all(_array_header(np.zeros(shape)) is not None for shape in ((3,), (2, 5), (4, 1, 7)))


def _array_header(array: np.ndarray[Any, Any]) -> int | None:
    """Return the address of an array's dimensions, or None if its header is not as expected."""
    header = _peek(id(array) + _ARRAY_HEADER, _ARRAY_BYTES)
    if header is None:
        return None
    data, ndim, dims = struct.unpack("<QixxxxQ", header)
    if (data, ndim) != (array.__array_interface__["data"][0], array.ndim):
        return None
    shape = _peek(dims, 8 * ndim) if ndim else b""
    return dims if shape == struct.pack(f"<{ndim}q", *array.shape) else None


def guard_ranges(leaves: Iterable[Any]) -> list[GuardRange] | None:
    """Return the ranges that change when the memory of any of these leaves is freed, resized or re-pointed.

    Returns None where the ranges are unknown. The ranges are readable as long as the leaves and their storages live.
    """
    # A dict instead of a set: it removes duplicates and keeps the order, on which the digest depends.
    distinct: dict[GuardRange, None] = {}
    for leaf in leaves:
        for owner in owners_of(leaf):
            if isinstance(owner, torch.Tensor):
                layout = torch_layout()
                if layout is None:
                    return None
                storage = owner.untyped_storage()._cdata
                distinct[owner._cdata + layout.storage_at, 8] = None
                distinct[storage + layout.data_at, layout.size_at + 8 - layout.data_at] = None
                continue
            if not array_layout_known():
                return None
            header = id(owner) + _ARRAY_HEADER
            # Only an array that owns its memory can shrink by a resize, and one without dimensions has none to compare.
            if not owner.flags.owndata or not owner.ndim:
                distinct[header, 8] = None
                continue
            dims = _array_header(owner)
            if dims is None:
                return None
            distinct[header, _ARRAY_BYTES] = distinct[dims, 8 * owner.ndim] = None
    return list(distinct)


def digest(content: bytes) -> bytes:
    """Return the digest of the concatenated content of guard ranges."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()

"""Records of the layout of a value: each leaf (tensor or array) and the blocks of memory that hold them."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import numpy as np
import torch

from raylane.core.memory.spans import Span

TENSOR, PARAMETER, ARRAY = 0, 1, 2
"""Kinds of leaves."""


class LeafSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Layout of one leaf in its block. Strides and offset are in bytes; `block` is -1 for a leaf without elements."""

    kind: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: int
    offset: int
    requires_grad: bool
    device: str


def itemsize_of(spec: LeafSpec) -> int:
    """Return the size in bytes of one element of a leaf."""
    if spec.kind == ARRAY:
        return parse_array_dtype(spec.dtype).itemsize
    size: int = getattr(torch, spec.dtype).itemsize
    return size


def array_dtype(spec: LeafSpec) -> np.dtype[Any] | None:
    """Return the dtype of a leaf as NumPy names it; None for a dtype that only torch has (bfloat16)."""
    if spec.kind == ARRAY:
        return parse_array_dtype(spec.dtype)
    try:
        return torch.empty(0, dtype=getattr(torch, spec.dtype), device="cpu").numpy().dtype
    except TypeError:
        return None


class Layout(msgspec.Struct, frozen=True):
    """Bytes to transfer for a list of leaves, and the place of each leaf in these bytes."""

    specs: list[LeafSpec]
    blocks: list[Span]
    """Addresses in this process, in ascending order."""
    held: list[Any]
    """Objects that own the memory of the blocks; they must be kept for as long as the addresses are used."""
    devices: dict[int, int] = {}
    """Blocks in the memory of a CUDA device, with the number of the device in this process; the others are in host
    memory. Addresses of all devices and of the host are different (unified addressing)."""


@functools.lru_cache(maxsize=256)
def has_description(dtype: np.dtype[Any]) -> bool:
    """Return True if the text description of a dtype restores the same dtype; other arrays are pickled.

    Dtypes with overlapping fields have no description, and the description of a dtype from another package
    (ml_dtypes.bfloat16) means bytes without a type.
    """
    try:
        return parse_array_dtype(dtype_text(dtype)) == dtype
    except (ValueError, TypeError):
        return False


def dtype_text(dtype: np.dtype[Any]) -> str:
    """Return the text that describes a dtype in a LeafSpec."""
    # A structured dtype has no short name. Its description is the Python literal that NumPy uses in .npy files.
    return dtype.str if dtype.names is None else repr(np.lib.format.dtype_to_descr(dtype))


def parse_array_dtype(text: str) -> np.dtype[Any]:
    """Return the dtype that `dtype_text` described."""
    if text.startswith("["):
        import ast

        return np.lib.format.descr_to_dtype(ast.literal_eval(text))
    return np.dtype(text)


def local_device(name: str) -> torch.device:
    """Return the device for a leaf that was on this device in its source.

    The device of the same number if this process has it, else the current one of the same type.
    """
    device = torch.device(name)
    known = device.type == "cpu" or (device.index or 0) < torch.cuda.device_count()
    return device if known else torch.device(device.type)

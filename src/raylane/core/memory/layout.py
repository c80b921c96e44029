"""Addresses, sizes and offsets of blocks in memory of any kind. Makes and maps nothing."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any


def address_of(buffer: Any) -> int:
    """Return the address of a ctypes object. The number does not keep the object alive."""
    return ctypes.addressof(buffer)


def bytes_at(address: int, nbytes: int) -> memoryview:
    """Return a view of this process's memory. The caller must keep the memory alive while it uses the view."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def size_class(nbytes: int) -> int:
    """Return the size to which a request is rounded up: pages, then four steps per power of two (up to 25% unused)."""
    if nbytes <= 1 << 16:
        return -(-nbytes // 4096) * 4096
    step = 1 << (nbytes.bit_length() - 3)
    return -(-nbytes // step) * step


BLOCK_ALIGNMENT = 64


def segment_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the offsets of blocks of these sizes in one segment, and the segment's size; all in bytes."""
    offsets, end = [], 0
    for nbytes in sizes:
        offsets.append(end)
        end += -(-nbytes // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT
    return offsets, end


def blocks_in(memory: Any, offsets: Sequence[int], sizes: Sequence[int]) -> list[Any]:
    """Return blocks at these offsets of writable memory as ctypes arrays, which keep the memory alive.

    ValueError if one reaches beyond the memory.
    """
    return [(ctypes.c_char * nbytes).from_buffer(memory, start) for start, nbytes in zip(offsets, sizes, strict=True)]


SMALL_BLOCK_BYTES = 1 << 16
"""Size below which blocks share one buffer, so that a thousand small tensors need one allocation and one message."""


def small_blocks(sizes: Sequence[int]) -> tuple[dict[int, int], int]:
    """Return the offsets of the small blocks in the buffer that they share, by number of the block, and its size."""
    small = [i for i, size in enumerate(sizes) if size < SMALL_BLOCK_BYTES]
    # Aligned to 64 bytes: every dtype is aligned there.
    offsets, total = segment_offsets([sizes[i] for i in small])
    return dict(zip(small, offsets, strict=True)), total

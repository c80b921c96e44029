"""Sealed segments: values that are written once, and that nobody can change afterwards. Used by the store."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Any

from raylane.core.memory.layout import blocks_in, segment_offsets
from raylane.core.memory.segment import has_fixed_size, make_memfd, map_file, open_other, refuse_seals


def write_segment(blocks: Sequence[memoryview]) -> int:
    """Copy blocks into a new memfd at their `segment_offsets` and seal the memfd against any further change.

    Returns the descriptor, which the caller closes; on an OSError nothing stays open.
    """
    offsets, total = segment_offsets([block.nbytes for block in blocks])
    fd = make_memfd(total)
    try:
        for start, block in zip(offsets, blocks, strict=True):
            source = block.cast("B")
            done = 0
            # pwrite(2) instead of a mapping: the kernel then fills each page once, without faults in this process.
            while done < source.nbytes:
                done += os.pwrite(fd, source[done : done + (1 << 30)], start + done)
        refuse_seals(fd, writes=True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_segment(fd: int, sizes: Sequence[int]) -> list[Any]:
    """Map a segment privately and return its blocks as writable, copy-on-write ctypes arrays.

    The blocks share one mapping, which ends with the last of them. The mapping keeps no descriptor, so the caller may
    close `fd` afterwards.
    """
    offsets, total = segment_offsets(sizes)
    mapping = map_file(fd, total, private=True)
    return blocks_in(mapping, offsets, sizes)


def map_sealed(path: str, nbytes: int) -> Any:
    """Map a segment of another process, which `write_segment` made, as a copy-on-write ctypes array.

    The descriptor that the path names may belong to another file by now; the caller finds out afterwards whether it was
    still the right one. OSError if it cannot be mapped, or is no sealed segment of this size.
    """
    fd = open_other(path)
    try:
        if os.fstat(fd).st_size != nbytes or not has_fixed_size(fd):
            raise OSError(errno.EFAULT, "the descriptor belongs to another file by now")
        return map_file(fd, nbytes, private=True)
    finally:
        os.close(fd)

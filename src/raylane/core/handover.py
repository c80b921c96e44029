"""Memory that is handed to other processes as it is: arrays made by `raylane.empty`. Knows neither NumPy nor torch.

A region is a memfd segment of its own, laid out like one of `graph.channels.lease`, so that readers map it and return
it in the same way:

    0      semaphores of readers: each is posted when a reader has dropped what it received
    16384  the data

The region is registered by its address, so that a sender finds out whether a buffer lies in one (`find`). It exists
until the last array over it, in any process, is garbage.
"""

from __future__ import annotations

import bisect
import ctypes
import os
import threading
import weakref
from typing import Any, NamedTuple

from raylane.core import semaphore
from raylane.core.semaphore import SEMAPHORE_BYTES, Segment

RETURN_SEMAPHORES = 256
"""Maximum number of readers of one message within a host: every segment reserves a semaphore for each."""
DATA_OFFSET = RETURN_SEMAPHORES * SEMAPHORE_BYTES


class Place(NamedTuple):
    """Bytes within a region, as another process finds them."""

    path: str
    offset: int
    """Offset in the segment, in bytes."""
    nbytes: int


class _Region(NamedTuple):
    end: int
    path: str
    memory: weakref.ref[Any]


_lock = threading.RLock()  # guards the two below; reentrant, because finalizers change them
_starts: list[int] = []
"""Addresses of the data of all regions, ascending."""
_regions: dict[int, _Region] = {}


def make(nbytes: int) -> Any:
    """Return the memory of a new region, a ctypes array whose data begin at DATA_OFFSET. It keeps the region alive.

    OSError if there are no descriptors, or no memory for the mapping; pages take memory when they are first written.
    """
    segment = Segment.make(DATA_OFFSET + nbytes)
    init_semaphores(segment)
    fd, segment.fd = segment.fd, None  # the descriptor lives as long as the memory, not as this object
    assert fd is not None
    start = segment.address + DATA_OFFSET
    # A weak reference: the registry must not keep the memory of arrays that are garbage.
    with _lock:
        bisect.insort(_starts, start)
        _regions[start] = _Region(start + nbytes, segment.path, weakref.ref(segment.memory))
    weakref.finalize(segment.memory, _forget, start, fd, os.getpid()).atexit = False
    return segment.memory


def init_semaphores(segment: Segment) -> None:
    """Create the semaphores at the head of a new segment, whatever the number of its readers will be."""
    for index in range(RETURN_SEMAPHORES):
        semaphore.init(segment.address + index * SEMAPHORE_BYTES)


def _forget(start: int, fd: int, pid: int) -> None:
    with _lock:
        _starts.remove(start)
        del _regions[start]
    if os.getpid() == pid:  # in a forked child the number may belong to another file
        os.close(fd)


def find(buffer: Any) -> tuple[Place, Any] | None:
    """Return (place, memory of the region) of a contiguous buffer; None if it does not lie in a region.

    The caller keeps `memory` until the readers have returned it.
    """
    if not _starts:  # nobody uses regions
        return None
    view = memoryview(buffer)
    start = _address_of(view)
    # Regions do not overlap, so only the one that begins at or before the buffer can hold it.
    with _lock:
        index = bisect.bisect_right(_starts, start) - 1
        if index < 0:
            return None
        base = _starts[index]
        region = _regions[base]
        memory = region.memory()
    if memory is None or start + view.nbytes > region.end:
        return None
    return Place(region.path, DATA_OFFSET + start - base, view.nbytes), memory


class _PyBuffer(ctypes.Structure):
    """Py_buffer of CPython up to the fields that are used (Include/pybuffer.h)."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("rest", ctypes.c_byte * 128),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.c_void_p,)
_release_buffer.restype = None


def _address_of(view: memoryview) -> int:
    """Return the address of a buffer, which may be read-only (ctypes takes only writable ones)."""
    found = _PyBuffer()
    _get_buffer(view, ctypes.byref(found), 0)
    try:
        return int(found.buf or 0)
    finally:
        _release_buffer(ctypes.byref(found))

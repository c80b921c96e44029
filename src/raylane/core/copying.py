"""Copies of large buffers: with several threads where cores are idle."""

from __future__ import annotations

import os
from typing import Any

from raylane.core import native

THREADED_FROM_BYTES = 4 << 20
"""Size from which starting threads (about 30 us each) pays off: 4 MB take about 0.4 ms."""
BYTES_PER_THREAD = 2 << 20
MAX_THREADS = 4
"""A few cores fill the memory bandwidth of most machines."""


def threads_for(nbytes: int, cores: int, running: int) -> int:
    """Return how many threads should copy `nbytes`, if `running` threads of the machine are runnable. Pure.

    `running` counts the calling thread; 0 means unknown, and then other processes get the cores.
    """
    if nbytes < THREADED_FROM_BYTES or running < 1:
        return 1
    return max(1, min(MAX_THREADS, nbytes // BYTES_PER_THREAD, 1 + cores - running))


def copy(target: Any, source: memoryview) -> None:
    """Copy contiguous bytes into memory of the same size."""
    if source.nbytes < THREADED_FROM_BYTES:
        target[:] = source
        return
    cores = len(os.sched_getaffinity(0))
    native.copy(target, source, threads_for(source.nbytes, cores, native.running_tasks()))

"""Copies of large buffers: with several threads where that is faster at present, that is, where cores are idle."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from raylane.core import native

THREADED_FROM_BYTES = 4 << 20
"""Size from which starting threads (about 30 us each) can pay off: 4 MB take about 0.4 ms."""
MAX_THREADS = 4
"""A few cores fill the memory bandwidth of most machines."""
TRY_EVERY = 16
"""Number of copies after which the number of threads that seems slower is tried again."""
_MEAN_OF = 4


class ThreadChoice:
    """Choice between one thread and `most` threads by the speed of the last copies with each. Pure.

    The number of runnable threads of the machine says nothing here: members of a graph that wait are runnable too, and
    give way.
    """

    def __init__(self, most: int) -> None:
        self._costs = dict.fromkeys({1, most}, 0.0)
        """Mean seconds per byte of the last copies; 0 until the first one, so that each is tried."""
        self._copies = 0

    def threads(self) -> int:
        """Return the number of threads for the next copy."""
        # Conditions change: the slower choice of the past is tried now and then.
        self._copies += 1
        best = min(self._costs, key=lambda threads: self._costs[threads])
        if self._copies % TRY_EVERY:
            return best
        return next((threads for threads in self._costs if threads != best), best)

    def copied(self, threads: int, nbytes: int, seconds: float) -> None:
        """Record the time of a copy."""
        cost, before = seconds / nbytes, self._costs[threads]
        self._costs[threads] = cost if not before else before + (cost - before) / _MEAN_OF


_choice = ThreadChoice(min(MAX_THREADS, len(os.sched_getaffinity(0))))


def copy(target: Any, source: memoryview) -> None:
    """Copy contiguous bytes into memory of the same size."""
    if source.nbytes < THREADED_FROM_BYTES:
        target[:] = source
        return
    _copy_with_threads(lambda threads: native.copy(target, source, threads), source.nbytes)


def copy_many(rows: Any, nbytes: int) -> None:
    """Copy a list of bytes between addresses, as `native.copy_many`; `nbytes` are those of all of them."""
    if nbytes < THREADED_FROM_BYTES:
        native.copy_many(rows, 1)
    else:
        _copy_with_threads(lambda threads: native.copy_many(rows, threads), nbytes)


def _copy_with_threads(copy_now: Callable[[int], None], nbytes: int) -> None:
    # One choice for the whole process: all its copies compete for the same cores.
    # Timed with the start of the threads: on a busy machine that is what takes long.
    threads = _choice.threads()
    start = time.perf_counter()
    copy_now(threads)
    _choice.copied(threads, nbytes, time.perf_counter() - start)

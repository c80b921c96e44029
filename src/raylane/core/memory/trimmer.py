"""A thread that gives memory back to the system after it was idle for some time."""

from __future__ import annotations

import math
import threading
import weakref
from typing import Protocol


class Trimmed(Protocol):
    """A pool with idle memory."""

    def trim(self) -> float | None:
        """Free what was idle for too long. Return the seconds until more is due, None if the pool has no memory."""


class Trimmer:
    """The thread that calls `trim` of one pool; it runs while the pool has memory. Used with the pool's lock held."""

    def __init__(self, pool: Trimmed, idle_s: float, name: str) -> None:
        """Prepare a thread that first calls `pool.trim` after `idle_s` seconds; none for infinity."""
        self.idle_s = idle_s
        self._name = name
        self._pool = weakref.ref(pool)
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        # The thread has no reference to the pool while it waits, so a pool that is dropped ends its thread.
        weakref.finalize(pool, self._closed.set).atexit = False

    def start(self) -> None:
        """Start the thread if there is none. Must not be called by a finalizer, which must not start threads."""
        if self._thread is not None or self.idle_s == math.inf or self._closed.is_set():
            return
        arguments = (self._pool, self._closed, self.idle_s)
        thread = threading.Thread(target=_trim_while_used, args=arguments, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads: the memory stays until the next call tries again
            return
        self._thread = thread

    def ended(self) -> None:
        """Forget the thread, which ends because `trim` is about to return None."""
        self._thread = None

    def close(self) -> None:
        """End the thread and wait for it. Call without the pool's lock, which the thread needs for its last round."""
        self._closed.set()
        thread = self._thread
        if thread is not None:
            thread.join(timeout=5)


def _trim_while_used(pool: weakref.ref[Trimmed], closed: threading.Event, idle_s: float) -> None:
    """Trim a pool from time to time, as long as it has memory, exists and is not closed."""
    wait_s: float | None = idle_s
    while wait_s is not None and not closed.wait(min(wait_s, threading.TIMEOUT_MAX)):
        used_pool = pool()
        if used_pool is None:
            return
        wait_s = used_pool.trim()
        del used_pool

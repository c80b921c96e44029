"""Threads on which values are fetched at the same time. Called by `raylane.get` and by decorated consumers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

MAX_FETCHES = 64
"""Transfers at a time in one process; more wait for their turn."""
IDLE_S = 10.0
"""A thread without work ends after this long."""


class FetchPool:
    """As many threads as there are calls at a time: one that hangs on a dead source must not hold up the others.

    Daemon threads, unlike those of concurrent.futures: a process that ends does not wait for a transfer.
    """

    def __init__(self, max_threads: int | None, name: str) -> None:
        """`max_threads` is None where no call may wait for another."""
        self._max_threads = max_threads
        self._name = name
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the counts
        self._threads = 0
        self._waiting = 0
        """Threads without work, less the work that is queued for them."""

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Run `call` soon; at once unless `max_threads` calls are under way. A call whose future is cancelled before
        its turn is not run. RuntimeError if the system starts no more threads."""
        future: Future[Any] = Future()
        with self._lock:
            start = self._waiting <= 0 and (self._max_threads is None or self._threads < self._max_threads)
            self._threads += start
            self._waiting -= not start
        if start:
            try:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            except BaseException:
                with self._lock:
                    self._threads -= 1
                raise
        self._work.put((future, call))
        return future

    @property
    def busy(self) -> int:
        """Number of calls that are running or queued."""
        with self._lock:
            return self._threads - self._waiting

    def _run(self) -> None:
        while True:
            try:
                task = self._work.get(timeout=IDLE_S)
            except queue.Empty:
                task = None
            if task is None:
                with self._lock:
                    if self._waiting <= 0:
                        continue  # work is on its way to this thread
                    self._waiting -= 1
                    self._threads -= 1
                return
            future, call = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del task, future, call
            with self._lock:
                self._waiting += 1

    def close(self) -> None:
        """End the threads that have no work; the others end after theirs. What is submitted later runs as well: a call
        may have found this pool just before its endpoint was closed."""
        with self._lock:
            threads = self._threads
        for _ in range(threads):
            self._work.put(None)

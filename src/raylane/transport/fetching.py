"""Threads on which values are fetched at the same time. Called by `raylane.get` and by decorated consumers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

MAX_THREADS = 64
IDLE_S = 10.0
"""A thread without work ends after this long."""


class FetchPool:
    """As many threads as there are fetches at a time: one that hangs on a dead source must not hold up the others.

    Daemon threads, unlike those of concurrent.futures: a process that ends does not wait for a transfer.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the counts
        self._threads = 0
        self._waiting = 0
        """Threads without work, less the work that is queued for them."""

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Run `call` soon; at once unless MAX_THREADS fetches are under way."""
        future: Future[Any] = Future()
        with self._lock:
            start = self._waiting <= 0 and self._threads < MAX_THREADS
            self._threads += start
            self._waiting -= not start
        self._work.put((future, call))
        if start:
            threading.Thread(target=self._run, name="raylane-fetch", daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            try:
                task = self._work.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._waiting <= 0:
                        continue  # work is on its way to this thread
                    self._waiting -= 1
                    self._threads -= 1
                return
            if task is None:
                with self._lock:
                    self._threads -= 1
                return
            future, call = task
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del task, future, call
            with self._lock:
                self._waiting += 1

    def close(self) -> None:
        """End the threads that have no work; the others end after theirs."""
        with self._lock:
            threads = self._threads
        for _ in range(threads):
            self._work.put(None)

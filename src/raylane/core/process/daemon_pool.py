"""Threads on which several values are fetched at the same time. Called by `raylane.get` and by decorated consumers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias

MAX_FETCHES = 64
"""Number of simultaneous transfers in one process; further ones wait."""
IDLE_S = 10.0
"""Seconds after which a thread without work ends."""


_Task: TypeAlias = tuple[Future[Any], Callable[[], Any]]


class FetchPool:
    """A pool with one thread for each running call, so that a call to a dead source does not delay the others.

    The threads are daemons, unlike those of concurrent.futures: a process that ends does not wait for a transfer.
    """

    def __init__(self, max_threads: int | None, name: str) -> None:
        """Create a pool without threads. Pass `max_threads=None` if no call may wait for another one."""
        self._max_threads = max_threads
        self._name = name
        self._work: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the counts
        self._threads = 0
        self._waiting = 0
        """Number of threads without work, minus the number of queued calls."""

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Run `call` on a thread; at once unless `max_threads` calls are running.

        A call whose future is cancelled before its start is not run. RuntimeError if the system starts no more threads.
        """
        task: _Task = Future(), call
        with self._lock:
            # Reserve an idle thread under the lock, so that two calls do not count on the same one.
            start = self._waiting <= 0 and (self._max_threads is None or self._threads < self._max_threads)
            self._threads += start
            self._waiting -= not start
            if not start:
                self._work.put(task)
        if start:
            # The thread gets its first call directly: a call in the queue of a pool without threads would never run.
            starting = [task]
            try:
                threading.Thread(target=self._run, args=(starting,), name=self._name, daemon=True).start()
            except BaseException:
                # After a Ctrl-C here, the thread may have begun already; the one that takes the call counts.
                with self._lock:
                    self._threads -= len(starting)
                    starting.clear()
                raise
        return task[0]

    @property
    def busy(self) -> int:
        """Number of calls that are running or queued."""
        with self._lock:
            return self._threads - self._waiting

    def _run(self, starting: list[_Task]) -> None:
        with self._lock:
            task = starting.pop() if starting else None
        if task is None:  # `submit` has raised
            return
        while task is not None:
            future, call = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            # A waiting thread must not keep the last value alive.
            del task, future, call
            with self._lock:
                self._waiting += 1
            task = self._next()

    def _next(self) -> _Task | None:
        """Wait for a call; None if this thread shall end."""
        while True:
            try:
                task = self._work.get(timeout=IDLE_S)
            except queue.Empty:
                task = None
            if task is not None:
                return task
            with self._lock:
                # Else `submit` has counted on this thread and is about to queue its call, so do not end now.
                if self._waiting > 0:
                    self._waiting -= 1
                    self._threads -= 1
                    return None

    def close(self) -> None:
        """End the threads without work at once and the others after their call.

        Calls that are submitted later still run: a caller may have obtained this pool just before its endpoint closed.
        """
        # One end mark for each thread. A thread takes its mark only after the calls that were queued before it.
        with self._lock:
            threads = self._threads
        for _ in range(threads):
            self._work.put(None)

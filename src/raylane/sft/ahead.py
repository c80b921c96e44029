"""Reading of the next step's rows while the current step computes. Called by `worker`.

Knows nothing of rows or steps but that they are numbered and mostly taken one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

__all__ = ["ReadAhead"]

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """One item ahead, read on a thread of its own that starts with the first `take` and ends with `close`.

    `read(number)` must not depend on when it is called. For one calling thread.
    """

    def __init__(self, read: Callable[[int], T], end: int) -> None:
        """`end` is the first number that there is nothing to read for."""
        self._read = read
        self._end = end
        self._thread: ThreadPoolExecutor | None = None
        """None before the first `take` and after `close`."""
        self._next: tuple[int, Future[T]] | None = None
        """The item being read, and its number."""

    def take(self, number: int) -> T:
        """Return item `number`, waiting if need be, and begin to read the one after it. Raises what `read` does."""
        following, self._next = self._next, None
        item = following[1].result() if following is not None and following[0] == number else self._read(number)
        if number + 1 < self._end:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="raylane-rows")
            self._next = (number + 1, self._thread.submit(self._read, number + 1))
        return item

    def close(self) -> None:
        """End the thread; waits for the item that it reads. A second call does nothing."""
        thread, self._thread, self._next = self._thread, None, None
        if thread is not None:
            thread.shutdown(cancel_futures=True)

"""Background reading of the next step's rows while the current step computes.

Called by `worker`. Items are only numbered; the class does not depend on rows or steps.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Reader of numbered items that reads one item ahead, in a thread.

    The thread starts with the first `take` and ends with `close`. `read(number)` must return the same item at any time.
    For one calling thread.
    """

    def __init__(self, read: Callable[[int], T], end: int) -> None:
        """Prepare reading; `end` is the first number without an item."""
        self._read = read
        self._end = end
        self._thread: ThreadPoolExecutor | None = None
        """Reading thread; None before the first `take` and after `close`."""
        self._next: tuple[int, Future[T]] | None = None
        """Number of the item being read, and its future."""

    def take(self, number: int) -> T:
        """Return item `number`, waiting if needed, and start reading the next one. Raises the exceptions of `read`."""
        # After a resume or a skipped step another number is asked for; the item read ahead is then dropped.
        following, self._next = self._next, None
        item = following[1].result() if following is not None and following[0] == number else self._read(number)
        if number + 1 < self._end:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="raylane-rows")
            self._next = (number + 1, self._thread.submit(self._read, number + 1))
        return item

    def close(self) -> None:
        """End the thread, after the item that it reads. A second call does nothing."""
        thread, self._thread, self._next = self._thread, None, None
        if thread is not None:
            thread.shutdown(cancel_futures=True)

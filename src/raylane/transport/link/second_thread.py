"""A thread for work that takes too long for a listener's thread; it starts with the first piece of work."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class SecondThread:
    """A queue of work, and the thread that does it, one piece after the other. Used by one thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def do(self, work: Callable[[], None]) -> None:
        """Run `work`, which must not raise, soon. RuntimeError if the system starts no more threads; try again then."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            self._thread = thread
        self._work.put(work)

    def close(self, timeout_s: float) -> None:
        """End the thread after the work that it has, and wait for it."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # a waiting thread must not keep what the work refers to

"""End of a run on SIGTERM: after the steps in flight, and with a checkpoint. Called by the trainers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class StopRequest:
    """Request to end the run, set by SIGTERM while the `with` block runs.

    Outside the main thread Python cannot handle signals; there only `ask` sets the request.
    """

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._before: Any = None

    @property
    def requested(self) -> bool:
        """True if the run should end after the steps in flight."""
        return self._asked.is_set()

    def ask(self) -> None:
        """Request the end of the run, as SIGTERM does."""
        self._asked.set()

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, lambda number, frame: self.ask())
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)


@contextmanager
def block_sigterm() -> Iterator[None]:
    """Block SIGTERM in this thread and in all processes started in the `with` block; deliver a pending one at its end.

    Batch systems and shells send SIGTERM to all processes of a job, and Ray's processes would end before the checkpoint
    is saved. They inherit the blocked signal mask and so ignore it; Ray protects its processes from SIGINT in the same
    way. They still end with the driver, if need be through the kernel's parent-death signal.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

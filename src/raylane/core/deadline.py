"""One deadline for a wait of several steps: each step receives the deadline instead of a timeout of its own.

A deadline may belong to a `Cancellation`, by which a call that raises ends the work that it has started on other
threads, and waits until none of them writes into memory of its caller.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator

from raylane.core import settings

log = logging.getLogger("raylane")

START_S = 600.0
"""Limit in seconds for starts of processes: a busy machine needs minutes to import PyTorch, a cluster to add nodes."""
WORD_S = 30.0
"""Seconds between two lines of the log about a wait for a start."""
LONGEST_S = 1e9
"""Longest timeout (about 30 years) that is not treated as "no limit".

Callers often pass `sys.maxsize` for no limit, which overflows the timeouts of system calls (some 292 years).
"""


class Cancelled(Exception):
    """The call on whose behalf this thread works has raised already; nobody sees this exception."""


class Cancellation:
    """The end of one call for all threads that work for it. Thread-safe.

    a thread of the call                      the call itself, when it raises
      left_s() == 0: stop waiting       <--   cancel(): marks the end,
      interrupts(shutdown): woken up    <--     runs all interrupts,
      writing(): refused from now on,           waits for the threads in `writing`,
      or finished first                 -->     returns
    """

    __slots__ = ("_changed", "_interrupts", "_writers", "cancelled")

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards everything below
        self._interrupts: list[Callable[[], object]] = []
        self._writers: set[int] = set()
        """Identities of the threads in `writing`."""
        self.cancelled = False

    def cancel(self) -> None:
        """End the work of the call; return when no thread writes into the caller's memory any more. Idempotent.

        The wait is short: a writer is interrupted, or copies a bounded amount.
        """
        try:
            with self._changed:
                self.cancelled = True
                # With the lock: an interrupt must not reach a connection that was returned to its pool meanwhile.
                while self._interrupts:
                    self._interrupts.pop()()
                # Not for this thread itself: Ctrl-C may have left its mark behind.
                self._changed.wait_for(lambda: self._writers <= {threading.get_ident()})
        except KeyboardInterrupt:
            # The promise holds for a second Ctrl-C as well.
            self.cancel()
            raise

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Permit this thread to write into memory of the caller within the block; Cancelled if the call has ended."""
        this_thread = threading.get_ident()
        with self._changed:
            if self.cancelled:
                raise Cancelled
            self._writers.add(this_thread)
        try:
            yield
        finally:
            with self._changed:
                self._writers.discard(this_thread)
                self._changed.notify_all()

    @contextlib.contextmanager
    def interrupts(self, interrupt: Callable[[], object]) -> Iterator[None]:
        """Let `cancel` call `interrupt`, which must not block, while the block runs; at once if the call has ended."""
        with self._changed:
            if self.cancelled:
                raise Cancelled
            self._interrupts.append(interrupt)
        try:
            yield
        finally:
            with self._changed:
                if interrupt in self._interrupts:
                    self._interrupts.remove(interrupt)


class Deadline:
    """A point on the monotonic clock, or no limit. `timeout_s` keeps the given timeout for messages."""

    __slots__ = ("at", "cancellation", "timeout_s")

    def __init__(self, timeout_s: float | None, cancellation: Cancellation | None = None) -> None:
        """Begin a timeout; it passes early if the call to which `cancellation` belongs has ended."""
        try:
            valid = timeout_s is None or timeout_s >= 0  # in this form the condition refuses NaN too
        except TypeError:
            valid = False
        if not valid:
            raise ValueError(f"timeout must be a number of seconds >= 0, or None for no limit, got {timeout_s!r}")
        self.timeout_s = timeout_s
        self.at = math.inf if timeout_s is None or timeout_s > LONGEST_S else time.monotonic() + timeout_s
        self.cancellation = cancellation

    @classmethod
    def of_call(cls, timeout_s: float | None) -> Deadline:
        """Begin the timeout of a public call; None means that of `RAYLANE_TIMEOUT_S` (60 s)."""
        return cls(settings.TIMEOUT_S.read() if timeout_s is None else timeout_s)

    def left_s(self) -> float | None:
        """Return the seconds left (at least 0), or None for no limit, as `socket.settimeout` and `wait` accept them."""
        if self.cancellation is not None and self.cancellation.cancelled:
            return 0.0
        return None if self.at == math.inf else max(0.0, self.at - time.monotonic())

    def rounds(self, state: Callable[[], str]) -> Iterator[float]:
        """Yield the seconds of one wait after another, until the deadline, and log the state between two of them.

        For starts of processes, which take minutes on a busy machine. The state is a clause such as "ranks [1] are not
        ready".
        """
        began = time.monotonic()
        while (left_s := self.left_s()) is None or left_s > WORD_S:
            yield WORD_S
            load = f"{os.getloadavg()[0]:.0f} on {len(os.sched_getaffinity(0))} cores"
            waited = f"after {time.monotonic() - began:.0f} s of at most {self.timeout_s} s"
            log.warning("%s %s (load of this host: %s)", state(), waited, load)
        yield left_s

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Permit writes into memory of the caller, as `Cancellation.writing`."""
        return _NOTHING if self.cancellation is None else self.cancellation.writing()

    def interrupts(self, interrupt: Callable[[], object]) -> contextlib.AbstractContextManager[None]:
        """Have a blocking operation of this thread interrupted, as `Cancellation.interrupts`."""
        return _NOTHING if self.cancellation is None else self.cancellation.interrupts(interrupt)

    def __repr__(self) -> str:
        return (
            "Deadline(none)" if self.at == math.inf else f"Deadline({self.left_s():.3f} s of {self.timeout_s:g} s left)"
        )


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()

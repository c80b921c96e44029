"""A lock that can be recovered after Ctrl-C has interrupted the thread that took it. Knows nothing of graphs."""

from __future__ import annotations

import sys
import threading
import types
from typing import NamedTuple


class Observation(NamedTuple):
    """Lock and number of entries that a waiting thread has seen."""

    lock: threading.Lock
    entries: int


class RecoverableLock:
    """Lock whose owner may be interrupted right after taking it.

    Python may raise KeyboardInterrupt at every call and return, so also between the return of `lock.acquire` and the
    owner's `try` statement. Then the lock stays locked and no thread will release it. Owners therefore mark their
    critical section, and a waiting thread that sees a locked lock without a mark for a second replaces the lock:

        if recoverable.lock.acquire(False):
            try:
                recoverable.entries += 1
                recoverable.held = True
                ...
            finally:
                recoverable.held = False
                recoverable.lock.release()      # no other call may come before this one

    Owners write these lines out instead of calling methods, because an interrupt in such a method would leave the mark
    set for ever.
    """

    __slots__ = ("entries", "held", "lock")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start with a new, free lock: after the owner was interrupted, or in a forked child."""
        # The lock last: from then on another thread may take it and set the marks.
        self.held = False
        """True from right after the lock is taken until right before its release."""
        self.entries = 0
        """Number of critical sections entered so far."""
        self.lock = threading.Lock()

    def observe(self) -> Observation:
        """Return the present lock and count, for `orphaned` after a wait."""
        return Observation(self.lock, self.entries)

    def orphaned(self, seen: Observation) -> bool:
        """Return True if the lock is locked without an owner.

        That is so if no thread is in a critical section, none has entered one since `seen` was observed (at least a
        second ago), and yet the lock is locked.
        """
        return seen.lock is self.lock and seen.lock.locked() and not self.held and seen.entries == self.entries

    def recover(self, seen: Observation) -> bool:
        """Replace the lock if it is locked without an owner. Return True if so: then what it guards is half done."""
        orphaned = self.orphaned(seen)
        if orphaned:
            self.reset()
        return orphaned


_DRIVER = __name__.rpartition(".")[0]
"""Package of the functions that take such locks."""


def entered_twice(lock: RecoverableLock) -> bool:
    """Return True if the calling thread waits for a lock that it holds itself, further down its stack.

    Functions that take the lock have it as the variable `lock`. They are found by their frames, because a mark of the
    owner would cost time in every execution. Takes some microseconds.
    """
    frame: types.FrameType | None = sys._getframe(1)
    groups, inside = 0, False
    while frame is not None:
        # Only of this package: up to CPython 3.12 `f_locals` keeps the variables of a frame alive until its end.
        ours = frame.f_globals.get("__name__", "").startswith(_DRIVER)
        has_lock = ours and frame.f_locals.get("lock") is lock
        groups += has_lock and not inside
        inside, frame = has_lock, frame.f_back
    return groups > 1

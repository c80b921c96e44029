"""Limit of the bytes that a process holds for readers (`RAYLANE_BUDGET_BYTES`), with back-pressure on publications.

A publication beyond the limit waits, on the thread that publishes, until readers have freed enough. Frees arrive on a
thread of Ray, so they do not depend on the waiting thread. Shared copies for the readers of a host count, but no
publication waits for them: they are dropped to make room, and none is made without room.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from raylane.core import settings
from raylane.core.deadline import Deadline
from raylane.errors import BudgetExceededError
from raylane.transport.hold.store import Entry, Store

_NAMED = 5
"""Number of the largest values that an error names."""


class Budget:
    """The limit of one store and the publications that wait for room. Thread-safe."""

    def __init__(self, store: Store, limit: int | None) -> None:
        self._store = store
        self.limit = limit
        store.allows_copy = self._allows_copy
        self._changed = store.freed  # shares the store's lock: a free and the wait for it must not miss each other
        self._reserved = 0
        """Bytes of publications that have room and are not in the store yet."""
        self.waiting = 0
        self.waits = 0
        self.wait_s = 0.0

    @contextlib.contextmanager
    def room(self, nbytes: int, origin: str) -> Iterator[None]:
        """Reserve room for a value while it is put into the store; wait for it at most RAYLANE_TIMEOUT_S.

        BudgetExceededError if there is no room until then, or if the value alone exceeds the limit.
        """
        if self.limit is None:
            yield
            return
        if nbytes > self.limit:
            # Waiting would never help, so fail at once.
            raise BudgetExceededError(
                f"could not publish {nbytes:,} bytes ({origin}): RAYLANE_BUDGET_BYTES is {self.limit:,}, less than "
                "this one value. Raise the budget, or return the value in parts",
                nbytes=nbytes,
                budget=self.limit,
            )
        with self._changed:
            if not self._fits(nbytes):
                self._wait(nbytes, origin)
            self._reserved += nbytes
            excess = self._excess(0)
            if excess > 0:  # readers can do without copies, so copies never delay a publication
                self._store.drop_copies(excess)
        try:
            yield
        finally:
            with self._changed:
                self._reserved -= nbytes
                # Until now the value counted twice, as reserved and in the store.
                self._changed.notify_all()

    def _fits(self, nbytes: int) -> bool:
        return self.limit is None or self._store.nbytes + self._reserved + nbytes <= self.limit

    def _excess(self, nbytes: int) -> int:
        """Return by how much the limit is exceeded with this many more bytes, copies for readers included."""
        if self.limit is None:
            return 0
        return self._store.nbytes + self._reserved + self._store.shared.nbytes + nbytes - self.limit

    def _allows_copy(self, nbytes: int) -> bool:
        """Return True if a copy of this size for the readers of a host fits. Call with the lock held."""
        excess = self._excess(nbytes)
        if excess > 0:
            # Copies of freed values only: those of published ones have readers already.
            self._store.shared.drop_idle(excess)
        return self._excess(nbytes) <= 0

    def _wait(self, nbytes: int, origin: str) -> None:
        """Wait until a value fits. Call with the lock held."""
        deadline, began = Deadline(settings.TIMEOUT_S.read()), time.monotonic()
        # Ray pickles here, holding none of its locks: other threads of this process go on, and so does the callback
        # thread on which frees arrive. An async actor pickles all results on one thread beside its event loop, so the
        # loop goes on, but its other results wait behind this one.
        self.waits += 1
        self.waiting += 1
        try:
            fits = self._changed.wait_for(lambda: self._fits(nbytes), deadline.left_s())
        finally:
            self.waiting -= 1
            self.wait_s += time.monotonic() - began
        if not fits:
            raise BudgetExceededError(
                f"could not publish {nbytes:,} bytes ({origin}): after {deadline.timeout_s} s this process still held "
                f"{self._store.nbytes:,} of RAYLANE_BUDGET_BYTES={self.limit:,} for readers. The largest: "
                f"{_largest(self._store.held())}. Drop refs to them, raise the budget, or run `raylane memory`",
                nbytes=nbytes,
                budget=self.limit,
            )


def _largest(entries: list[Entry]) -> str:
    now = time.monotonic()
    largest = sorted(entries, key=lambda entry: -entry.nbytes)[:_NAMED]
    named = [f"{entry.nbytes:,} bytes ({entry.origin or '?'}, {now - entry.created_s:.1f} s old)" for entry in largest]
    return ", ".join(named) or "none, only values that are being published"

"""How to wait for a semaphore: yield the CPU for a moment when answers come quickly, sleep when they do not.

A sleeping process costs 20-30 us to wake on another CPU of a virtual machine; one that yields is there at once. But a
process that yields is behind every other runnable one, so beside CPU-bound neighbours a yield may take a whole
time slice (4 ms). `Patience` decides, on times alone, from what the last waits were like; `Waiter` does it. Measured
against spinning, fixed yields, pinning and pure blocking: docs/design/graphs.md.
"""

from __future__ import annotations

import os
import time

from raylane.core import semaphore

BUDGET_S = 50e-6
"""How long to yield before sleeping: about what a wake-up across CPUs costs."""
GATE_S = 8 * BUDGET_S
"""Yield only while waits last less than this on average."""
SLOW_YIELD_S = 150e-6
"""A yield that takes longer means that somebody else needed this CPU."""
PENALTY = 10
"""No yielding for this many times what was lost, doubled with every further loss: a single one, by a daemon that has
woken, costs tens of milliseconds of it; beside a process that computes it soon comes to less than 1% of the time."""
MAX_LOSS_S = 20e-3
"""One slow yield counts as no more: a process that was stopped, or whose machine was paused, lost much more, and not to
a neighbour; without this limit it would not yield for minutes."""
MAX_LEVEL = 8
FORGIVE_S = 1.0
"""One level is forgiven for each such time without a slow yield after a penalty has ended,"""
FORGIVE_WAITS = 500
"""and for each so many waits in a row that yielding has ended. Beside a process that computes, few in a row do."""
_MEAN_OF = 8


class Patience:
    """Whether to yield, learnt from the lengths of past waits (an exponential mean over about 8) and from slow yields.

    Pure: every time (seconds, on one monotonic clock) is an argument.
    """

    __slots__ = ("level", "mean_s", "quick", "slow_until")

    def __init__(self) -> None:
        self.mean_s = 0.0
        self.level = 0
        """How often a yield was slow lately, at most MAX_LEVEL."""
        self.quick = 0
        """Waits that yielding has ended since the last slow yield, or since a level was forgiven for them."""
        self.slow_until = 0.0
        """End of the present penalty."""

    def may_yield(self, now: float) -> bool:
        return self.mean_s < GATE_S and now >= self.slow_until

    def waited(self, length_s: float) -> None:
        """A wait has ended after that long, however it was spent."""
        self.mean_s += (min(length_s, 2 * GATE_S) - self.mean_s) / _MEAN_OF

    def yielded(self) -> None:
        """A wait has ended while yielding, and no yield of it was slow."""
        self.quick += 1
        if self.quick >= FORGIVE_WAITS:
            self.quick = 0
            self.level = max(0, self.level - 1)

    def slow_yield(self, now: float, lost_s: float) -> None:
        """A yield that ended at `now` took `lost_s`, more than SLOW_YIELD_S."""
        quiet_s = now - self.slow_until
        if self.level and quiet_s > 0:
            self.level = max(0, self.level - int(quiet_s / FORGIVE_S))
        self.quick = 0
        self.slow_until = now + min(lost_s, MAX_LOSS_S) * PENALTY * (1 << self.level)
        self.level = min(self.level + 1, MAX_LEVEL)

    def __repr__(self) -> str:
        return f"Patience(mean wait {self.mean_s * 1e6:.0f} us, level {self.level})"


class Waiter:
    """Waits for semaphores on behalf of one thread at a time. `RAYLANE_WAIT=block` never yields (for comparison)."""

    __slots__ = ("patience", "yields")

    def __init__(self, *, yields: bool | None = None) -> None:
        self.patience = Patience()
        self.yields = _yields_by_default() if yields is None else yields

    def wait(self, address: int, timeout_s: float) -> bool:
        """Take one from the semaphore; False after `timeout_s` (at most a second) or on a signal."""
        try_wait = semaphore.try_wait
        if not try_wait(address):
            self.patience.waited(0.0)
            return True
        clock = time.perf_counter
        start = clock()
        patience = self.patience
        if self.yields and patience.may_yield(start):
            last = start
            while last - start < BUDGET_S:
                os.sched_yield()
                got = not try_wait(address)
                now = clock()
                if now - last > SLOW_YIELD_S:
                    patience.slow_yield(now, now - last)
                    if not got:
                        break
                elif got:
                    patience.yielded()
                if got:
                    patience.waited(now - start)
                    return True
                last = now
        got = semaphore.block(address, timeout_s)
        patience.waited(clock() - start)
        return got


def _yields_by_default() -> bool:
    text = os.environ.get("RAYLANE_WAIT", "adaptive")
    if text not in ("adaptive", "block"):
        raise ValueError(f"RAYLANE_WAIT={text!r}: it is adaptive (the default) or block")
    return text == "adaptive"

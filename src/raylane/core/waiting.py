"""Adaptive waiting for a semaphore: yield the CPU briefly while answers come quickly, sleep otherwise.

Waking a sleeping process takes 20-30 us on another CPU of a virtual machine; a yielding process continues at once. But
the scheduler runs every other runnable process before a yielding one, so beside CPU-bound processes a yield may take a
whole time slice (4 ms). `Patience` decides from the lengths of the last waits, and `Waiter` waits accordingly. Compared
with spinning, fixed yields, pinning and pure blocking in docs/design/graphs.md.
"""

from __future__ import annotations

import os
import time

from raylane.core import semaphore

BUDGET_S = 50e-6
"""Time to yield before sleeping, about the cost of a wake-up across CPUs."""
GATE_S = 8 * BUDGET_S
"""Mean length of waits above which yielding is not worth its time."""
SLOW_YIELD_S = 150e-6
"""Length of a yield above which another process must have used this CPU."""
PENALTY = 10
"""Factor between the time lost by a slow yield and the pause of yielding after it; doubled with every further loss.

A single loss (to a daemon that woke up) pauses yielding for tens of milliseconds. Beside a process that computes, the
growing pauses soon limit the loss to less than 1% of the time.
"""
MAX_LOSS_S = 20e-3
"""Largest loss counted for one slow yield.

A stopped process or a paused machine loses much more time, but not to another process; without this limit yielding
would pause for minutes.
"""
MAX_LEVEL = 8
FORGIVE_S = 1.0
"""Time without a slow yield, after the end of a penalty, that lowers the level by one."""
FORGIVE_WAITS = 500
"""Number of consecutive waits ended by yielding that lowers the level by one; rare beside a computing process."""
_MEAN_OF = 8


class Patience:
    """Decision whether to yield, from the lengths of past waits (exponential mean over about 8) and from slow yields.

    Pure: every time (seconds, on one monotonic clock) is an argument.
    """

    __slots__ = ("level", "mean_s", "quick", "slow_until")

    def __init__(self) -> None:
        self.mean_s = 0.0
        self.level = 0
        """Number of recent slow yields, at most MAX_LEVEL."""
        self.quick = 0
        """Number of waits ended by yielding since the last slow yield or the last lowering of the level."""
        self.slow_until = 0.0
        """Time at which the present penalty ends."""

    def may_yield(self, now: float) -> bool:
        """Return True if a wait that begins at `now` should yield first."""
        return self.mean_s < GATE_S and now >= self.slow_until

    def waited(self, length_s: float) -> None:
        """Record the length of a wait that has ended by yielding or by sleeping."""
        # Limit the length, so that a single long wait does not prevent yielding in the next dozens of waits.
        self.mean_s += (min(length_s, 2 * GATE_S) - self.mean_s) / _MEAN_OF

    def yielded(self) -> None:
        """Record a wait that ended by yielding without a slow yield."""
        self.quick += 1
        if self.quick >= FORGIVE_WAITS:
            self.quick = 0
            self.level = max(0, self.level - 1)

    def slow_yield(self, now: float, lost_s: float) -> None:
        """Record a yield that ended at `now` and took `lost_s`, more than SLOW_YIELD_S."""
        # Time without a slow yield counts only after the penalty, because nothing yields during a penalty.
        quiet_s = now - self.slow_until
        if self.level and quiet_s > 0:
            self.level = max(0, self.level - int(quiet_s / FORGIVE_S))
        self.quick = 0
        self.slow_until = now + min(lost_s, MAX_LOSS_S) * PENALTY * (1 << self.level)
        self.level = min(self.level + 1, MAX_LEVEL)

    def __repr__(self) -> str:
        return f"Patience(mean wait {self.mean_s * 1e6:.0f} us, level {self.level})"


class Waiter:
    """A waiter on semaphores for one thread at a time. `RAYLANE_WAIT=block` disables yielding (for comparisons)."""

    __slots__ = ("patience", "yields")

    def __init__(self, *, yields: bool | None = None) -> None:
        self.patience = Patience()
        self.yields = _yields_by_default() if yields is None else yields

    def wait(self, address: int, timeout_s: float) -> bool:
        """Take one from the semaphore. Returns False after `timeout_s` (at most a second) or on a signal."""
        try_wait = semaphore.try_wait
        # The message is often there already; this path needs no clock.
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
                # Record a slow yield even if the semaphore was posted meanwhile: the CPU is contended either way.
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
        raise ValueError(f"RAYLANE_WAIT must be adaptive (the default) or block, got {text!r}")
    return text == "adaptive"

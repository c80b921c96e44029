"""When a waiting thread yields the CPU and when it sleeps. Pure, except for the run delay.

Waking a sleeping process takes 20-30 us on another CPU of a virtual machine; a yielding process continues at once. But
the scheduler runs every other runnable process before a yielding one, so beside CPU-bound processes a yield may take a
whole time slice (4 ms). `Patience` decides from the waits of the recent past for how long to yield first; a `Doorbell`
(`native`) waits accordingly and reports back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from raylane.core import settings
from raylane.core.native import run_delay_ns

US, MS, S = 1_000, 1_000_000, 1_000_000_000
BUDGETS_NS = (500 * US, 250 * US, 125 * US, 60 * US, 0)
"""Choices for the time to yield before sleeping, the longest first.

A round trip through a chain of 4 fits even while it is slow: else every member would sleep, and the chain stay slow.
"""
SLEEP_NS = 500 * US
"""Cost that a wait which ends by sleeping is given: the wake-up, cold caches after it, and that others wait too."""
SLOW_NS = 1 * MS
"""Length of a yield above which another process must have computed on this CPU.

Shorter ones are other members of the graph, which take their turns of a few microseconds to a few hundred.
"""
KEPT_WAITS = 64
"""Number of recent waits by which the budget is chosen."""
PENALTY = 10
"""Factor between the time lost by a slow yield and the pause of yielding after it; doubled with every level.

A single loss (to a daemon that woke up) pauses yielding for tens of milliseconds. Beside a process that computes, the
growing pauses soon limit the loss to less than 1% of the time.
"""
MAX_LOSS_NS = 20 * MS
"""Largest loss counted for one slow yield."""
MAX_LEVEL = 8
WORTH = 0.9
"""Yielding is worth its losses if the mean wait with it is shorter than this share of the mean wait in the pause."""


def best_budget_ns(lengths_ns: deque[int]) -> int:
    """Return the budget that would have cost least in these waits.

    A wait within the budget costs its length, any other the budget and SLEEP_NS: a sleeping process costs nothing until
    it is woken. This is the choice of A. Karlin, K. Li, M. Manasse and S. Owicki (Empirical studies of competitive
    spinning, 1991), from the distribution of recent waits.
    """
    return min(
        BUDGETS_NS,
        key=lambda budget: sum(length if length <= budget else budget + SLEEP_NS for length in lengths_ns),
    )


class Waits:
    """Number and sum of the lengths of some waits."""

    __slots__ = ("count", "sum_ns")

    def __init__(self) -> None:
        self.count = self.sum_ns = 0

    def add(self, length_ns: int) -> None:
        """Count one wait."""
        self.count += 1
        self.sum_ns += length_ns

    def mean_ns(self) -> float:
        """Return the mean length; 0 without waits."""
        return self.sum_ns / max(1, self.count)


class Patience:
    """Decision how long to yield before sleeping, from the lengths of past waits and from slow yields.

    Pure: times (nanoseconds, on one monotonic clock) are arguments, and the run delay comes from a function.
    """

    slow_ns = SLOW_NS

    def __init__(self, *, yields: bool = True, run_delay: Callable[[], int] = run_delay_ns) -> None:
        self.yields = yields
        self.budget_ns = BUDGETS_NS[0] if yields else 0
        """Time to yield at present, pauses aside."""
        self.level = 0
        """Number of recent losses that yielding was not worth, at most MAX_LEVEL."""
        self.resume_ns = 0
        """Time at which the present pause of yielding ends."""
        self._run_delay = run_delay
        self._delayed_ns = run_delay() if yields else 0
        """Run delay at the last review."""
        self._lengths: deque[int] = deque(maxlen=KEPT_WAITS)
        self._yielded, self._slept = Waits(), Waits()
        """Waits since the last loss: those that yielded, and those of the pause, which slept at once."""

    def review(self, waits: list[tuple[int, int]], now_ns: int) -> tuple[int, int]:
        """Return (budget, time from which to yield) after these waits: (length, longest yield, 0 for none) of each.

        Called after every few waits, and at once after a yield of more than `slow_ns`.
        """
        if not self.yields:
            return 0, 0
        # Read at every review, not only after a loss: else small delays of many waits would look like one.
        delayed_before, self._delayed_ns = self._delayed_ns, self._run_delay()
        for length, worst in waits:
            self._lengths.append(length)
            (self._yielded if worst else self._slept).add(length)
            # A stopped process or a paused machine loses time too, but not to another process: it was not runnable.
            if worst > SLOW_NS and (self._delayed_ns - delayed_before >= worst // 2 or not self._delayed_ns):
                if self._yielded.mean_ns() < WORTH * self._slept.mean_ns():
                    self.level //= 2
                self.resume_ns = now_ns + min(worst, MAX_LOSS_NS) * PENALTY * (1 << self.level)
                self.level = min(self.level + 1, MAX_LEVEL)
                self._yielded, self._slept = Waits(), Waits()
        self.budget_ns = best_budget_ns(self._lengths)
        return self.budget_ns, self.resume_ns

    def __repr__(self) -> str:
        return f"Patience(budget {self.budget_ns / US:.0f} us, level {self.level})"


def patience() -> Patience:
    """Return the policy of a new doorbell. `RAYLANE_WAIT=block` disables yielding (for comparisons)."""
    return Patience(yields=settings.WAIT.read() == "adaptive")

"""One deadline for a wait of several steps: each step receives the deadline instead of a timeout of its own."""

from __future__ import annotations

import math
import os
import time

DEFAULT_TIMEOUT_S = 60.0
"""Timeout in seconds of a wait without a timeout argument when `RAYLANE_TIMEOUT_S` is not set."""


def default_timeout_s() -> float | None:
    """Return the seconds in `RAYLANE_TIMEOUT_S`: 60 when unset, None for `none` or `inf`. ValueError for other text."""
    # Read at every call, so that a test or a program can change the variable while it runs.
    text = os.environ.get("RAYLANE_TIMEOUT_S", "").strip().lower()
    if not text:
        return DEFAULT_TIMEOUT_S
    if text in ("none", "inf"):
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise ValueError(f"RAYLANE_TIMEOUT_S must be a number of seconds such as 60, or none, got {text!r}")
    return seconds


LONGEST_S = 1e9
"""Longest timeout (about 30 years) that is not treated as "no limit".

Callers often pass `sys.maxsize` for no limit, which overflows the timeouts of system calls (some 292 years).
"""


class Deadline:
    """A point on the monotonic clock, or no limit. `timeout_s` keeps the given timeout for messages."""

    __slots__ = ("at", "timeout_s")

    def __init__(self, timeout_s: float | None) -> None:
        if timeout_s is not None and not timeout_s >= 0:  # in this form the condition refuses NaN too
            raise ValueError(f"timeout must be a number of seconds >= 0, or None for no limit, got {timeout_s!r}")
        self.timeout_s = timeout_s
        self.at = math.inf if timeout_s is None or timeout_s > LONGEST_S else time.monotonic() + timeout_s

    def left_s(self) -> float | None:
        """Return the seconds left (at least 0), or None for no limit, as `socket.settimeout` and `wait` accept them."""
        return None if self.at == math.inf else max(0.0, self.at - time.monotonic())

    def __repr__(self) -> str:
        return (
            "Deadline(none)" if self.at == math.inf else f"Deadline({self.left_s():.3f} s of {self.timeout_s:g} s left)"
        )

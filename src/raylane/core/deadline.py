"""One deadline that travels down through a wait of several steps. Used by everything that waits."""

from __future__ import annotations

import math
import os
import time

DEFAULT_TIMEOUT_S = 60.0
"""What a wait is given when its caller says nothing and `RAYLANE_TIMEOUT_S` is not set."""


def default_timeout_s() -> float | None:
    """Seconds from `RAYLANE_TIMEOUT_S` (60 when unset; `none` or `inf` for no limit). ValueError for anything else."""
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
        raise ValueError(f"RAYLANE_TIMEOUT_S={text!r} is not a number of seconds; set it to e.g. 60, or to none")
    return seconds


LONGEST_S = 1e9
"""About 30 years. A longer timeout is none: `sys.maxsize` is a usual way to say so, and overflows what the system's
waits take (some 292 years)."""


class Deadline:
    """A point on the monotonic clock, or none. `timeout_s` as given is kept for messages."""

    __slots__ = ("at", "timeout_s")

    def __init__(self, timeout_s: float | None) -> None:
        if timeout_s is not None and not timeout_s >= 0:
            raise ValueError(f"timeout={timeout_s!r}: a timeout is a number of seconds >= 0, or None for no limit")
        self.timeout_s = timeout_s
        self.at = math.inf if timeout_s is None or timeout_s > LONGEST_S else time.monotonic() + timeout_s

    def left_s(self) -> float | None:
        """Seconds left, never below 0; None when there is no limit. What `socket.settimeout` and `wait` take."""
        return None if self.at == math.inf else max(0.0, self.at - time.monotonic())

    def __repr__(self) -> str:
        return (
            "Deadline(none)" if self.at == math.inf else f"Deadline({self.left_s():.3f} s of {self.timeout_s:g} s left)"
        )

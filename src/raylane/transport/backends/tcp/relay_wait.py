"""Decision how long a reader waits for the copy that another reader of its host is fetching. Pure: times are arguments.

joined ──word with progress──> waiting ──copy──> done
   │                              │
   └─ silence, or the copy would come after the deadline ──> read from the source
"""

from __future__ import annotations

import math

SILENT_S = 5.0
"""Longest time without progress of the other reader; the network may be slow, but the reader may also be stopped."""
_SILENT_PART = 0.25
"""The same as a part of the time that is left, so that enough is left for a read from the source."""
_JUDGE_AFTER_S = 1.0
"""Time after which the speed of the other reader is taken for its speed until the end."""


class RelayWait:
    """State of one wait. `now` is always the monotonic clock, in seconds."""

    __slots__ = ("_began", "_deadline", "_done", "_first", "_heard", "_nbytes", "_silent_s")

    def __init__(self, now: float, left_s: float | None, nbytes: int) -> None:
        """Begin to wait for `nbytes` with this much time left (None: any)."""
        self._began = self._heard = now
        self._deadline = math.inf if left_s is None else now + left_s
        self._silent_s = SILENT_S if left_s is None else min(SILENT_S, left_s * _SILENT_PART)
        self._nbytes = nbytes
        self._done = -1
        self._first = 0
        """Bytes that were done at the first word, before this reader could measure."""

    def heard(self, now: float, done: int) -> None:
        """Take notice of a word: the other reader has `done` bytes. A word without progress counts as silence."""
        if done <= self._done:
            return
        if self._done < 0:
            self._first, self._began = done, now
        self._heard, self._done = now, done

    def left_s(self, now: float) -> float:
        """Return the seconds to wait for the next word; 0 to stop waiting and read from the source."""
        spent, got = self._heard - self._began, self._done - self._first
        if spent >= _JUDGE_AFTER_S and got > 0:
            rest_s = (self._nbytes - self._done) * spent / got  # at the speed so far
            if now + rest_s > self._deadline:
                return 0.0
        return max(0.0, min(self._heard + self._silent_s, self._deadline) - now)

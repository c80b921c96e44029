"""Deadlines of executions in shared memory: the driver sets them, and actors of its host skip calls that are too late.

    HEAD_BYTES   slot 0:  (deadline + 1) << 16 | execution & 0xffff   u64; 0 if there is none
                 slot 1:  ...

A deadline is a time of the monotonic clock in microseconds, which all processes of one kernel share; 0 stands for an
execution that was cancelled. Execution n has slot n mod `max_inflight`, as its messages have. The low bits let an actor
ignore the word of another execution: `cancel` may come when the slot belongs to a later execution already.

One word is written at a time, before the inputs of its execution: so an actor that has a message sees the deadline.
"""

from __future__ import annotations

import time

from raylane.core.memory.segment import HEAD_BYTES, Segment
from raylane.errors import GraphCancelledError, GraphError, GraphTimeoutError

WORD_BYTES = 8
_TAG_BITS = 16
_CANCELLED = 0
"""Deadline of a cancelled execution."""
_LATEST = (1 << (64 - _TAG_BITS)) - 2
"""Latest deadline that a word can hold: 8.9 years after the start of the clock."""


class ExecutionDeadlines:
    """Deadlines of the executions in flight. The driver writes, actors read."""

    def __init__(self, segment: Segment, slots: int) -> None:
        """Use a segment of `size_of(slots)` bytes."""
        self.words = segment.view[HEAD_BYTES : HEAD_BYTES + slots * WORD_BYTES].cast("Q")
        """Word of each slot."""
        self.slots = slots
        self.used = False
        """True if this process has ever set a deadline."""

    @staticmethod
    def size_of(slots: int) -> int:
        """Return the bytes of a segment for this number of slots."""
        return HEAD_BYTES + slots * WORD_BYTES

    def set(self, execution: int, at_s: float) -> None:
        """Set the deadline of an execution before its inputs are sent, as a time of time.monotonic()."""
        self._write(execution, max(1, min(int(at_s * 1e6), _LATEST)))

    def clear(self, execution: int) -> None:
        """Remove what an earlier execution has left in the slot of one that has no deadline."""
        self.words[execution % self.slots] = 0

    def cancel(self, execution: int) -> None:
        """Let actors skip the calls of an execution that have not begun."""
        self._write(execution, _CANCELLED)

    def _write(self, execution: int, deadline_us: int) -> None:
        self.used = True
        self.words[execution % self.slots] = (deadline_us + 1) << _TAG_BITS | _tag(execution)

    def refusal(self, execution: int, label: str) -> GraphError | None:
        """Return the error for a call of an execution that must not begin any more; None if it may begin."""
        word = self.words[execution % self.slots]
        deadline_us = (word >> _TAG_BITS) - 1
        if not word or word & _tag(-1) != _tag(execution) or deadline_us > time.monotonic() * 1e6:
            return None
        if deadline_us == _CANCELLED:
            return GraphCancelledError(f"execution {execution} was cancelled before {label} began", execution=execution)
        return GraphTimeoutError(
            f"execution {execution} did not end within its timeout_s: {label} had not begun, and was skipped",
            execution=execution,
        )


def _tag(execution: int) -> int:
    return execution & ((1 << _TAG_BITS) - 1)

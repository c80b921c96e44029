"""Spans of trainer and engines in one run: a timeline for ui.perfetto.dev, and how busy each of them was. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class WorkSpan(NamedTuple):
    """Work of one actor from one time of the system clock to another, in seconds."""

    actor: str
    name: str
    began_s: float
    ended_s: float


@dataclass
class Timeline:
    """All spans of a run."""

    spans: list[WorkSpan] = field(default_factory=list)

    def add(self, actor: str, name: str, began_s: float, ended_s: float) -> None:
        """Note a span."""
        self.spans.append(WorkSpan(actor, name, began_s, ended_s))

    def busy(self, actor: str, since_s: float, until_s: float) -> float:
        """Return the share of a time in which an actor worked."""
        if until_s <= since_s:
            return 0.0
        intervals = []
        # From the end: the spans of one actor are noted in order, and a run has thousands of them.
        for span in reversed(self.spans):
            if span.actor == actor:
                if span.ended_s <= since_s:
                    break
                intervals.append((max(span.began_s, since_s), min(span.ended_s, until_s)))
        return union(intervals) / (until_s - since_s)

    def trace(self) -> dict[str, Any]:
        """Return the timeline in the Trace Event Format; times begin at the first span."""
        begin = min((span.began_s for span in self.spans), default=0.0)
        rows = {actor: number for number, actor in enumerate(dict.fromkeys(span.actor for span in self.spans), 1)}
        names = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": row, "args": {"name": actor}}
            for actor, row in rows.items()
        ]
        return {
            "traceEvents": [
                *names,
                *(
                    {
                        "ph": "X",
                        "name": span.name,
                        "pid": 1,
                        "tid": rows[span.actor],
                        "ts": round((span.began_s - begin) * 1e6, 1),
                        "dur": round((span.ended_s - span.began_s) * 1e6, 1),
                    }
                    for span in sorted(self.spans, key=lambda span: span.began_s)
                ),
            ]
        }


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals; those that end before they begin count nothing."""
    total, reached = 0.0, float("-inf")
    # In order of their beginnings, so only the part behind what was counted so far is new.
    for begin, end in sorted(intervals):
        begin = max(begin, reached)
        if end > begin:
            total += end - begin
            reached = end
    return total

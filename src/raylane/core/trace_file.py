"""Trace files for ui.perfetto.dev and chrome://tracing (Google's "Trace Event Format"), whole or line by line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def save(path: str | Path, trace: dict[str, Any]) -> None:
    """Write a trace as JSON. Creates the folder if it does not exist."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(trace))


def parse_lines(text: str) -> list[dict[str, Any]]:
    """Return the events of a file with one event per line, as a process writes it; skips an incomplete last line."""
    events = []
    for line in text.splitlines():
        try:
            event = json.loads(line.strip().rstrip(","))
        except ValueError:  # the bracket that opens the list, or a line that a killed process did not finish
            continue
        if isinstance(event, dict):
            events.append(event)
    return events


def merge(processes: Iterable[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return one trace with the events of several processes; its times begin at the first event.

    A process gets another number if an earlier one has the same pid, which happens with several hosts.
    """
    events: list[dict[str, Any]] = []
    used: set[int] = set()
    for process in processes:
        pid = next((event["pid"] for event in process), 1)
        while pid in used:
            pid += 1 << 22  # beyond the largest pid of Linux
        used.add(pid)
        events += [{**event, "pid": pid} for event in process]
    timed = [event["ts"] for event in events if "ts" in event]
    begin = min(timed, default=0.0)
    for event in events:
        if "ts" in event:
            # Three decimals are nanoseconds; more of them would be noise of floating point.
            event["ts"] = round(event["ts"] - begin, 3)
    events.sort(key=lambda event: (event.get("ts", -1.0), -event.get("dur", 0.0)))
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"first_event_s": begin / 1e6}}

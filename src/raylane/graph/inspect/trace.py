"""Trace of executions for ui.perfetto.dev and chrome://tracing: the file that `g.trace("run.json")` writes.

`chrome_trace` is pure: it turns plain records into a dict for `json.dump`. The format is Google's "Trace Event Format"
(JSON object form; docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU). Viewers require more:

- Slices of one thread must nest or lie apart (perfetto.dev/docs/faq). So the driver has one thread for each execution
  in flight, and times that the clock could not distinguish are moved by a nanosecond.
- An arrow ("flow": `s` to `f`, paired by id, name and category) belongs to the slice that is open at its time, with
  `bp="e"` at its end too. So each end lies inside a slice, and events of equal time come in the order slices, arrows.
- Perfetto truncates microseconds times 1000 to an int (CoerceToNs in its json_trace_utils.cc), so that 1.001 may become
  1000 ns and two slices overlap: such a number is raised by its last bit.
- Process and thread 0 mean the idle process to Perfetto: numbers begin at 1, and thread numbers are never reused.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from raylane.graph.inspect import stats
from raylane.graph.inspect.arrivals import Arrivals, CallRecord, DriverRecord
from raylane.graph.plan.ir import DRIVER, INPUT, Edge, Plan
from raylane.graph.plan.schedule import reading_task

Event: TypeAlias = dict[str, Any]
Span: TypeAlias = tuple[int, int]
"""(start, end) in nanoseconds since the first record; never empty."""

THREADS_PER_MEMBER = 1000
"""Distance between the thread numbers of two members, with room for every execution in flight."""


def chrome_trace(
    plan: Plan, calls: Iterable[CallRecord], executions: Iterable[DriverRecord], *, pids: Mapping[int, int] = {}
) -> dict[str, Any]:
    """Return the trace of these records, which may come in any order and with gaps.

    Each member is a process, named with its real process id if `pids` has it. A call is a slice; before it lies a slice
    `wait for ...` with the sender of its last input (from the submission on; the time before is idle), after it a slice
    `send`. Arrows are drawn where both ends are known. Times in the trace are microseconds since the first record.
    The metadata tell in words where the time of each actor went.
    """
    calls, executions = sorted(calls, key=lambda call: call[3]), sorted(executions, key=lambda record: record[1])
    begin = min([*(call[2] for call in calls), *(record[1] for record in executions)], default=0.0)
    arrivals = Arrivals(plan, calls, executions)
    trace = _Trace(plan, begin, arrivals)
    for number, submitted_s, completed_s in executions:
        trace.add_execution(number, submitted_s, completed_s)
    for call in calls:
        trace.add_call(*call)
    for edge in plan.edges:
        trace.add_arrows(edge)
    return {
        "traceEvents": [*trace.names(pids), *sorted(trace.events, key=lambda event: (event["ts"], event["ph"] != "X"))],
        "displayTimeUnit": "ns",
        "otherData": {
            "clock": "seconds since an arbitrary time",
            "first_record_s": begin,
            "where the time went": stats.where_time_went(plan, stats.spent_of_records(plan, calls), arrivals),
        },
    }


class _Trace:
    """Events of a trace, and the slices in which arrows begin and end."""

    def __init__(self, plan: Plan, begin_s: float, arrivals: Arrivals) -> None:
        self.plan = plan
        self.begin_s = begin_s
        self.arrivals = arrivals
        self.events: list[Event] = []
        self.submitted: dict[int, Span] = {}
        """Slice of each execution."""
        self.rows: dict[int, int] = {}
        """Thread of the driver that shows an execution."""
        self.free_rows: list[int] = []
        self.busy_rows: list[tuple[int, int]] = []
        """Heap of (end, row) of the executions that occupy a row."""
        self.called: list[dict[int, Span]] = [{} for _ in plan.tasks]
        """Slice of each call, by task and execution."""
        self.sent: list[dict[int, Span]] = [{} for _ in plan.tasks]
        """Slice of each send, by task and execution."""
        self.until = [0] * len(plan.members)
        """End of each member's last slice."""
        self.arrow_count = 0

    def add_execution(self, number: int, submitted_s: float, completed_s: float) -> None:
        """Add the slice of an execution, in the first free row of the driver."""
        start = self._ns(submitted_s)
        # A slice must not be empty: viewers drop it.
        end = max(self._ns(completed_s), start + 1)
        # Reuse the rows of executions that have ended, lowest number first: the picture stays compact.
        while self.busy_rows and self.busy_rows[0][0] <= start:
            heapq.heappush(self.free_rows, heapq.heappop(self.busy_rows)[1])
        row = heapq.heappop(self.free_rows) if self.free_rows else len(self.busy_rows)
        heapq.heappush(self.busy_rows, (end, row))
        self.submitted[number] = start, end
        self.rows[number] = row
        self._slice(f"execution {number}", "execution", DRIVER, (start, end), number, row)

    def add_call(self, task: int, number: int, ready_s: float, start_s: float, end_s: float, sent_s: float) -> None:
        """Add the slices of a call: waiting, the call itself, sending."""
        member = self.plan.tasks[task].member
        # Time before the submission is idle time of the actor, not a wait for inputs.
        ready = max(self._ns(ready_s), self.until[member], self.submitted.get(number, (0, 0))[0])
        start = max(self._ns(start_s), self.until[member])
        end = max(self._ns(end_s), start + 1)
        sent = max(self._ns(sent_s), end + 1)
        if ready < start:
            last = self.arrivals.last_input(task, number)
            # An input that was there before the actor was ready is not what it waited for.
            sender = None if last is None or last.sent_s <= ready_s else self.arrivals.member_of(last.source)
            name = "wait" if sender is None else f"wait for {self.plan.members[sender]}"
            self._slice(name, "wait", member, (ready, start), number)
        self._slice(self.plan.labels[task], "call", member, (start, end), number)
        self._slice("send", "send", member, (end, sent), number)
        self.called[task][number] = start, end
        self.sent[task][number] = end, sent
        self.until[member] = sent

    def add_arrows(self, edge: Edge) -> None:
        """Add an arrow for each reader and execution, from the send to the call that read the message."""
        source = self.plan.values[edge.value].source
        begins = self.submitted if source == INPUT else self.sent[source]
        for reader in edge.readers:
            ends = self.submitted if reader == DRIVER else self.called[reading_task(self.plan, edge.index, reader)]
            # Records are kept for a limited number of executions, so one end may be missing.
            for number in begins.keys() & ends.keys():
                begin, end = begins[number][0], ends[number]
                # A message reaches the driver when it is sent, and a call when the call starts.
                at = max(begin, end[0])
                if at >= end[1]:  # clocks of two hosts differ: the reader ended before the writer had sent
                    continue
                self.arrow_count += 1
                common = {"name": self.plan.source_label(edge.value), "cat": "edge", "id": self.arrow_count}
                args = {"edge": edge.index, "execution": number, "transport": edge.transport}
                for phase, member, time in (("s", edge.writer, begin), ("f", reader, at)):
                    event = {**common, "ph": phase, "ts": _us(time), **self._thread(member, number), "args": args}
                    self.events.append(event if phase == "s" else {**event, "bp": "e"})

    def _slice(self, name: str, category: str, member: int, span: Span, number: int, row: int | None = None) -> None:
        start, end = span
        self.events.append(
            {
                "name": name,
                "cat": category,
                "ph": "X",
                "ts": _us(start),
                "dur": _us(end - start),
                **self._thread(member, number),
                "args": {"execution": number},
            }
        )

    def _thread(self, member: int, number: int) -> Event:
        row = self.rows[number] if member == DRIVER else 0
        return {"pid": member + 1, "tid": (member + 1) * THREADS_PER_MEMBER + row}

    def names(self, pids: Mapping[int, int]) -> Iterable[Event]:
        """Yield the metadata: names and order of processes and threads."""
        for member, name in enumerate(self.plan.members):
            shown = f"{name} (pid {pids[member]})" if member in pids else name
            yield self._metadata("process_name", member, 0, name=shown)
            yield self._metadata("process_sort_index", member, 0, sort_index=member)
            rows = range(1 + max(self.rows.values(), default=0)) if member == DRIVER else [0]
            for row in rows:
                yield self._metadata("thread_name", member, row, name="in flight" if member == DRIVER else "graph loop")
                yield self._metadata("thread_sort_index", member, row, sort_index=row)

    def _metadata(self, what: str, member: int, row: int, **args: str | int) -> Event:
        tid = (member + 1) * THREADS_PER_MEMBER + row
        return {"name": what, "ph": "M", "ts": 0, "pid": member + 1, "tid": tid, "args": args}

    def _ns(self, time_s: float) -> int:
        return round((time_s - self.begin_s) * 1e9)


def _us(time_ns: int) -> float:
    time_us = time_ns / 1000
    return time_us if int(time_us * 1000) == time_ns else math.nextafter(time_us, math.inf)

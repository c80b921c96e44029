"""Critical path of past executions: the chain of calls and messages that decided how long each took. Pure.

`CompiledGraph.explain` prints it. The path of an execution is found backwards, from its completion to its submission:

    completed <- last message to the driver <- its call <- last input of that call, or the call before it in the actor

    submitted |-- input --|-- f computes --|-- f sends --|-- f -> g --|-- g computes --|-- ... --| completed

Each leg covers the time from the end of the leg before it, so that the legs add up to the whole execution.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from raylane.graph.inspect.arrivals import Arrivals, CallRecord, DriverRecord
from raylane.graph.plan.ir import INPUT, Plan

Leg: TypeAlias = tuple[str, float]
"""(text for people, seconds)."""
LARGEST = 5
"""Number of legs named in the sum over all paths."""


def explain(plan: Plan, calls: Iterable[CallRecord], executions: Iterable[DriverRecord]) -> str:
    """Return the critical path of the executions with complete records as text.

    The path that most executions took is shown with the median of each leg. The last line sums over all executions.
    """
    arrivals = Arrivals(plan, calls, executions)
    numbers = [number for number in sorted(arrivals.executions) if arrivals.complete(number)]
    paths = [path for number in numbers if (path := critical_path(arrivals, number))]
    if not paths:
        return "no complete record of an execution: execute the graph, get the results, and ask again"
    total_us = statistics.median(sum(seconds for _, seconds in path) for path in paths) * 1e6
    kinds = Counter(tuple(what for what, _ in path) for path in paths)
    common, count = kinds.most_common(1)[0]
    same = [path for path in paths if tuple(what for what, _ in path) == common]
    legs = [(what, statistics.median(path[place][1] for path in same)) for place, what in enumerate(common)]
    lines = [
        f"critical path of {_executions(len(paths))}: {total_us:,.1f} us from execute to result (median)",
        f"{_executions(count)} took this path (medians):",
        *_table(legs),
        f"sum over all paths: {', '.join(_largest(paths))}",
    ]
    return "\n".join(lines)


def critical_path(arrivals: Arrivals, number: int) -> list[Leg]:
    """Return the legs of one execution from its submission to its completion. It must have complete records.

    Empty if the driver reads no message of the graph.
    """
    plan = arrivals.plan
    _, submitted_s, at_s = arrivals.executions[number]
    legs: list[Leg] = []

    def go_back(time_s: float, what: str) -> None:
        """Add the leg that lasted from `time_s` to the beginning of the legs found so far."""
        nonlocal at_s
        # Clipped: a reader may start before the sender has noted its time, and clocks of two hosts differ.
        time_s = max(submitted_s, min(time_s, at_s))
        legs.append((what, at_s - time_s))
        at_s = time_s

    message = arrivals.last_result(number)
    if message is None:
        return []
    task: int | None = message.source
    link = f"{_name(plan, message.source)} -> driver"
    while task is not None and task != INPUT:
        _, _, _, start_s, end_s, sent_s = arrivals.calls[task, number]
        go_back(sent_s, link)
        go_back(end_s, f"{plan.labels[task]} sends")
        go_back(start_s, f"{plan.labels[task]} computes")
        task, link = _cause(arrivals, task, number)
    go_back(submitted_s, link)
    return legs[::-1]


def _cause(arrivals: Arrivals, task: int, number: int) -> tuple[int | None, str]:
    """Return the task (or INPUT) of the same execution whose end let a call start, and the text of the leg between.

    None instead of a task if the actor was busy with earlier executions.
    """
    plan = arrivals.plan
    member = plan.tasks[task].member
    before = arrivals.call_before(task, number)
    free_s = arrivals.calls[task, number][2] if before is None else before[5]
    last = arrivals.last_input(task, number)
    first = before is None and number == 0  # nothing came before the first call of all
    if last is not None and (first or last.sent_s >= free_s):
        return last.source, f"{_name(plan, last.source)} -> {plan.labels[task]}"
    if before is not None and before[1] == number:
        return before[0], f"{plan.members[member]} goes on to {plan.labels[task]}"
    return None, f"{plan.members[member]} is busy with earlier executions"


def _name(plan: Plan, source: int) -> str:
    return "input" if source == INPUT else plan.labels[source]


def _executions(count: int) -> str:
    return f"{count} execution{'' if count == 1 else 's'}"


def _table(legs: Sequence[Leg]) -> list[str]:
    """Return one line for each leg: microseconds, share of all legs, text."""
    total_s = sum(seconds for _, seconds in legs) or 1.0
    return [f"{seconds * 1e6:12,.1f} us {seconds / total_s:5.0%}  {what}" for what, seconds in legs]


def _largest(paths: Sequence[Sequence[Leg]]) -> list[str]:
    """Return the legs that took most time in all paths together, each with its share."""
    spent: dict[str, float] = {}
    for path in paths:
        for what, seconds in path:
            spent[what] = spent.get(what, 0.0) + seconds
    total_s = sum(spent.values()) or 1.0
    largest = sorted(spent.items(), key=lambda item: -item[1])[:LARGEST]
    return [f"{what} {seconds / total_s:.0%}" for what, seconds in largest]

"""Text of a plan: the output of `g.show()`. Pure; `drawing` makes the picture.

Channels are passed as a mapping: edge index to [(kind, note), ...]. Edges that are not in the mapping are shown without
a channel.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from raylane.graph.plan.ir import (
    DRIVER,
    Const,
    Edge,
    Expression,
    Join,
    Plan,
    Ref,
    Select,
    Task,
    steps_label,
)
from raylane.graph.plan.schedule import reading_task

Channels: TypeAlias = Mapping[int, Sequence[tuple[str, str]]]

WIDTH = 100
"""Number of columns of a terminal that the text fits into."""
LEAST_CELL = 16
"""Number of columns that a cell keeps when its table has to be narrowed."""


def describe(plan: Plan, channels: Channels | None = None, *, max_inflight: int | None = None) -> str:
    """Return the members with their calls in order, the edges that each call takes and sends, and each edge's channel.

    `e3` is edge 3. A call takes a message from an edge, unless its actor has the value already: an earlier call there
    computed the value or took its message. Lines have at most 100 columns.
    """
    driver = [
        ["sends", _edge_list(plan.edges_from(DRIVER)) or "nothing"],
        ["collects", _edge_list(plan.edges_to(DRIVER)) or "nothing"],
        ["returns", expression_text(plan, plan.output)],
    ]
    parts = [summary(plan, max_inflight), "\n".join([plan.members[DRIVER], *_table(driver)]), _actors(plan)]
    rows = []
    for edge in plan.edges:
        readers = ", ".join(plan.members[reader] for reader in edge.readers)
        first = [f"e{edge.index}", plan.source_label(edge.value), f"{plan.members[edge.writer]} -> {readers}"]
        for number, (kind, note) in enumerate((channels or {}).get(edge.index) or [("", "")]):
            rows.append([*(["", "", ""] if number else first), kind, note])
    if rows:
        parts.append("\n".join(["edges", *_table(rows)]))
    return "\n\n".join(parts)


def summary(plan: Plan, max_inflight: int | None = None) -> str:
    """Return the size of the graph in one line."""
    actors, calls, edges = len(plan.members) - 1, len(plan.tasks), len(plan.edges)
    text = f"graph of {_count(actors, 'actor')}, {_count(calls, 'call')}, {_count(edges, 'edge')}"
    return text if max_inflight is None else f"{text}; at most {_count(max_inflight, 'execution')} in flight"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _actors(plan: Plan) -> str:
    """Return one table for all actors, so that their columns are aligned, with each name before the actor's calls."""
    rows = {}
    for member in range(1, len(plan.members)):
        for place, index in enumerate(plan.order[member], 1):
            task = plan.tasks[index]
            incoming = [edge for edge in plan.edges_to(member) if reading_task(plan, edge.index, member) == index]
            taken = {edge.value for edge in incoming}
            has = [plan.source_label(value) for value in task.reads if value not in taken]
            outgoing = [edge for edge in plan.edges if plan.values[edge.value].source == index]
            inputs = [f"takes {_edge_list(incoming)}" if incoming else "", f"has {', '.join(has)}" if has else ""]
            rows[member, place] = [
                f"{place}.",
                f"{method_label(plan, task)}({arguments_text(plan, task)})",
                ", ".join(filter(None, inputs)) or "takes nothing",
                f"sends {_edge_list(outgoing) or 'nothing'}" + (" (leaf)" if task.leaf else ""),
            ]
    widths = _widths(list(rows.values()))
    lines = []
    for (member, place), row in rows.items():
        lines += [*([plan.members[member]] if place == 1 else []), *_wrapped(row, widths)]
    return "\n".join(lines)


def method_label(plan: Plan, task: Task) -> str:
    """Return the label of a task without its member's name, which is printed above it."""
    return plan.labels[task.index].removeprefix(f"{plan.members[task.member]}.")


def _edge_list(edges: Sequence[Edge]) -> str:
    return ", ".join(f"e{edge.index}" for edge in edges)


# Expressions


def arguments_text(plan: Plan, task: Task) -> str:
    """Return the arguments of a call: `input[0], k=1`."""
    named = [f"{key}={expression_text(plan, value)}" for key, value in task.kwargs]
    return ", ".join([*(expression_text(plan, value) for value in task.args), *named])


def expression_text(plan: Plan, expression: Expression) -> str:
    """Return an expression as source code. Constants other than short plain ones appear as their type."""
    if isinstance(expression, Const):
        return _constant_text(expression.value)
    if isinstance(expression, Ref):
        return plan.source_label(expression.value)
    if isinstance(expression, Select):
        return expression_text(plan, expression.base) + steps_label(expression.steps)
    items = [expression_text(plan, item) for item in expression.items]
    if isinstance(expression, Join):
        return f"{expression.how}({', '.join(items)}{'' if expression.axis is None else f', axis={expression.axis}'})"
    if expression.kind == "dict":
        pairs = zip(expression.keys, items, strict=True)
        return "{" + ", ".join(f"{_constant_text(key)}: {item}" for key, item in pairs) + "}"
    if expression.kind == "list":
        return f"[{', '.join(items)}]"
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def _constant_text(value: object) -> str:
    """Return the repr of a constant if it is certainly short and cheap, else its type."""
    if value is None or isinstance(value, bool | int | float | complex):
        text = repr(value)
    elif isinstance(value, str | bytes):
        text = repr(value[:24]) + ("..." if len(value) > 24 else "")
    elif isinstance(value, list | tuple | dict | set) and not value:
        text = repr(value)
    else:
        return f"<{type(value).__name__}>"
    return text if len(text) <= 40 else f"<{type(value).__name__}>"


# Tables


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of aligned, indented columns. Cells that are too wide are wrapped."""
    widths = _widths(rows)
    return [line for row in rows for line in _wrapped(row, widths)]


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the width of each column: that of its widest cell, with the widest columns narrowed until all fit."""
    widths = [max(1, *(len(row[column]) for row in rows)) for column in range(len(rows[0]))]
    room = WIDTH - 2 * len(widths)
    # Narrow the widest column one by one: short columns such as names keep their width.
    while sum(widths) > room and max(widths) > LEAST_CELL:
        widths[widths.index(max(widths))] -= 1
    return widths


def _wrapped(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    cells = [textwrap.wrap(cell, width, break_on_hyphens=False) for cell, width in zip(row, widths, strict=True)]
    lines = itertools.zip_longest(*cells, fillvalue="")
    return ["".join(f"  {text:{width}}" for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]

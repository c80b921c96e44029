"""What a graph is, worked out once: members, tasks, values, who sends what to whom, and what each member does in order.

Pure. `plan` reads nodes (see `nodes`) and gives a `Plan` of frozen values, which is printed, drawn, checked against
deadlock (`schedule`) and sent to the members. It knows nothing of Ray, channels or hosts.

Vocabulary: a *member* is a process of the graph (0 is the driver, the others are actors); a *task* is one method call
in every execution; a *value* is what a task returns, or the input, or a selected part of either; an *edge* carries one
value from the member that makes it to all members that read it. An *expression* says how an argument is put together.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, TypeAlias

DRIVER = 0
INPUT = -1
"""The source of values that come with `execute`."""

Step: TypeAlias = tuple[Any, ...]
"""How to select from a value: ("item", key), ("attr", name), ("return", index, count) for one of the declared returns
of a call, ("part", index, count, axis), ("done",) for nothing but the fact that it was computed, or
("argument", how, key) for one argument of `execute`."""


@dataclass(frozen=True)
class Value:
    """What travels: the result of task `source` (or INPUT), with `steps` applied where it is made."""

    index: int
    source: int
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Const:
    value: Any
    renewed: bool = field(default=False, compare=False)
    """True for a container that a method could change: each call gets one of its own (`ops.renewed`)."""


@dataclass(frozen=True)
class Ref:
    """The value with this index."""

    value: int


@dataclass(frozen=True)
class Build:
    """A container of expressions: `kind` is list, tuple or dict; `keys` are a dict's."""

    kind: str
    items: tuple[Expression, ...]
    keys: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Select:
    """Steps applied where an expression is used (those on a plain value are applied where it is made)."""

    base: Expression
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Join:
    """gather, first or mean of several expressions."""

    how: str
    items: tuple[Expression, ...]
    axis: int | None


Expression: TypeAlias = Const | Ref | Build | Select | Join


@dataclass(frozen=True)
class Task:
    """One call. `reads` are the values its arguments (and its trigger) need, each once, in order of first use."""

    index: int
    member: int
    method: str
    args: tuple[Expression, ...]
    kwargs: tuple[tuple[str, Expression], ...]
    reads: tuple[int, ...]
    leaf: bool
    """Whether no output needs it: its errors are reported, its result is dropped."""


@dataclass(frozen=True)
class Edge:
    """One value on its way from `writer` to `readers`, who are other members, in ascending order."""

    index: int
    value: int
    writer: int
    readers: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """A whole graph. Every tuple is indexed by the `index` of what it holds; `members[0]` is the driver's name."""

    members: tuple[str, ...]
    tasks: tuple[Task, ...]
    values: tuple[Value, ...]
    edges: tuple[Edge, ...]
    order: tuple[tuple[int, ...], ...]
    """For each member, its tasks in the order in which it runs them in every execution."""
    output: Expression
    collects: tuple[int, ...]
    """Values the driver reads: those of `output`, and of each leaf that it is done."""
    leaves: tuple[tuple[int, int], ...]
    """(value, task) for each leaf: the value says whether it went well."""
    multiple: bool = False
    """Whether the output is a MultiOutputNode."""
    labels: tuple[str, ...] = field(default=())
    """For each task, how people call it: Class.method, numbered where one actor has it several times."""
    leaves_are_fatal: bool = False
    """True if a failed leaf fails the result too."""

    @functools.cached_property
    def output_values(self) -> tuple[int, ...]:
        """The values that the output is put together from, each once: asked for in every execution."""
        return tuple(dict.fromkeys(values_in(self.output)))

    @functools.cached_property
    def fatal_tasks(self) -> frozenset[int]:
        """Calls whose failure fails the result: those that the output needs, or all."""
        return frozenset(task.index for task in self.tasks if self.leaves_are_fatal or not task.leaf)

    @functools.cached_property
    def fatal_values(self) -> frozenset[int]:
        """Values whose failure fails the result: those of the output, and what its calls read; or all."""
        if self.leaves_are_fatal:
            return frozenset(range(len(self.values)))
        return frozenset(self.output_values).union(*(self.tasks[task].reads for task in self.fatal_tasks))

    def edges_from(self, member: int) -> list[Edge]:
        return [edge for edge in self.edges if edge.writer == member]

    def edges_to(self, member: int) -> list[Edge]:
        return [edge for edge in self.edges if member in edge.readers]

    def source_member(self, value: int) -> int:
        """Who makes a value."""
        source = self.values[value].source
        return DRIVER if source == INPUT else self.tasks[source].member

    def source_label(self, value: int) -> str:
        """What people call a value: `input[0]`, `Encoder.forward[1]`, `Head.loss (part 1 of 4)`."""
        found = self.values[value]
        return ("input" if found.source == INPUT else self.labels[found.source]) + steps_label(found.steps)


def steps_label(steps: tuple[Step, ...]) -> str:
    text = ""
    for step in steps:
        if step[0] in ("item", "return"):
            text += f"[{step[1]!r}]"
        elif step[0] == "attr":
            text += f".{step[1]}"
        elif step[0] == "argument":
            text += f"[{step[2]!r}]" if step[1] == "item" else f".{step[2]}"
        elif step[0] == "part":
            text += f" (part {step[1]} of {step[2]})"
        else:
            text += f" ({step[0]})"
    return text


def values_in(expression: Expression) -> list[int]:
    """The values that an expression needs, in order, with repetitions."""
    if isinstance(expression, Ref):
        return [expression.value]
    if isinstance(expression, Select):
        return values_in(expression.base)
    if isinstance(expression, Build | Join):
        return [value for item in expression.items for value in values_in(item)]
    return []

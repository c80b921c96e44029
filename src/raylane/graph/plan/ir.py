"""Intermediate representation of a graph: a `Plan` of frozen values. Pure; knows nothing of Ray, channels or hosts.

`planner` makes a plan from nodes. It is printed, drawn, checked for deadlock (`schedule`) and sent to the members.

A *member* is a process of the graph (0 is the driver, the others are actors). A *task* is one method call in every
execution. A *value* is the result of a task, or the input, or a selected part of either. An *edge* carries one value
from the member that computes it to all members that read it. An *expression* describes how an argument is built from
values and constants.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from raylane.graph.collectives import Collective
from raylane.graph.nodes import EDGE_TRANSPORTS

DRIVER = 0
INPUT = -1
"""Source of the values that are arguments of `execute`."""

Step: TypeAlias = tuple[Any, ...]
"""One step of a selection from a value.

("item", key); ("attr", name); ("return", index, count) for one of the declared returns of a call;
("part", index, count, axis); ("done",) for the mere fact that the value was computed; ("argument", how, key) for one
argument of `execute`.
"""

MUTABLE_CONTAINERS = (list, dict, set, bytearray)
"""Types of containers among constants that a method could change."""


@dataclass(frozen=True)
class Value:
    """Result of task `source` (or INPUT) with `steps` applied by the member that computes it."""

    index: int
    source: int
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Const:
    """Constant argument."""

    value: Any
    mutable: bool = field(default=False, compare=False)
    """True if the value is or holds a mutable container: each call gets a copy (`operations.copy_containers`)."""


@dataclass(frozen=True)
class Ref:
    """Value with index `value`."""

    value: int


@dataclass(frozen=True)
class Build:
    """Container of expressions. `kind` is "list", "tuple" or "dict"; `keys` are those of a dict."""

    kind: str
    items: tuple[Expression, ...]
    keys: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Select:
    """Selection from an expression, applied by the member that uses it.

    Steps on a plain value belong to the `Value` instead: the member that computes it applies them.
    """

    base: Expression
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Join:
    """Several expressions joined by `how`: "gather", "first" or "mean"."""

    how: str
    items: tuple[Expression, ...]
    axis: int | None


Expression: TypeAlias = Const | Ref | Build | Select | Join


@dataclass(frozen=True)
class Task:
    """One call. `reads` are the values that its arguments need, each once, in order of first use.

    A call without such values reads one that marks the beginning of the execution.
    """

    index: int
    member: int
    method: str
    args: tuple[Expression, ...]
    kwargs: tuple[tuple[str, Expression], ...]
    reads: tuple[int, ...]
    leaf: bool
    """True if no output needs the call: its errors are reported, its result is dropped."""
    collective: Collective | None = None
    """The collective of which this is one call; None for a call of a method."""


@dataclass(frozen=True)
class Edge:
    """Transfer of one value from member `writer` to `readers`: other members, in ascending order."""

    index: int
    value: int
    writer: int
    readers: tuple[int, ...]
    transport: str = "auto"
    """"auto", "shm", "tcp" or a name of direct transport: see `nodes.Node.with_tensor_transport`."""
    publishes_cuda: bool = False
    """True if messages with large CUDA tensors go by direct transport: between actors with GPUs on one host."""

    @property
    def may_publish(self) -> bool:
        """True if the channel may carry a ticket in place of the tensors of a message."""
        return self.publishes_cuda or self.transport not in EDGE_TRANSPORTS


@dataclass(frozen=True)
class Plan:
    """Plan of a graph. Each task, value and edge stands at the position of its `index`."""

    members: tuple[str, ...]
    """Names of the members, the driver's first."""
    tasks: tuple[Task, ...]
    values: tuple[Value, ...]
    edges: tuple[Edge, ...]
    order: tuple[tuple[int, ...], ...]
    """Tasks of each member, in the order in which it runs them in every execution."""
    output: Expression
    """Result of an execution."""
    collects: tuple[int, ...]
    """Values that the driver reads: those of `output`, and one for each leaf that marks its end."""
    leaves: tuple[tuple[int, int], ...]
    """(value, task) for each leaf; the value marks the end of the task."""
    multiple: bool = False
    """True if the output is a MultiOutputNode."""
    labels: tuple[str, ...] = field(default=())
    """Name of each task for people: Class.method, numbered where it occurs several times."""
    leaves_are_fatal: bool = False
    """True if a failed leaf fails the result too."""

    @functools.cached_property
    def output_values(self) -> tuple[int, ...]:
        """Values that the output is built from, each once. Cached, because every execution uses them."""
        return tuple(dict.fromkeys(values_in(self.output)))

    @functools.cached_property
    def fatal_tasks(self) -> frozenset[int]:
        """Tasks whose failure fails the result: those that the output needs, or all."""
        return frozenset(task.index for task in self.tasks if self.leaves_are_fatal or not task.leaf)

    @functools.cached_property
    def fatal_values(self) -> frozenset[int]:
        """Values whose failure fails the result: those of the output and those that fatal tasks read, or all."""
        # Under fail_fast="leaves" any failure fails the result.
        if self.leaves_are_fatal:
            return frozenset(range(len(self.values)))
        return frozenset(self.output_values).union(*(self.tasks[task].reads for task in self.fatal_tasks))

    def fatal_inputs(self, member: int) -> frozenset[int]:
        """Return the values whose loss on the way to `member` fails the result."""
        if member == DRIVER:
            return self.fatal_values
        tasks = (self.tasks[task] for task in self.order[member] if task in self.fatal_tasks)
        return frozenset(value for task in tasks for value in task.reads)

    def edges_from(self, member: int) -> list[Edge]:
        """Return the edges that a member writes."""
        return [edge for edge in self.edges if edge.writer == member]

    def edges_to(self, member: int) -> list[Edge]:
        """Return the edges that a member reads."""
        return [edge for edge in self.edges if member in edge.readers]

    def source_label(self, value: int) -> str:
        """Return the name of a value for people: `input[0]`, `Encoder.forward[1]`, `Head.loss (part 1 of 4)`."""
        # Selected values are named like the expression that selects them.
        planned = self.values[value]
        return ("input" if planned.source == INPUT else self.labels[planned.source]) + steps_label(planned.steps)


def steps_label(steps: tuple[Step, ...]) -> str:
    """Return the text of a selection: `[0]`, `.name`, ` (part 1 of 4)`."""
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
    """Return the values that an expression needs, in order, with repetitions."""
    if isinstance(expression, Ref):
        return [expression.value]
    if isinstance(expression, Select):
        return values_in(expression.base)
    if isinstance(expression, Build | Join):
        return [value for item in expression.items for value in values_in(item)]
    return []

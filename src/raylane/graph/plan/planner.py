"""Planner: makes a `Plan` from nodes. It decides which calls belong to a graph and which member gets which value. Pure.

Calls are found from the output backwards, and from the input forwards (calls that no output needs are *leaves*). The
member that computes a value applies selections, so that `x["a"]` or one part of a scatter is sent alone. Results that
only the same member uses are not sent at all.
"""

from __future__ import annotations

import dataclasses
import graphlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from raylane.errors import GraphPlanError
from raylane.graph import nodes as n
from raylane.graph.collectives import Collective, CollectiveNode
from raylane.graph.plan import schedule
from raylane.graph.plan.ir import (
    DRIVER,
    INPUT,
    MUTABLE_CONTAINERS,
    Build,
    Const,
    Edge,
    Expression,
    Join,
    Plan,
    Ref,
    Select,
    Step,
    Task,
    Value,
    values_in,
)

DONE: tuple[Step, ...] = (("done",),)
"""Selection of the mere fact that a value was computed."""


def plan(
    output: n.Node,
    *,
    identify: Callable[[Any], Hashable],
    name: Callable[[Any], str],
    order: Mapping[Any, Sequence[n.Node]] | None = None,
    overlap: bool = False,
) -> tuple[Plan, list[Any]]:
    """Return the plan of the graph that computes `output`, and the actors of its members 1, 2, ...

    `identify` maps an actor handle to a key that is equal for handles of one actor, `name` to the actor's name. `order`
    lists, for each actor in it, all its calls in the order in which they shall run (default: the order of binding).
    With `overlap` an actor takes the result of a collective after all calls that need not wait for it.
    GraphPlanError if the nodes make no graph: no calls, two inputs, an argument that is not a node.
    """
    calls, whole = _find(output)
    if overlap:
        # The smallest index goes first among the calls that may run: see `schedule.order_of`.
        calls.sort(key=lambda call: isinstance(call, CollectiveNode) and call.collective.role == "combine")
    planner = _Planner(calls, whole, identify, name)
    return planner.build(output, order or {}), planner.actors


def _find(output: n.Node) -> tuple[list[n.CallNode], bool]:
    """Return all calls of the graph, in the order in which they were bound, and True if its input is used whole.

    Used whole means: by a call, the output or a node other than an item of the input.
    """
    if not isinstance(output, n.Node):
        raise GraphPlanError(f"compile({output!r}): the argument must be a node, such as the result of raylane.bind")
    seen: dict[int, n.Node] = {}
    inputs: dict[int, n.InputNode] = {}
    waiting: list[n.Node] = [output]
    whole = isinstance(output, n.InputNode)
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen[id(node)] = node
        parts = _nodes_of(node)
        whole |= not isinstance(node, n.ItemNode) and any(isinstance(part, n.InputNode) for part in parts)
        if isinstance(node, n.MultiOutputNode) and node is not output:
            raise GraphPlanError("a MultiOutputNode can only be the outermost node; pass a list of nodes instead")
        source = node if isinstance(node, n.InputNode) else node.input if isinstance(node, n.CallNode) else None
        if source is not None and id(source) not in inputs:
            inputs[id(source)] = source
            # The input knows every call bound to it, so calls that no output needs (leaves) are found too.
            waiting.extend(source._calls)
        waiting.extend(parts)
        if isinstance(node, CollectiveNode):  # its calls in all actors belong to the graph, used or not
            waiting.extend(node.calls)
    try:
        graphlib.TopologicalSorter({key: map(id, _nodes_of(node)) for key, node in seen.items()}).prepare()
    except graphlib.CycleError as error:
        cycle = [seen[key] for key in error.args[1]]
        shown = [repr(node) if isinstance(node, n.CallNode) else type(node).__name__ for node in cycle]
        raise GraphPlanError(f"these nodes are made from each other: {' -> '.join(shown)}. Remove the cycle") from None
    if len(inputs) > 1:
        raise GraphPlanError(
            f"the graph has {len(inputs)} InputNodes; use one, and x[0], x[1], x.name for several inputs"
        )
    # The order of binding is the default order of each actor, as in a program that makes the calls itself.
    calls = sorted((node for node in seen.values() if isinstance(node, n.CallNode)), key=lambda call: call.number)
    if not calls:
        raise GraphPlanError(f"compile({output!r}): the graph calls no actor; bind at least one method")
    return calls, whole


class _Planner:
    """Numbers values and members in the order in which it finds them."""

    def __init__(
        self,
        calls: list[n.CallNode],
        whole_input: bool,
        identify: Callable[[Any], Hashable],
        name: Callable[[Any], str],
    ) -> None:
        self.calls = calls
        self.task_of = {id(call): index for index, call in enumerate(calls)}
        self.whole_input = whole_input
        self.building: set[int] = set()
        """Ids of the containers whose items are being converted, to find a container inside itself."""
        self.values: dict[tuple[int, tuple[Step, ...]], Value] = {}
        self.numbered: list[Value] = []
        self.transports: dict[int, str] = {}
        """Transport of each value for which the user has chosen one."""
        self.actors: list[Any] = []
        self.keys: dict[Hashable, int] = {}
        self.identify = identify
        self.members = ["driver"]
        for call in calls:
            key = identify(call.actor)
            if key not in self.keys:
                self.keys[key] = len(self.members)
                self.actors.append(call.actor)
                self.members.append(name(call.actor))
        self.members = _distinct(self.members)

    def build(self, output: n.Node, order: Mapping[Any, Sequence[n.Node]]) -> Plan:
        member_of = [self.keys[self.identify(call.actor)] for call in self.calls]
        # Arguments and output first: every value that is sent gets its number while they are converted.
        drafts = [self._draft(call) for call in self.calls]
        if isinstance(output, n.MultiOutputNode):
            result: Expression = Build("list", tuple(self._expression(node) for node in output.nodes))
        else:
            result = self._expression(output)
        used = {self.numbered[value].source for draft in drafts for value in draft[2]}
        used |= {self.numbered[value].source for value in values_in(result)}
        needed: set[int] = set()  # tasks that the output depends on
        waiting = [self.numbered[value].source for value in values_in(result)]
        while waiting:
            task = waiting.pop()
            if task != INPUT and task not in needed:
                needed.add(task)
                waiting.extend(self.numbered[value].source for value in drafts[task][2])
        # The driver must learn that a leaf has ended, or its slots would be written again too early: it collects a
        # value without content, which also carries the error of a leaf that failed.
        leaves = tuple((self._value(task, DONE), task) for task in range(len(self.calls)) if task not in used)
        tasks = tuple(
            Task(index, member_of[index], call.method, args, kwargs, reads, index not in needed, self._collective(call))
            for index, (call, (args, kwargs, reads)) in enumerate(zip(self.calls, drafts, strict=True))
        )
        collects = tuple(dict.fromkeys([*values_in(result), *(value for value, _ in leaves)]))
        values = tuple(self.numbered)
        needs = [{source for v in task.reads if (source := values[v].source) != INPUT} for task in tasks]
        return Plan(
            members=tuple(self.members),
            tasks=tasks,
            values=values,
            edges=_edges(values, tasks, collects, self.transports),
            order=schedule.order_of(member_of, needs, self._wanted(order, member_of)),
            output=result,
            collects=collects,
            leaves=leaves,
            multiple=isinstance(output, n.MultiOutputNode),
            labels=tuple(
                _distinct([f"{self.members[m]}.{c.method}" for m, c in zip(member_of, self.calls, strict=True)])
            ),
        )

    def _collective(self, call: n.CallNode) -> Collective | None:
        """Return the collective of a call, with its members; None if it calls a method."""
        if not isinstance(call, CollectiveNode):
            return None
        combines = sorted((c for c in call.calls if c.collective.role == "combine"), key=lambda c: c.collective.rank)
        members = tuple(self.keys[self.identify(combine.actor)] for combine in combines)
        return dataclasses.replace(call.collective, members=members)

    def _draft(self, call: n.CallNode) -> tuple[Any, Any, tuple[int, ...]]:
        args = tuple(self._argument(arg) for arg in call.args)
        kwargs = tuple((key, self._argument(arg)) for key, arg in call.kwargs.items())
        reads = tuple(dict.fromkeys(v for e in [*args, *(e for _, e in kwargs)] for v in values_in(e)))
        # A call without values would run at any time: the mere arrival of the input starts it once per execution.
        return args, kwargs, reads or (self._value(INPUT, DONE),)

    def _wanted(self, order: Mapping[Any, Sequence[n.Node]], member_of: Sequence[int]) -> dict[int, list[int]]:
        orders = {}
        for actor, methods in order.items():
            member = self.keys.get(self.identify(actor))
            if member is None:
                raise GraphPlanError(f"order names {actor!r}, which has no call in this graph. Remove it from order")
            tasks: list[int] = []
            for listed in methods:
                node = listed
                while isinstance(node, n.ItemNode):  # the result of bind for a method with several returns
                    node = node.base
                if id(node) not in self.task_of:
                    raise GraphPlanError(
                        f"order lists {node!r}, which is no call of this graph. List results of raylane.bind"
                    )
                # A collective stands for the two calls of its actor.
                calls = (
                    [call for call in node.calls if call.actor is node.actor]
                    if isinstance(node, CollectiveNode)
                    else [node]
                )
                tasks += [self.task_of[id(call)] for call in calls]
            mine = [task for task, owner in enumerate(member_of) if owner == member]
            if sorted(tasks) != mine:
                raise GraphPlanError(
                    f"order for {self.members[member]} must list each of its {len(mine)} calls once; "
                    f"it lists {methods!r}"
                )
            orders[member] = tasks
        return orders

    # Expressions

    def _argument(self, value: Any) -> Expression:
        """Convert an argument: a node, a constant, or a container of both."""
        if isinstance(value, n.Node):
            return self._expression(value)
        if not n.nodes_in(value):
            return Const(value, mutable=_is_mutable(value))
        if type(value) not in (list, tuple, dict):
            raise GraphPlanError(
                f"an argument of type {type(value).__name__} holds nodes: only lists, tuples and dicts may. Pass the "
                "nodes as arguments of their own"
            )
        if id(value) in self.building:
            raise GraphPlanError(
                f"an argument is a {type(value).__name__} that holds nodes and itself: remove the cycle"
            )
        # Removed again below, so that one container may be used in several arguments.
        self.building.add(id(value))
        items = tuple(self._argument(item) for item in (value.values() if type(value) is dict else value))
        self.building.remove(id(value))
        return Build(type(value).__name__, items, tuple(value) if type(value) is dict else ())

    def _expression(self, node: Any) -> Expression:
        steps: list[Step] = []
        transport = getattr(node, "_transport", None)  # an output may be a constant
        while isinstance(node, n.ItemNode | n.PartNode):
            steps.insert(0, self._step(node))
            node = node.base
            transport = transport or node._transport
        if isinstance(node, n.CallNode | n.InputNode):
            # The producer applies the steps, so that only the selected part is sent.
            source = INPUT if isinstance(node, n.InputNode) else self.task_of[id(node)]
            value = self._value(source, tuple(steps))
            if transport is not None and self.transports.setdefault(value, transport) != transport:
                raise GraphPlanError(
                    f"{node!r} has two transports, {self.transports[value]!r} and {transport!r}: a value is sent once"
                )
            return Ref(value)
        if isinstance(node, n.MultiOutputNode):
            raise GraphPlanError("a MultiOutputNode can only be the outermost node; pass a list of nodes instead")
        expression = self._joined(node) if isinstance(node, n.JoinNode) else self._argument(node)
        return Select(expression, tuple(steps)) if steps else expression

    def _step(self, node: n.ItemNode | n.PartNode) -> Step:
        if isinstance(node, n.PartNode):
            return ("part", node.index, node.count, node.axis)
        if node.how == "return" and isinstance(node.base, n.CallNode):
            return ("return", node.key, node.base.num_returns)
        if self.whole_input or not isinstance(node.base, n.InputNode):
            return (node.how, node.key)
        if isinstance(node.key, int) and node.key < 0:
            raise GraphPlanError(f"{node!r}: the arguments of execute are counted from 0")
        return ("argument", node.how, node.key)

    def _joined(self, node: n.JoinNode) -> Expression:
        if node.how != "first":
            return Join(node.how, tuple(self._expression(item) for item in node.nodes), node.axis)
        # The other values are not sent, only the fact that they were computed.
        others = dict.fromkeys(source for item in node.nodes[1:] for source in self._sources(item))
        return Join("first", (self._expression(node.nodes[0]), *(Ref(self._value(s, DONE)) for s in others)), None)

    def _sources(self, node: n.Node) -> list[int]:
        """Return the tasks (or INPUT) that a node is made from."""
        if isinstance(node, n.CallNode):
            return [self.task_of[id(node)]]
        return (
            [INPUT]
            if isinstance(node, n.InputNode)
            else [s for source_node in _nodes_of(node) for s in self._sources(source_node)]
        )

    def _value(self, source: int, steps: tuple[Step, ...]) -> int:
        key = (source, steps)
        if key not in self.values:
            self.values[key] = Value(len(self.numbered), source, steps)
            self.numbered.append(self.values[key])
        return self.values[key].index


def _is_mutable(value: Any) -> bool:
    """Return True if a constant is, or holds in tuples, a container that a method could change."""
    waiting, seen = [value], set[int]()
    while waiting:
        current = waiting.pop()
        if type(current) in MUTABLE_CONTAINERS:
            return True
        if type(current) is tuple and id(current) not in seen:
            seen.add(id(current))
            waiting.extend(current)
    return False


def _nodes_of(node: n.Node) -> list[n.Node]:
    """Return the nodes that a node is made from."""
    return [inner for part in n.parts_of(node) for inner in n.nodes_in(part)]


def _edges(
    values: Sequence[Value], tasks: Sequence[Task], collects: Iterable[int], transports: Mapping[int, str]
) -> tuple[Edge, ...]:
    # One edge for each value, whatever the number of readers: the value is serialised and written once.
    readers: dict[int, set[int]] = {value.index: set() for value in values}
    for task in tasks:
        for value in task.reads:
            readers[value].add(task.member)
    for value in collects:
        readers[value].add(DRIVER)
    edges: list[Edge] = []
    for planned_value in values:
        writer = DRIVER if planned_value.source == INPUT else tasks[planned_value.source].member
        # The writer itself keeps the value as an object: nothing is sent to it.
        others = tuple(sorted(readers[planned_value.index] - {writer}))
        if others:
            edges.append(
                Edge(len(edges), planned_value.index, writer, others, transports.get(planned_value.index, "auto"))
            )
    return tuple(edges)


def _distinct(names: Sequence[str]) -> list[str]:
    """Return the names with those that occur several times numbered: `name#1`, `name#2`, ..."""
    counts = Counter(names)
    met: dict[str, int] = {}
    distinct = []
    for name in names:
        met[name] = met.get(name, 0) + 1
        distinct.append(f"{name}#{met[name]}" if counts[name] > 1 else name)
    return distinct

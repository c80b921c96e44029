"""Authoring of collectives: `raylane.graph.allreduce.bind(nodes)` and its siblings. Creating a node sends nothing.

A collective over n actors is two calls of raylane's own in each of them, which the planner treats like any others:

    share     what this actor gives, for all other members; runs as soon as its inputs are here
    combine   the result, from the shares of all members

So a collective obeys the rules of calls: order, the proof against deadlock, failures, hosts, the end of an actor.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from raylane import _ray
from raylane.errors import GraphPlanError
from raylane.graph import nodes

OPERATIONS = ("sum", "prod", "min", "max", "avg")
_ALIASES = {"product": "prod", "mean": "avg"}
"""Other names of operations: those of Ray and of NumPy."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """One call of a collective, in the actor at place `rank` of its `size` actors."""

    kind: str
    op: str
    """Reduction; empty for allgather."""
    role: str
    """"share" or "combine"."""
    rank: int
    size: int
    members: tuple[int, ...] = ()
    """Members of the graph, by rank; known to the planner."""

    @property
    def name(self) -> str:
        """Name for people: `allreduce.sum`."""
        return f"{self.kind}.{self.op}" if self.op else self.kind


class CollectiveNode(nodes.CallNode):
    """One call of a collective. `calls` are all calls of the collective: none can run without the others."""

    def __init__(self, actor: Any, collective: Collective, args: tuple[Any, ...], calls: list[CollectiveNode]) -> None:
        self.collective = collective
        self.calls = calls
        calls.append(self)
        name = collective.name if collective.role == "combine" else f"{collective.name}.share"
        super().__init__(actor, name, args, {})


class AllReduce:
    """The collective whose result is, in each actor, the sum (or another reduction) over all actors."""

    def bind(self, inputs: Sequence[Any], op: Any = "sum", transport: Any = None) -> list[Any]:
        """Reduce one node of each actor; return one node for each actor, in the same order.

        Several lists are reduced in one transfer: `bind([[a1, a2], [b1, b2]])`, where a1 and b1 are of one actor.
        Returned is then one list for each actor: `[[a1, b1], [a2, b2]]`.

        The values are tensors, NumPy arrays, or lists, tuples and dicts of those, with equal shapes and dtypes in all
        actors. They are not changed; each actor gets new memory. Values are added in the order of the actors, so that
        all get the same bits.

        Args:
            inputs: Results of calls of different actors.
            op: "sum", "prod", "min", "max" or "avg" (or a member of Ray's ReduceOp).
            transport: Way of the values between the actors: "auto", "shm" or "tcp", as of
                `Node.with_tensor_transport`.

        Raises:
            ValueError: The inputs are not one node of each actor, or `op` or `transport` is unknown.
            GraphPlanError: `transport` is one of direct transport, such as "nccl".
        """
        return _bind("allreduce", inputs, op, transport)


class AllGather:
    """The collective whose result is, in each actor, the tensors of all actors, joined along axis 0."""

    def bind(self, inputs: Sequence[Any], transport: Any = None) -> list[Any]:
        """Join one node of each actor along axis 0; return one node for each actor. See `allreduce.bind`."""
        return _bind("allgather", inputs, None, transport)


class ReduceScatter:
    """The collective whose result is, in actor i, part i (along axis 0) of the sum over all actors."""

    def bind(self, inputs: Sequence[Any], op: Any = "sum", transport: Any = None) -> list[Any]:
        """Reduce one node of each actor; return one node for each actor, with its part. See `allreduce.bind`.

        The length along axis 0 must be divisible by the number of actors.
        """
        return _bind("reducescatter", inputs, op, transport)


allreduce = AllReduce()
allgather = AllGather()
reducescatter = ReduceScatter()


def _bind(kind: str, inputs: Sequence[Any], op: Any, transport: Any) -> list[Any]:
    if not isinstance(inputs, list | tuple) or not inputs:
        raise ValueError(f"{kind}: the inputs must be a list with a node of each actor, got {inputs!r}")
    nested = isinstance(inputs[0], list | tuple)
    lists = [list(items) for items in inputs] if nested else [list(inputs)]
    # As in Ray: the parts of several lists would be ambiguous.
    if nested and kind != "allreduce":
        raise ValueError(f"{kind}: only allreduce takes several lists; bind one {kind} for each list")
    actors = [_actor_of(kind, node) for node in lists[0]]
    # Handles of one actor may be different objects.
    actor_keys = [_key(actor) for actor in actors]
    for place, listed in enumerate(lists):
        keys = [_key(_actor_of(kind, node)) for node in listed]
        counts = Counter(keys)
        twice = next((node for node, key in zip(listed, keys, strict=True) if counts[key] > 1), None)
        if twice is not None:
            raise ValueError(
                f"{kind}: each actor may give one input, but the actor of {twice!r} gives several: {listed!r}"
            )
        if keys != actor_keys:
            raise ValueError(
                f"{kind}: every list must name the same actors in the same order; list {place} is {listed!r}, of "
                f"{len(listed)} actors, list 0 has {len(actors)}"
            )
    per_actor = [tuple(inputs_of_list[rank] for inputs_of_list in lists) for rank in range(len(actors))]
    combined = bind_collective(kind, "" if op is None else operation(kind, op), actors, per_actor, transport)
    if not nested:
        return list(combined)
    return [[nodes.ItemNode(node, "return", index) for index in range(len(lists))] for node in combined]


def bind_collective(
    kind: str, op: str, actors: Sequence[Any], per_actor: Sequence[tuple[Any, ...]], transport: Any = None
) -> list[CollectiveNode]:
    """Return the node of each actor's result. `per_actor` are the inputs of each actor, which were checked."""
    calls: list[CollectiveNode] = []
    size, name = len(actors), "auto" if transport is None else str(transport).lower()
    name = name if name in ("gloo", "nccl") else nodes.edge_transport(name)
    if name not in nodes.EDGE_TRANSPORTS:
        raise GraphPlanError(
            f"{kind}: transport {name!r} is for values of calls; collectives take {', '.join(nodes.EDGE_TRANSPORTS)}. "
            "For a collective by NCCL or gloo call torch.distributed in a method"
        )
    shares = [
        CollectiveNode(actor, Collective(kind, op, "share", rank, size), inputs_of_actor, calls)
        for rank, (actor, inputs_of_actor) in enumerate(zip(actors, per_actor, strict=True))
    ]
    for share in shares:
        share.with_tensor_transport(name)
    # All shares come before the first result, so that in the order of binding every actor gives before any waits.
    combined = []
    for rank, actor in enumerate(actors):
        # Of a reducescatter each member gets its own part alone.
        parts = [nodes.ItemNode(share, "return", rank) for share in shares] if kind == "reducescatter" else shares
        for share in shares:
            share.num_returns = size if kind == "reducescatter" else 1
        node = CollectiveNode(actor, Collective(kind, op, "combine", rank, size), (list(parts),), calls)
        node.num_returns = len(per_actor[rank])
        combined.append(node)
    return combined


def operation(kind: str, op: Any) -> str:
    """Return the name of a reduction, given by name or as a member of an enumeration."""
    # Enumerations of Ray and of torch have names; their numbers differ.
    name = getattr(op, "name", op)
    canonical = _ALIASES.get(str(name).lower(), str(name).lower())
    if canonical not in OPERATIONS:
        raise ValueError(f"{kind}: unknown op {op!r}; the operations are {', '.join(OPERATIONS)}")
    return canonical


def _actor_of(kind: str, node: Any) -> Any:
    """Return the actor that computes a node."""
    while isinstance(node, nodes.ItemNode | nodes.PartNode):
        node = node.base
    if not isinstance(node, nodes.CallNode):
        raise ValueError(f"{kind}: each input must be the result of an actor's method, got {node!r}")
    return node.actor


def _key(actor: Any) -> Any:
    return _ray.actor_id_of(actor) if _ray.is_handle(actor) else id(actor)

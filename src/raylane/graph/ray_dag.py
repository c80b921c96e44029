"""Conversion of graphs written with ray.dag (`actor.method.bind`, `InputNode`, `MultiOutputNode`) into raylane's nodes.

A program written for `experimental_compile` changes one line.
"""

from __future__ import annotations

import graphlib
import itertools
from collections.abc import Iterable
from typing import Any

from raylane import _ray
from raylane.errors import GraphPlanError
from raylane.graph import collectives, nodes


def convert(node: Any) -> Any:
    """Return the same graph in raylane's nodes; anything that is no node of Ray is returned as it is.

    Each actor's calls run in the order in which they were bound. GraphPlanError for nodes of Ray that have no
    counterpart (functions, for example).
    """
    conversion = _Conversion()
    output = conversion.convert(node)
    conversion.convert_leaves()
    # After all calls are known: numbers must be consistent over all of them.
    conversion.number_calls()
    return output


class _Conversion:
    def __init__(self) -> None:
        self._converted: dict[int, nodes.Node] = {}
        """Nodes of raylane by id of the node of Ray."""
        self._originals: list[Any] = []
        """Converted nodes of Ray: kept, so that their ids stay valid."""
        self._calls: list[tuple[int, float, nodes.CallNode]] = []
        """(id of the actor handle, number of calls bound on the handle before, call)."""

    def number_calls(self) -> None:
        """Assign numbers to the calls in an order in which they may have been bound.

        Ray counts calls for each handle only: so a call comes after the calls whose results it uses, and after the
        calls bound before on the same handle.
        """
        needs = {id(call): {id(inner) for inner in _calls_in(nodes.parts_of(call))} for _, _, call in self._calls}
        for earlier, later in itertools.pairwise(sorted(self._calls, key=lambda record: record[:2])):
            if earlier[0] == later[0]:
                needs[id(later[2])].add(id(earlier[2]))
        calls = {id(call): call for _, _, call in self._calls}
        numbers = sorted(call.number for call in calls.values())
        for number, key in zip(numbers, graphlib.TopologicalSorter(needs).static_order(), strict=True):
            calls[key].number = number

    def convert_leaves(self) -> None:
        """Convert the calls that use nodes of the graph but that no output needs: they belong to the graph too."""
        seen_ids: set[int] = set()
        waiting = list(self._originals)
        while waiting:
            node = waiting.pop()
            if id(node) in seen_ids:
                continue
            seen_ids.add(id(node))
            for user in _ray.dag_users(node):
                parts = _ray.dag_node(user)
                if parts is not None and parts[0] in ("call", "collective"):
                    self.convert(user)
                    waiting.append(user)
                elif parts is not None and parts[0] in ("attribute", "output"):
                    waiting.append(user)

    def convert(self, value: Any) -> Any:
        """Convert a node of Ray, or the nodes in a list, tuple or dict."""
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return type(value)(self.convert(item) for item in value)
        if type(value) is dict:
            return {key: self.convert(item) for key, item in value.items()}
        parts = _ray.dag_node(value)
        if parts is None:
            return value
        if id(value) not in self._converted:
            self._originals.append(value)
            self._converted[id(value)] = self._new_node(value, parts)
            transport, device = _ray.dag_transport(value)
            if device != "default":
                raise GraphPlanError(
                    f"with_tensor_transport(device={device!r}): raylane has no such option, a tensor arrives on the "
                    "kind of device on which it was sent. Call tensor.to(...) in the method that receives it"
                )
            # Ray's "shm" and "cpu" mean host memory, also between hosts: this is "auto" here.
            if transport == "accelerator":
                self._converted[id(value)].with_tensor_transport(transport)
        return self._converted[id(value)]

    def _new_node(self, value: Any, node_parts: tuple[Any, ...]) -> nodes.Node:
        kind, *parts = node_parts
        if kind == "input":
            return nodes.InputNode()
        if kind == "attribute":
            base, how, key = parts
            return nodes.ItemNode(self.convert(base), how, key)
        if kind == "call":
            actor, method, args, kwargs, num_returns, place = parts
            arguments = self.convert(tuple(args)), self.convert(dict(kwargs))
            call = nodes.CallNode(actor, method, *arguments, num_returns=num_returns)
            self._calls.append((id(actor), place, call))
            return call
        if kind == "collective":
            return self._new_collective(value, *parts)
        if kind == "output":
            call, index = parts
            return nodes.ItemNode(self.convert(call), "return", index)
        if kind == "multiple":
            return nodes.MultiOutputNode([self.convert(item) for item in parts[0]])
        raise GraphPlanError(
            f"cannot convert {type(value).__name__} of ray.dag: a compiled graph of raylane has no such node. Use "
            "InputNode, actor.method.bind and MultiOutputNode"
        )

    def _new_collective(self, value: Any, operation: Any, inputs: list[Any], place: int) -> nodes.Node:
        """Convert the nodes of all actors in a collective; return that of `value`."""
        kind, op, actors = _ray.dag_collective(operation)
        by_actor = {}
        for node in _ray.dag_collective_calls(value):
            parts = _ray.dag_node(node)
            assert parts is not None
            by_actor[_ray.actor_id_of(_ray.dag_actor(node))] = node, parts
        results = [by_actor[_ray.actor_id_of(actor)] for actor in actors]
        inputs_of = [tuple(self.convert(parts[2])) for _, parts in results]
        name = "" if op is None else collectives.operation(kind, op)
        combined = collectives.bind_collective(kind, name, actors, inputs_of)
        for (node, parts), call in zip(results, combined, strict=True):
            self._originals.append(node)
            self._converted[id(node)] = call
            handle = id(_ray.dag_actor(node))
            # What the actor gives is sent just before its place: Ray has one call there, the graph two.
            share = next(
                member for member in call.calls if member.collective.role == "share" and member.actor is call.actor
            )
            self._calls += [(handle, parts[3] - 0.5, share), (handle, parts[3], call)]
        return self._converted[id(value)]


def _calls_in(values: Iterable[Any]) -> list[nodes.CallNode]:
    """Return the calls whose results these values are made from."""
    inner = [node for value in values for node in nodes.nodes_in(value)]
    deeper = [
        call for node in inner if not isinstance(node, nodes.CallNode) for call in _calls_in(nodes.parts_of(node))
    ]
    return [node for node in inner if isinstance(node, nodes.CallNode)] + deeper

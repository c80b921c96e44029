"""Ray's own graph nodes (`actor.method.bind`, `ray.dag.InputNode`, `MultiOutputNode`) as ours, so that a program
written for `experimental_compile` changes one line."""

from __future__ import annotations

import graphlib
import itertools
from collections.abc import Iterable
from typing import Any

from raylane import _ray
from raylane.errors import GraphPlanError
from raylane.graph import nodes


def from_ray(node: Any) -> Any:
    """The same graph in our nodes; anything that is not Ray's comes back as it is. GraphPlanError for nodes of Ray's
    that have no counterpart (functions, collectives). Each actor's calls run in the order in which they were bound."""
    translation = _Translation()
    found = translation.convert(node)
    translation.convert_leaves()
    translation.number()
    return found


class _Translation:
    def __init__(self) -> None:
        self._known: dict[int, nodes.Node] = {}
        self._kept: list[Any] = []
        self._calls: list[tuple[int, int, nodes.CallNode]] = []
        """(which handle, how many calls were bound on it before, call)"""

    def number(self) -> None:
        """Number the calls as they may have been bound: after what they use, and as their handle has counted them."""
        needs = {id(call): {id(made) for made in _calls_in(nodes.parts_of(call))} for _, _, call in self._calls}
        for earlier, later in itertools.pairwise(sorted(self._calls, key=lambda found: found[:2])):
            if earlier[0] == later[0]:
                needs[id(later[2])].add(id(earlier[2]))
        calls = {id(call): call for _, _, call in self._calls}
        numbers = sorted(call.number for call in calls.values())
        for number, key in zip(numbers, graphlib.TopologicalSorter(needs).static_order(), strict=True):
            calls[key].number = number

    def convert_leaves(self) -> None:
        """Calls that use what the output is made from, and that no output needs, are part of the graph too."""
        met: set[int] = set()
        waiting = list(self._kept)
        while waiting:
            node = waiting.pop()
            if id(node) in met:
                continue
            met.add(id(node))
            for user in _ray.dag_users(node):
                seen = _ray.dag_node(user)
                if seen is not None and seen[0] == "call":
                    self.convert(user)
                    waiting.append(user)
                elif seen is not None and seen[0] in ("attribute", "output"):
                    waiting.append(user)

    def convert(self, value: Any) -> Any:
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return type(value)(self.convert(item) for item in value)
        if type(value) is dict:
            return {key: self.convert(item) for key, item in value.items()}
        seen = _ray.dag_node(value)
        if seen is None:
            return value
        if id(value) not in self._known:
            self._kept.append(value)
            self._known[id(value)] = self._make(value, seen)
        return self._known[id(value)]

    def _make(self, value: Any, seen: tuple[Any, ...]) -> nodes.Node:
        kind, *parts = seen
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
        if kind == "output":
            call, index = parts
            return nodes.ItemNode(self.convert(call), "return", index)
        if kind == "multiple":
            return nodes.MultiOutputNode([self.convert(item) for item in parts[0]])
        raise GraphPlanError(
            f"{type(value).__name__} of ray.dag has no counterpart in a compiled graph of raylane; it takes InputNode, "
            "actor.method.bind and MultiOutputNode"
        )


def _calls_in(values: Iterable[Any]) -> list[nodes.CallNode]:
    """The calls whose results these values are made from."""
    found = [node for value in values for node in nodes.nodes_in(value)]
    deeper = [
        call for node in found if not isinstance(node, nodes.CallNode) for call in _calls_in(nodes.parts_of(node))
    ]
    return [node for node in found if isinstance(node, nodes.CallNode)] + deeper

"""Ray's own graph nodes (`actor.method.bind`, `ray.dag.InputNode`, `MultiOutputNode`) as ours, so that a program
written for `experimental_compile` changes one line."""

from __future__ import annotations

from typing import Any

from raylane import _ray
from raylane.errors import GraphPlanError
from raylane.graph import nodes


def from_ray(node: Any) -> Any:
    """The same graph in our nodes; anything that is not Ray's comes back as it is. GraphPlanError for nodes of Ray's
    that have no counterpart (functions, collectives)."""
    return _Translation().convert(node)


class _Translation:
    def __init__(self) -> None:
        self._known: dict[int, nodes.Node] = {}
        self._kept: list[Any] = []

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
            actor, method, args, kwargs, num_returns = parts
            return nodes.CallNode(
                actor, method, self.convert(tuple(args)), self.convert(dict(kwargs)), num_returns=num_returns
            )
        if kind == "output":
            call, index = parts
            return nodes.ItemNode(self.convert(call), "item", index)
        if kind == "multiple":
            return nodes.MultiOutputNode([self.convert(item) for item in parts[0]])
        raise GraphPlanError(
            f"{type(value).__name__} of ray.dag has no counterpart in a compiled graph of raylane; it takes InputNode, "
            "actor.method.bind and MultiOutputNode"
        )

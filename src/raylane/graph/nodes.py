"""How a graph is written: nodes that stand for values of later executions. Nothing runs, nothing is sent.

    with raylane.InputNode() as x:
        hidden = raylane.bind(encoder.forward, x)
        loss = raylane.bind(head.loss, hidden, reduction="mean")

Nodes are plain values that refer to the nodes they are made from; `plan` turns them into tasks and edges. Ray's own
nodes (`actor.method.bind`, `ray.dag.InputNode`, `MultiOutputNode`) are translated into these by `translate`.
"""

from __future__ import annotations

import contextvars
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from raylane import _ray

_numbers = itertools.count()
_open_input: contextvars.ContextVar[InputNode | None] = contextvars.ContextVar("raylane_input", default=None)


class Node:
    """A value that each execution computes. Indexing gives an item of it: `node[0]`, `node["loss"]`."""

    def __getitem__(self, key: Any) -> Node:
        if not isinstance(key, int | str):
            raise TypeError(f"{self!r}[{key!r}]: a node is indexed with an int or a str")
        return ItemNode(self, "item", key)

    def __iter__(self) -> Any:
        raise TypeError(
            f"{self!r} cannot be unpacked: how many items it will have is not known now. Use node[0], node[1], ..., "
            "or declare @ray.method(num_returns=n) on the method"
        )

    def __bool__(self) -> bool:
        raise TypeError(f"{self!r} has no value yet: a graph has no branches; put the decision into a method")

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} has no value yet, so it cannot be pickled: in arguments of bind, nodes may stand by themselves "
            "or in lists, tuples and values of dicts, not inside other objects; and they are no arguments of .remote"
        )


class InputNode(Node):
    """What `execute` is called with.

    Used whole it is the one positional argument; `x[0]`, `x[1]` are the positional arguments and `x.name` or
    `x["name"]` the keyword arguments of `execute`, each sent only to those that use it. When the whole input is used
    too, or when `execute` gets one positional argument although the graph names more, these are items or attributes of
    that one argument.

    As a context manager it also collects the calls bound in its block that use no node at all.
    """

    def __init__(self) -> None:
        self._calls: list[CallNode] = []
        self._tokens: list[contextvars.Token[InputNode | None]] = []

    def __getattr__(self, name: str) -> Node:
        if name.startswith("_"):
            raise AttributeError(f"an InputNode has no {name!r}; inputs whose names begin with _ are x[{name!r}]")
        return ItemNode(self, "attr", name)

    def __enter__(self) -> InputNode:
        self._tokens.append(_open_input.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        _open_input.reset(self._tokens.pop())

    def __repr__(self) -> str:
        return "input"


class CallNode(Node):
    """One call of an actor's method in every execution. Made by `bind`."""

    def __init__(
        self, actor: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, num_returns: int = 1
    ) -> None:
        self.actor = actor
        self.method = method
        self.args = args
        self.kwargs = kwargs
        self.num_returns = num_returns
        self.number = next(_numbers)
        found = _input_of([*args, *kwargs.values()])
        self.input = _open_input.get() if found is None else found
        if self.input is not None:
            self.input._calls.append(self)

    def __repr__(self) -> str:
        return f"{_ray.class_name_of(self.actor)}.{self.method}(...)"


class ItemNode(Node):
    """An item (`how="item"`) or attribute (`how="attr"`; on an input also an argument's name) of another node, or one
    of the declared returns of a call (`how="return"`)."""

    def __init__(self, base: Node, how: str, key: int | str) -> None:
        self.base = base
        self.how = how
        self.key = key

    def __repr__(self) -> str:
        return f"{self.base!r}.{self.key}" if self.how == "attr" else f"{self.base!r}[{self.key!r}]"


class PartNode(Node):
    """Part `index` of `count` of another node, along an axis. Made by `scatter`."""

    def __init__(self, base: Node, index: int, count: int, axis: int) -> None:
        self.base = base
        self.index = index
        self.count = count
        self.axis = axis

    def __repr__(self) -> str:
        return f"{self.base!r}.part({self.index} of {self.count})"


class JoinNode(Node):
    """Several nodes made one where it is used. Made by `gather`, `first` and `mean`."""

    def __init__(self, how: str, nodes: Sequence[Node], axis: int | None = None) -> None:
        self.how = how
        self.nodes = list(nodes)
        self.axis = axis

    def __repr__(self) -> str:
        return f"{self.how}({len(self.nodes)} nodes)"


class MultiOutputNode(Node):
    """Several results: `get` returns them as a list in this order. Only as the outermost node."""

    def __init__(self, nodes: Iterable[Any]) -> None:
        self.nodes = list(nodes)
        if not self.nodes:
            raise ValueError("MultiOutputNode([]): a graph needs at least one output")

    def __repr__(self) -> str:
        return f"outputs({len(self.nodes)})"


def bind(method: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A call of `actor.method` in every execution of a graph, with these arguments.

    `method` is a method of an actor handle (or, for `backend="inline"`, of any object). Arguments are nodes, constants,
    and lists, tuples and dicts that hold them at any depth. Constants are sent once, when the graph is compiled.
    Returns a node, or a tuple of nodes if the method declares `num_returns` above 1. A call that no output needs is
    executed too, as long as it is bound to the same input; its errors are logged and kept in `result.leaf_errors`.

    TypeError if `method` is something else or a generator, or if the arguments do not fit its signature.
    """
    target = _ray.bound_method(method)
    if target is None:
        raise TypeError(
            f"bind({method!r}): the first argument is a method of an actor handle, such as bind(actor.step, x); "
            "call bind(actor.step, x), not bind(actor.step(x)) or bind(actor.step.remote, x)"
        )
    actor, name, num_returns, signature = target
    if signature is not None:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            shown = f"{_ray.class_name_of(actor)}.{name}{signature}"
            raise TypeError(f"bind: {error}. The method is {shown}; got {args!r} and {kwargs!r}") from None
    foreign = next((value for value in [*args, *kwargs.values()] if _ray.dag_node(value) is not None), None)
    if foreign is not None:
        raise TypeError(
            f"bind: {type(foreign).__name__} is a node of ray.dag; write the whole graph with raylane.bind and "
            "raylane.InputNode, or all of it with Ray's nodes"
        )
    if not isinstance(num_returns, int):
        raise TypeError(
            f"bind: {_ray.class_name_of(actor)}.{name} has num_returns={num_returns!r}: a call in a graph has one "
            "result, or a declared number of them; return a list instead of yielding"
        )
    node = CallNode(actor, name, args, kwargs, num_returns=num_returns)
    return node if num_returns <= 1 else tuple(ItemNode(node, "return", index) for index in range(num_returns))


def scatter(node: Node, count: int, axis: int = 0) -> list[Node]:
    """`count` nodes, each a part of `node` along `axis`, to be bound to one actor each. Cut where the value is made, so
    that each part travels alone.

    Lists, tuples and strings are cut along axis 0; arrays and tensors along any; a dict has each of its values cut; an
    object is asked that has `size` and `slice(start, stop)` (such as `raylane.BatchDict`) or `shard(index, count)`.
    Lengths may differ by one. The execution fails with ValueError if the length along `axis` is below `count`.
    """
    if not _is_node(node):
        raise TypeError(f"scatter({node!r}, {count}): the first argument is a node")
    if count < 1:
        raise ValueError(f"scatter(..., {count!r}): the number of parts is an int of 1 or more")
    return [PartNode(node, index, count, axis) for index in range(count)]


def gather(nodes: Sequence[Node], axis: int | None = None) -> Node:
    """The values of all nodes as one: a list (`axis=None`), or joined along `axis` the way `scatter` cuts: lists are
    added up, arrays and tensors concatenated, dicts joined key by key. Joined by each process that uses it."""
    return JoinNode("gather", _several("gather", nodes), axis)


def first(nodes: Sequence[Node]) -> Node:
    """The value of the first node. The others run, and their errors count, but their values are not transferred."""
    return JoinNode("first", _several("first", nodes))


def mean(nodes: Sequence[Node]) -> Node:
    """The mean of the values: numbers, arrays, tensors, and dicts, lists and tuples of those, item by item."""
    return JoinNode("mean", _several("mean", nodes))


def _is_node(value: Any) -> bool:
    return isinstance(value, Node)


def _several(how: str, nodes: Sequence[Node]) -> list[Node]:
    found = list(nodes)
    wrong = [node for node in found if not _is_node(node)]
    if wrong or not found:
        raise TypeError(f"{how} takes a list of one or more nodes, got {wrong[0] if wrong else nodes!r}")
    return found


def parts_of(node: Node) -> list[Any]:
    """What a node is made from: nodes, constants and containers."""
    if isinstance(node, CallNode):
        return [*node.args, *node.kwargs.values()]
    if isinstance(node, ItemNode | PartNode):
        return [node.base]
    if isinstance(node, JoinNode | MultiOutputNode):
        return list(node.nodes)
    return []


def nodes_in(value: Any) -> list[Node]:
    """The nodes in an argument: itself, or those in its lists, tuples and dict values, at any depth."""
    if isinstance(value, Node):
        return [value]
    found: list[Node] = []
    seen: set[int] = set()  # a list may contain itself
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Node):
            found.append(item)
        elif isinstance(item, list | tuple | dict) and id(item) not in seen:
            seen.add(id(item))
            waiting.extend(reversed(item.values() if isinstance(item, dict) else item))
    return found


def _input_of(values: Iterable[Any]) -> InputNode | None:
    """The input that these depend on, looked up through nodes that are no calls; a call knows its own."""
    for value in values:
        for node in nodes_in(value):
            if isinstance(node, InputNode):
                return node
            found = node.input if isinstance(node, CallNode) else _input_of(parts_of(node))
            if found is not None:
                return found
    return None

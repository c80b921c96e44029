"""Authoring of graphs: nodes that stand for values of later executions. Creating a node runs and sends nothing.

    with raylane.InputNode() as x:
        hidden = raylane.bind(encoder.forward, x)
        loss = raylane.bind(head.loss, hidden, reduction="mean")

Nodes are plain values that refer to the nodes they are made from; `plan.planner` turns them into tasks and edges. Ray's
own nodes (`actor.method.bind`, `ray.dag.InputNode`, `MultiOutputNode`) are converted into these by `ray_dag`.
"""

from __future__ import annotations

import contextvars
import itertools
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Self

from raylane import _ray
from raylane.errors import GraphPlanError, TransportUnavailableError

EDGE_TRANSPORTS = ("auto", "shm", "tcp")
"""Ways of a value to its readers: shared memory within a host and links between hosts; or one of the two alone."""
_numbers = itertools.count()
_open_input: contextvars.ContextVar[InputNode | None] = contextvars.ContextVar("raylane_input", default=None)


class Node:
    """Value that each execution computes. Indexing selects an item of the value: `node[0]`, `node["loss"]`."""

    _transport: str | None = None

    def with_tensor_transport(self, transport: str = "auto") -> Self:
        """Choose the way of this value, and of items of it, to the processes that use it; return the node itself.

        "auto": shared memory to processes of the same host, and a link to each other host. "shm": shared memory;
        `compile` raises an error if a reader is on another host. "tcp": a link to each reader, even on the same host.
        "gloo", "nixl" and the other names of direct transport: every reader fetches large tensors and arrays by this
        transport from the process that computes the value; the rest travels as with "auto". "accelerator", Ray's name:
        "nccl" if this process sees a GPU, else "auto".

        ValueError for an unknown transport, GraphPlanError for one that edges of a graph cannot use; `compile` raises
        it if a process lacks the transport.
        """
        self._transport = edge_transport(transport)
        return self

    def __getitem__(self, key: Any) -> Node:
        # Slices and tuples would need the length of a value that does not exist yet.
        if not isinstance(key, int | str):
            raise TypeError(f"{self!r}[{key!r}]: the index of a node must be an int or a str, got {type(key).__name__}")
        return ItemNode(self, "item", key)

    def __iter__(self) -> Any:
        raise TypeError(
            f"{self!r} cannot be unpacked: the number of its items is not known before an execution. Use node[0], "
            "node[1], ..., or declare @ray.method(num_returns=n) on the method"
        )

    def __bool__(self) -> bool:
        raise TypeError(f"{self!r} has no value before an execution: a graph has no branches. Decide in a method")

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} has no value before an execution, so it cannot be pickled. Pass nodes to bind as arguments, or "
            "in lists, tuples and values of dicts; not in other objects, and not to .remote"
        )


class InputNode(Node):
    """Arguments of `execute`.

    Used whole, an InputNode `x` is the one positional argument. `x[0]`, `x[1]` are the positional arguments and
    `x.name` or `x["name"]` the keyword arguments of `execute`; each is sent only to the actors that use it. If the
    whole input is used too, or if `execute` gets one positional argument although the graph names more, these are items
    or attributes of that one argument.

    As a context manager, an InputNode also collects calls bound in its block that use no node.
    """

    def __init__(self) -> None:
        self._calls: list[CallNode] = []
        self._tokens: list[contextvars.Token[InputNode | None]] = []

    def __getattr__(self, name: str) -> Node:
        if name.startswith("_"):
            raise AttributeError(f"an InputNode has no attribute {name!r}. For an input of this name write x[{name!r}]")
        return ItemNode(self, "attr", name)

    def __enter__(self) -> InputNode:
        # A stack of tokens: the same InputNode may be entered again inside of its own block.
        self._tokens.append(_open_input.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        _open_input.reset(self._tokens.pop())

    def __repr__(self) -> str:
        return "input"


class CallNode(Node):
    """One call of an actor's method in every execution. Created by `bind`."""

    def __init__(
        self, actor: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, num_returns: int = 1
    ) -> None:
        self.actor = actor
        self.method = method
        self.args = args
        self.kwargs = kwargs
        self.num_returns = num_returns
        # A global counter: calls of several actors keep the order in which they were bound.
        self.number = next(_numbers)
        # A call without nodes belongs to the `with` block in which it is bound.
        input_node = _input_of([*args, *kwargs.values()])
        self.input = _open_input.get() if input_node is None else input_node
        if self.input is not None:
            self.input._calls.append(self)

    def __repr__(self) -> str:
        return f"{_ray.class_name_of(self.actor)}.{self.method}(...)"


class ItemNode(Node):
    """Part of another node.

    `how` is "item"; "attr" for an attribute (on an input also for the name of an argument); or "return" for one of the
    declared returns of a call.
    """

    def __init__(self, base: Node, how: str, key: int | str) -> None:
        self.base = base
        self.how = how
        self.key = key

    def __repr__(self) -> str:
        return f"{self.base!r}.{self.key}" if self.how == "attr" else f"{self.base!r}[{self.key!r}]"


class PartNode(Node):
    """Part `index` of `count` of another node, along an axis. Created by `scatter`."""

    def __init__(self, base: Node, index: int, count: int, axis: int) -> None:
        self.base = base
        self.index = index
        self.count = count
        self.axis = axis

    def __repr__(self) -> str:
        return f"{self.base!r}.part({self.index} of {self.count})"


class JoinNode(Node):
    """Several nodes joined into one by the process that uses it. Created by `gather`, `first` and `mean`."""

    def __init__(self, how: str, nodes: Sequence[Node], axis: int | None = None) -> None:
        self.how = how
        self.nodes = list(nodes)
        self.axis = axis

    def __repr__(self) -> str:
        return f"{self.how}({len(self.nodes)} nodes)"


class MultiOutputNode(Node):
    """Several results: `get` returns them as a list in this order. Can only be the outermost node."""

    def __init__(self, nodes: Iterable[Any]) -> None:
        self.nodes = list(nodes)
        if not self.nodes:
            raise ValueError("MultiOutputNode([]): a graph needs at least one output")

    def __repr__(self) -> str:
        return f"outputs({len(self.nodes)})"


def bind(method: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call `actor.method` with these arguments in every execution of a graph.

    Returns a node, or a tuple of nodes if the method declares `num_returns` above 1. A call that no output needs is
    executed too, if it is bound to the same input; its errors are logged and kept in `result.leaf_errors`.

    Args:
        method: A method of an actor handle (or, for `backend="inline"`, of any object).
        *args: Nodes, constants, and lists, tuples and dicts that hold them at any depth. Constants are sent once, when
            the graph is compiled.
        **kwargs: Keyword arguments of the same kinds.

    Raises:
        TypeError: `method` is no method or is a generator, or the arguments do not fit its signature.
    """
    target = _ray.bound_method(method)
    if target is None:
        raise TypeError(
            f"bind({method!r}): the first argument must be a method of an actor handle. Write bind(actor.step, x), not "
            "bind(actor.step(x)) or bind(actor.step.remote, x)"
        )
    actor, name, num_returns, signature = target
    if signature is not None:
        try:
            # Checked here, at the line of the mistake, not in the actor at the first execution.
            signature.bind(*args, **kwargs)
        except TypeError as error:
            shown = f"{_ray.class_name_of(actor)}.{name}{signature}"
            raise TypeError(f"bind: {error}. The method is {shown}; got {args!r} and {kwargs!r}") from None
    foreign = next((value for value in [*args, *kwargs.values()] if _ray.dag_node(value) is not None), None)
    if foreign is not None:
        raise TypeError(
            f"bind: {type(foreign).__name__} is a node of ray.dag. Write the whole graph with raylane.bind and "
            "raylane.InputNode, or the whole graph with Ray's nodes"
        )
    if not isinstance(num_returns, int):
        raise TypeError(
            f"bind: {_ray.class_name_of(actor)}.{name} has num_returns={num_returns!r}: a call in a graph has one "
            "result, or a declared number of them; return a list instead of yielding"
        )
    node = CallNode(actor, name, args, kwargs, num_returns=num_returns)
    return node if num_returns <= 1 else tuple(ItemNode(node, "return", index) for index in range(num_returns))


def edge_transport(name: Any) -> str:
    """Return the name of a transport of edges. Errors as of `Node.with_tensor_transport`."""
    lower = str(name).lower()
    torch = sys.modules.get("torch")
    if lower == "accelerator" and (torch is None or not torch.cuda.is_available()):
        return "auto"
    if lower in EDGE_TRANSPORTS:
        return lower
    # Loads torch, which graphs without such a transport do not need.
    from raylane.transport.backends.registry import backends, check_name

    if lower == "accelerator":  # Ray's name for NCCL on the GPUs that torch knows
        return "nccl" if "nccl" in backends() else "auto"
    try:
        lower = check_name(lower)
    except TransportUnavailableError as error:
        raise GraphPlanError(f"transport {name!r} is not available for values of a graph: {error}") from error
    except ValueError:
        known = dict.fromkeys([*EDGE_TRANSPORTS, *filter(_fits_edges, backends())])
        raise ValueError(f"unknown transport {name!r} of a value; the transports are {', '.join(known)}") from None
    if not _fits_edges(lower):
        raise GraphPlanError(f"transport {name!r} is not available for values of a graph. Use 'auto'")
    return lower


def _fits_edges(transport: str) -> bool:
    """Return True if a direct transport can serve the readers of an edge, which are other processes."""
    from raylane.transport.backends.registry import backends

    capability = backends()[transport].capability
    return not (capability.own_objects or capability.by_ray)


def connects_hosts(transport: str) -> bool:
    """Return True if a transport of edges can bring values to other hosts."""
    if transport in EDGE_TRANSPORTS:
        return transport != "shm"
    from raylane.transport.backends.registry import backends

    return backends()[transport].capability.across_hosts


def scatter(node: Node, count: int, axis: int = 0) -> list[Node]:
    """Split `node` along `axis` into `count` nodes, to be bound to one actor each.

    The process that computes the value splits it, so that each part is sent alone. Lists, tuples and strings are split
    along axis 0; arrays and tensors along any axis; in a dict each value is split; an object splits itself if it has
    `size` and `slice(start, stop)` (such as `raylane.BatchDict`) or `shard(index, count)`. Lengths may differ by one.
    The execution fails with ValueError if the length along `axis` is below `count`.
    """
    if not isinstance(node, Node):
        raise TypeError(f"scatter({node!r}, {count}): the first argument must be a node")
    if count < 1:
        raise ValueError(f"scatter: count must be an int of 1 or more, got {count!r}")
    return [PartNode(node, index, count, axis) for index in range(count)]


def gather(nodes: Sequence[Node], axis: int | None = None) -> Node:
    """Join the values of all nodes: into a list (`axis=None`), or along `axis`, the inverse of `scatter`.

    Along an axis, lists and arrays are concatenated, and dicts are joined key by key. Each process that uses the joined
    value joins it.
    """
    return JoinNode("gather", _several("gather", nodes), axis)


def first(nodes: Sequence[Node]) -> Node:
    """Return a node with the value of the first node.

    The other nodes are computed, and their errors count, but their values are not transferred.
    """
    return JoinNode("first", _several("first", nodes))


def mean(nodes: Sequence[Node]) -> Node:
    """Return a node with the mean of the values: numbers, arrays, tensors, and dicts, lists and tuples of those."""
    return JoinNode("mean", _several("mean", nodes))


def _several(how: str, nodes: Sequence[Node]) -> list[Node]:
    several: list[Any] = list(nodes)
    wrong = [node for node in several if not isinstance(node, Node)]
    if wrong or not several:
        raise TypeError(
            f"{how}: the argument must be a list of one or more nodes, got {wrong[0] if wrong else nodes!r}"
        )
    return several


def parts_of(node: Node) -> list[Any]:
    """Return the nodes, constants and containers that a node is made from."""
    if isinstance(node, CallNode):
        return [*node.args, *node.kwargs.values()]
    if isinstance(node, ItemNode | PartNode):
        return [node.base]
    if isinstance(node, JoinNode | MultiOutputNode):
        return list(node.nodes)
    return []


def nodes_in(value: Any) -> list[Node]:
    """Return the nodes in an argument: the argument itself, or those in its lists, tuples and dicts, at any depth."""
    if isinstance(value, Node):
        return [value]
    nodes: list[Node] = []
    seen: set[int] = set()  # a list may contain itself
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Node):
            nodes.append(item)
        elif isinstance(item, list | tuple | dict) and id(item) not in seen:
            seen.add(id(item))
            waiting.extend(reversed(item.values() if isinstance(item, dict) else item))
    return nodes


def _input_of(values: Iterable[Any]) -> InputNode | None:
    """Return the input on which these values depend; None if there is none."""
    for value in values:
        for node in nodes_in(value):
            if isinstance(node, InputNode):
                return node
            input_node = node.input if isinstance(node, CallNode) else _input_of(parts_of(node))
            if input_node is not None:
                return input_node
    return None

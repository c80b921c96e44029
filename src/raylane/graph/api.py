"""`raylane.compile`: checks options, plans the nodes, checks the schedule, then creates either kind of graph."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from raylane import _ray
from raylane.core import settings
from raylane.core.deadline import START_S
from raylane.errors import GraphPlanError
from raylane.graph import nodes, ray_dag
from raylane.graph.plan import planner, schedule
from raylane.graph.plan.ir import INPUT

DEFAULT_MAX_LENT_BYTES = 4 << 30


OPTIONS_OF_RAY = {
    "enable_asyncio": "leave it out: one graph has execute and execute_async",
    "_max_inflight_executions": "use max_inflight",
    "_max_buffered_results": "leave it out: the number of results that wait to be read is not limited",
    "_buffer_size_bytes": "leave it out: large messages get memory of their own",
    "_submit_timeout": "use timeout",
    "_overlap_gpu_communication": "use overlap",
    "_default_communicator": "leave it out: edges choose their transport",
}
"""Options of `experimental_compile` of Ray, and what takes their place; docs/howto/from-ray-compiled-graphs.md."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _names_of_ray_answered(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Answer options of Ray's with the name that they have here; the signature for readers and checkers stays."""

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name in kwargs:
            if name in OPTIONS_OF_RAY:
                raise TypeError(f"compile: {name} is an option of experimental_compile of Ray: {OPTIONS_OF_RAY[name]}")
        return function(*args, **kwargs)

    return checked


@_names_of_ray_answered
def compile(
    node: Any,
    *,
    max_inflight: int = 2,
    timeout: float | None = None,
    backend: str = "ray",
    exclusive: bool = False,
    fail_fast: str = "output",
    order: Mapping[Any, Sequence[nodes.Node]] | None = None,
    max_lent_bytes: int = DEFAULT_MAX_LENT_BYTES,
    overlap: bool = False,
    on_death: str = "end",
) -> Any:
    """Plan a graph once and return a `CompiledGraph`, whose `execute` runs it with a few microseconds of overhead.

    Waits until every actor has started and has finished the call that it is running.

    Args:
        node: The output: a node, a `MultiOutputNode`, or a node of Ray's own (`actor.method.bind`).
        max_inflight: Maximum number of executions under way; also the number of slots of every channel.
        timeout: Limit in seconds of every wait of this graph (None: `RAYLANE_TIMEOUT_S`, 60 s, but 600 s for actors
            that have not started; every 30 s the log then says what is awaited).
        backend: "ray", or "inline" to run plain objects in this process, without Ray, for tests.
        exclusive: Methods of the graph and ordinary calls of the same actor never run at the same time.
        fail_fast: With "output" a result fails as soon as a call that its output needs has failed, without waiting for
            the other calls; with "leaves" also as soon as a call has failed whose result no output needs.
        order: For an actor, all its calls in the order in which they shall run (default: the order of binding).
        max_lent_bytes: Bytes of memory that each process may lend to readers that keep large arrays.
        overlap: An actor does not wait for a collective while it has other calls to run.
        on_death: With "end" the graph ends with an actor that dies. With "repair" executions in flight that need the
            actor fail, and the graph continues when Ray has restarted it (`max_restarts`); all actors must be on the
            driver's host.

    Raises:
        GraphPlanError: The nodes make no graph, or an actor cannot take part.
        GraphDeadlockError: The graph would wait for itself; the message names the cycle and the order to change.
        GraphTimeoutError: An actor did not answer.
        GraphActorDiedError: An actor has died.
    """
    _check_number("max_inflight", max_inflight, int, "an int of 1 or more", least=1)
    _check_number("max_lent_bytes", max_lent_bytes, int, "an int of 1 or more (bytes)", least=1)
    if timeout is not None:
        _check_number("timeout", timeout, int | float, "a number of seconds, or None", least=0)
    if backend not in ("ray", "inline"):
        raise ValueError(f"backend must be 'ray' or 'inline', got {backend!r}")
    if fail_fast not in ("output", "leaves"):
        raise ValueError(f"fail_fast must be 'output' or 'leaves', got {fail_fast!r}")
    if on_death not in ("end", "repair"):
        raise ValueError(f"on_death must be 'end' or 'repair', got {on_death!r}")
    timeout_s = settings.TIMEOUT_S.read() if timeout is None else timeout
    output = ray_dag.convert(node)
    inline = backend == "inline"
    identify = _identify_object if inline else _identify_actor
    plan, actors = planner.plan(output, identify=identify, name=_ray.class_name_of, order=order, overlap=overlap)
    plan = dataclasses.replace(plan, leaves_are_fatal=fail_fast == "leaves")
    schedule.check(plan, max_inflight)
    if any(value.source == INPUT and value.steps[:1] and value.steps[0][-1] == "timeout_s" for value in plan.values):
        raise GraphPlanError("an input cannot have the name timeout_s: execute has an option of this name. Rename it")
    if inline:
        from raylane.graph.inline import InlineGraph

        return InlineGraph(plan, actors, max_inflight=max_inflight, timeout_s=timeout_s)
    from raylane.graph.channels.layout import GraphOptions
    from raylane.graph.driver.graph import CompiledGraph

    start_timeout_s = START_S if timeout is None else timeout
    repairs = on_death == "repair"
    options = GraphOptions(max_inflight, timeout_s, start_timeout_s, max_lent_bytes, exclusive, repairs)
    return CompiledGraph(plan, actors, options)


def _check_number(name: str, value: Any, kind: Any, expected: str, *, least: int) -> None:
    # bool is a subclass of int, and max_inflight=True would mean 1.
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name} must be {expected}, got {value!r}")
    # Written so that NaN, which compares false, is refused.
    if not value >= least:
        raise ValueError(f"{name} must be {expected}, got {value!r}")


def _identify_object(actor: Any) -> int:
    if _ray.is_handle(actor):
        raise GraphPlanError(
            f"{_ray.class_name_of(actor)} is an actor: with backend='inline' bind methods of plain objects"
        )
    return id(actor)


def _identify_actor(actor: Any) -> str:
    if not _ray.is_handle(actor):
        raise GraphPlanError(
            f"{type(actor).__name__} is no actor: bind methods of actor handles, or compile with backend='inline'"
        )
    actor_id = _ray.actor_id_of(actor)
    # The actor would have to run `join_graph` while its thread waits in `compile`.
    if actor_id == _ray.current_actor_id():
        raise GraphPlanError(
            f"{_ray.class_name_of(actor)} cannot compile a graph of its own methods: it would wait for itself. "
            "Compile it in the driver or in another actor"
        )
    return actor_id

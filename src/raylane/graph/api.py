"""`raylane.compile`: options checked, nodes planned, the schedule proven, then either kind of graph made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from raylane import _ray
from raylane.core.deadline import default_timeout_s
from raylane.errors import GraphPlanError
from raylane.graph import nodes
from raylane.graph import ray_dag as translate
from raylane.graph.plan import planner as planning
from raylane.graph.plan import schedule

DEFAULT_MAX_LENT_BYTES = 4 << 30


def compile(
    node: Any,
    *,
    max_inflight: int = 2,
    timeout_s: float | None = None,
    backend: str = "ray",
    exclusive: bool = False,
    fail_fast: str = "output",
    order: Mapping[Any, Sequence[nodes.Node]] | None = None,
    max_lent_bytes: int = DEFAULT_MAX_LENT_BYTES,
) -> Any:
    """Plan a graph once and return a `CompiledGraph`, whose `execute` runs it with a few microseconds of overhead.

    `node` is the output: a node, a `MultiOutputNode`, or one of Ray's own (`actor.method.bind`). Waits until every
    actor has started and has finished the call it is busy with.

    max_inflight: executions that may be under way at once; also the number of slots of every channel (64 KB each).
    timeout_s: limit of every wait of this graph (None: `RAYLANE_TIMEOUT_S`, 60 s).
    backend: "ray", or "inline" to run plain objects in this process, without Ray, for tests.
    exclusive: methods of the graph and ordinary calls of the same actor never run at the same time.
    fail_fast: a result fails as soon as a call that its output needs has failed, without waiting for the others; with
    "leaves" also as soon as a call has failed whose result nobody reads.
    order: for an actor, all its calls in the order in which they shall run (default: as bound).
    max_lent_bytes: how much memory each process may have lent to readers that keep large arrays.

    GraphPlanError if the nodes make no graph; GraphDeadlockError names the cycle if it would wait for itself;
    GraphTimeoutError, GraphActorDiedError if an actor does not answer.
    """
    _check_number("max_inflight", max_inflight, int, "a number of executions, 1 or more", least=1)
    _check_number("max_lent_bytes", max_lent_bytes, int, "a number of bytes, 1 or more", least=1)
    if timeout_s is not None:
        _check_number("timeout_s", timeout_s, int | float, "a number of seconds, or None", least=0)
    if backend not in ("ray", "inline"):
        raise ValueError(f"backend={backend!r}: there are ray and inline")
    if fail_fast not in ("output", "leaves"):
        raise ValueError(f"fail_fast must be 'output' or 'leaves', got {fail_fast!r}")
    timeout_s = default_timeout_s() if timeout_s is None else timeout_s
    output = translate.from_ray(node)
    inline = backend == "inline"
    identify = _identify_object if inline else _identify
    plan, actors = planning.plan(output, identify=identify, name=_ray.class_name_of, order=order)
    plan = dataclasses.replace(plan, leaves_are_fatal=fail_fast == "leaves")
    schedule.check(plan, max_inflight)
    if inline:
        from raylane.graph.inline import InlineGraph

        return InlineGraph(plan, actors, max_inflight=max_inflight, timeout_s=timeout_s)
    from raylane.graph.driver.deploy import wire
    from raylane.graph.driver.graph import CompiledGraph

    wiring = wire(
        plan,
        actors,
        max_inflight=max_inflight,
        timeout_s=timeout_s,
        max_lent_bytes=max_lent_bytes,
        exclusive=exclusive,
    )
    return CompiledGraph(plan, wiring, max_inflight=max_inflight, timeout_s=timeout_s)


def _identify_object(found: Any) -> int:
    if _ray.is_handle(found):
        raise GraphPlanError(
            f"{_ray.class_name_of(found)} is an actor: with backend='inline' bind methods of plain objects"
        )
    return id(found)


def _check_number(name: str, value: Any, kind: Any, wanted: str, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name}={value!r}: it is {wanted}")
    if not value >= least:
        raise ValueError(f"{name}={value!r}: it is {wanted}")


def _identify(actor: Any) -> str:
    if not _ray.is_handle(actor):
        raise GraphPlanError(
            f"{type(actor).__name__} is no actor: bind methods of actor handles, or compile with backend='inline'"
        )
    actor_id = _ray.actor_id_of(actor)
    if actor_id == _ray.current_actor_id():
        raise GraphPlanError(
            f"{_ray.class_name_of(actor)} cannot compile a graph of its own methods: it would wait for itself. "
            "Compile it in the driver or in another actor"
        )
    return actor_id

"""Wait for the actors of an ended graph, which Ray may be restarting. Called by `CompiledGraph.recompile`.

An ordinary call that returns is the only proof that an actor is alive: for a moment after the death of a process, Ray
still lists its actor as alive. Ray's list decides only that an actor is dead for good.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray

from raylane import _ray
from raylane.core.deadline import Deadline
from raylane.errors import GraphActorDiedError, GraphTimeoutError
from raylane.graph.plan.ir import Plan
from raylane.graph.worker import bootstrap

POLL_S = 0.05
"""Seconds between two calls to an actor that is restarting."""


def wait_until_alive(plan: Plan, actors: Sequence[Any], timeout_s: float | None) -> None:
    """Wait until every actor answers an ordinary call. `actors` are those of members 1, 2, ...

    GraphActorDiedError if Ray will not restart an actor, GraphTimeoutError if one does not answer in time.
    """
    deadline = Deadline(timeout_s)
    waiting = dict(zip(plan.members[1:], actors, strict=True))
    while True:
        refs = {name: actor.__ray_call__.remote(bootstrap.describe_actor) for name, actor in waiting.items()}
        waiting = {
            name: waiting[name] for name, ref in refs.items() if not _answers(name, waiting[name], ref, deadline)
        }
        if not waiting:
            return
        remaining_s = deadline.left_s()
        if remaining_s is not None and remaining_s <= 0:
            raise GraphTimeoutError(
                f"{', '.join(waiting)} did not restart within {deadline.timeout_s} s: Ray restarts it still, or waits "
                "for resources (ray status). Call recompile again, or compile with a larger timeout_s"
            )
        time.sleep(POLL_S if remaining_s is None else min(remaining_s, POLL_S))


def _answers(name: str, actor: Any, ref: Any, deadline: Deadline) -> bool:
    """Return True if the call has returned, False if the actor is restarting."""
    try:
        ray.get(ref, timeout=deadline.left_s())
    except ray.exceptions.GetTimeoutError as error:
        raise GraphTimeoutError(
            f"{name} did not answer within {deadline.timeout_s} s: it is still starting, or runs a long method. Call "
            "recompile again, or compile with a larger timeout_s"
        ) from error
    except ray.exceptions.RayActorError as error:
        actor_id = _ray.actor_id_of(actor)
        if not _ray.is_dead_for_good(actor_id):
            return False
        raise GraphActorDiedError(
            f"{name} is dead, and Ray does not restart it (max_restarts): compile with a living actor. {error}",
            actor=actor_id,
        ) from error
    return True

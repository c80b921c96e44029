"""Named actors of the service: how they are started and found, and the errors that they raise."""

from __future__ import annotations

from typing import Any

import ray

from raylane.errors import WeightsError

NAMESPACE = "raylane-weights"


def actor_names(begin: str) -> list[str]:
    """Return the names of the catalogues and keepers of the cluster that begin so."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE and actor["name"].startswith(begin)]


def own_error(error: ray.exceptions.RayTaskError) -> Exception:
    """Return the error of weights that an actor has raised; another error as Ray wraps it."""
    return error.cause if isinstance(error.cause, WeightsError) else error


def start_actor(kind: type, name: str, *args: Any, **options: Any) -> Any:
    """Return the actor of this name, which the first call in the cluster starts."""
    actor = ray.remote(kind).options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",  # else it would end with the process that has started it
        get_if_exists=True,
        num_cpus=0,
        **options,
    )
    return actor.remote(*args)

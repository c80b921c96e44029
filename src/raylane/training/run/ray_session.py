"""Connection of a training run to Ray: the caller's, a running cluster, or a local one that ends with the run.

`cluster.address` decides, and if it is null the environment variable RAY_ADDRESS. Called by the trainers; commands call
`start_ray` too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import ray

from raylane import _ray
from raylane.core.process.environment import AT_NORMAL_PRIORITY, variables
from raylane.core.process.reachable import TOKEN_REMEDY, check_reachable
from raylane.errors import ConfigError
from raylane.training.config.schema import ClusterConfig


@contextmanager
def connect(cluster: ClusterConfig, more: Mapping[str, Demand] | None = None) -> Iterator[None]:
    """Provide an initialised Ray during the `with` block; a Ray that the caller has initialised is left as it is.

    A local Ray runs its workers at normal priority (niceness 0), unless RAY_worker_niceness is set.

    `more` are actors beside the workers, by the key of their number. Raises ConfigError if nothing answers at the
    address, if it is the address of a Ray client server, or if workers and these actors together need more CPUs or GPUs
    than the cluster has.
    """
    demands = {"cluster.num_workers": worker_demand(cluster), **(more or {})}
    if ray.is_initialized():
        if more:  # workers alone have a placement group, whose wait ends with an error
            _check(demands)
        yield
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # without it Ray prints a warning at every start
    # An address from the environment is read here, so that both sources get the same checks.
    source = "cluster.address" if cluster.address is not None else "RAY_ADDRESS"
    address = cluster.address or os.environ.get("RAY_ADDRESS") or "local"
    level = logging.WARNING
    if address == "local":
        # Ray counts logical CPUs. With fewer cores than workers the run is slow, but it must not wait forever.
        cpus = max(sum(demand.actors * demand.cpus for demand in demands.values()), os.cpu_count() or 1)
        with variables(AT_NORMAL_PRIORITY, keep=True):
            start_ray("local", num_cpus=cpus, include_dashboard=False, logging_level=level)
    else:
        if address.startswith("ray://"):
            raise ConfigError(
                f"{source}={address} is the address of a Ray client server, through which tensors would be copied "
                "twice. Start the command on a node of the cluster (`ray job submit`, see docs/howto/cluster.md) with "
                f"{source}=auto"
            )
        try:
            start_ray(address, logging_level=level)
        except (OSError, ValueError) as error:  # "auto" without a cluster, a text that is no address
            raise _unreachable(address, source, error) from error
    try:
        if more:
            _check(demands)
        yield
    finally:
        ray.shutdown()


def start_ray(address: str | None, **options: Any) -> None:
    """Call ray.init, without the notice that Ray prints at each start or connection if a token is in use.

    OSError if no Ray answers; PermissionError, with what to do, if it refuses the token of this process. ConfigError if
    Ray cannot save a token for a cluster of its own.
    """
    logger = logging.getLogger(_ray.AUTHENTICATION_LOGGER)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        if ":" in (address or ""):
            check_reachable(str(address), _ray.token_headers())
        ray.init(address=address, **options)
    except ray.exceptions.AuthenticationError as error:  # this process shall have a token, and has none
        raise PermissionError(f"{error.message.rstrip('.')}. {TOKEN_REMEDY}") from error
    except OSError as error:
        if ".ray" not in str(error.filename):
            raise
        # A Ray that this process starts makes a token of its own, and saves it in the home directory.
        raise ConfigError(f"Ray cannot save its token: {error}. Set RAY_AUTH_TOKEN to a random text") from error
    finally:
        logger.setLevel(level)


class Demand(NamedTuple):
    """Number of actors, and what each of them requests from Ray."""

    actors: int
    cpus: int
    gpus: float


def worker_demand(cluster: ClusterConfig) -> Demand:
    """Return the demand of the workers of a run."""
    return Demand(cluster.num_workers, cluster.cpus_per_worker, 1 if cluster.gpus_per_node else 0)


def shortage(demands: Mapping[str, Demand], totals: Mapping[str, float]) -> str | None:
    """Return what a cluster with these resources lacks to run all actors at the same time; None if nothing. Pure."""
    for resource, field in (("CPU", "cpus"), ("GPU", "gpus")):
        each = {key: (demand.actors, getattr(demand, field)) for key, demand in demands.items()}
        needed, total = sum(count * share for count, share in each.values()), totals.get(resource, 0.0)
        if needed > total:
            parts = " and ".join(f"{key}={count} x {share:g}" for key, (count, share) in each.items() if share)
            return f"the run needs {needed:g} {resource}s at the same time ({parts}), and the cluster has {total:g}"
    return None


def _check(demands: Mapping[str, Demand]) -> None:
    # Ray would let the last actors wait for ever, and the others wait for them.
    if (lack := shortage(demands, ray.cluster_resources())) is not None:
        raise ConfigError(f"{lack}. Lower one of them, or start a larger cluster")


def _unreachable(address: str, source: str, error: Exception) -> ConfigError:
    failure = f"the Ray cluster at {source}={address} cannot be reached: {error}"
    if isinstance(error, PermissionError):
        return ConfigError(failure)
    remedy = "correct cluster.address, or set it to local"
    if source == "RAY_ADDRESS":
        remedy = "correct RAY_ADDRESS, or unset it"
    return ConfigError(f"{failure}. Start it (`ray start --head`), {remedy} to run on this machine alone")

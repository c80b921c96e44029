"""Options of a worker group: the resources and environment of each actor, as one frozen dataclass.

Pure: the options are checked on construction, and `bundle` and `remote_options` translate them into Ray's arguments. An
unknown option is a TypeError, so that no option is ignored silently. Used by `WorkerGroup`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from raylane.core.deadline import START_S

RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables that the group sets in each worker's process, as torchrun defines them; not allowed in `env_vars`."""

_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Options for all workers of a group. Mappings are copied, so the caller's mappings are never changed."""

    num_cpus: float = 1.0
    """Logical CPUs of each worker's bundle. Ray sets OMP_NUM_THREADS to this number unless `env_vars` sets it."""
    num_gpus: float = 0.0
    """GPUs of each worker. Ray makes only these GPUs visible to the worker, so its device has index 0."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Amounts of other Ray resources by name."""
    env_vars: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that are set before the worker's Python starts."""
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    """Ray runtime environment (working_dir, pip, py_executable, ...); its env_vars are merged with `env_vars`."""
    max_restarts: int = 0
    """Number of times that Ray may restart a lost process, which has no worker until `WorkerGroup.rebuild_worker`."""
    max_concurrency: int = 1
    """Number of calls that run at the same time in one worker, each on its own thread."""
    name_prefix: str = ""
    """Prefix of actor names, f"{name_prefix}-{rank}", which must be unused in the Ray namespace; empty for no names.

    Without names, the GPUs of a node's ranks ascend; with names, each rank has the GPU that Ray gave its actor.
    """
    placement_strategy: str = "PACK"
    """Distribution of bundles over nodes: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD."""
    workers_per_node: int | None = None
    """Number of workers, with consecutive ranks, to place on each of size / workers_per_node nodes.

    None places bundles one by one according to `placement_strategy`. In both cases ranks are consecutive within a node.
    """
    reserve: Mapping[str, float] = field(default_factory=dict)
    """Amounts of Ray resources ("GPU", "CPU") of each bundle that are left to workers of groups with `colocate`."""
    colocate: object | None = None
    """WorkerGroup beside whose workers those of this one are placed, rank i beside rank i, in what that group reserves.

    Both must have as many workers. Rank i of both sees the same GPU if each needs a part of one (`num_gpus` below 1).
    The other options of the placement are those of that group, which may be shut down first.
    """
    spares: int = 0
    """Number of processes that wait to take the place of a worker that dies, for classes with `on_regroup`: `recover`
    then starts no process. Each takes the memory of a Python with torch. For groups without GPUs and names."""
    start_timeout_s: float = START_S
    """Limit in seconds for placing, starting and constructing all workers; every 30 s the log says what is awaited."""

    def __post_init__(self) -> None:
        # `frozen` protects the fields only; copy the mappings and make them read-only as well.
        for name in ("resources", "env_vars", "runtime_env", "reserve"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        amounts = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, **self.resources}
        negative = {name: amount for each in (amounts, self.reserve) for name, amount in each.items() if amount < 0}
        if negative:
            raise ValueError(f"resources of a worker must not be negative, got {negative}")
        if self.colocate is not None and (self.reserve or self.workers_per_node is not None):
            raise ValueError(
                "a group with colocate has the places of the other one: leave out reserve and workers_per_node"
            )
        gpus = self.bundle().get("GPU", 0.0)
        if gpus > 1 and gpus != int(gpus):
            raise ValueError(f"num_gpus with reserve['GPU'] must be at most 1, or a whole number, got {gpus:g}")
        if not self.needs():
            raise ValueError(
                "a worker needs at least one resource for its placement. Set num_cpus, num_gpus or resources above 0"
            )
        if self.max_concurrency < 1:
            raise ValueError(f"max_concurrency must be at least 1, got {self.max_concurrency}")
        if self.workers_per_node is not None and self.workers_per_node < 1:
            raise ValueError(f"workers_per_node must be at least 1, or None, got {self.workers_per_node}")
        if self.spares < 0 or (self.spares and (self.bundle().get("GPU", 0.0) or self.name_prefix)):
            raise ValueError(
                f"spares={self.spares}: spares are a number of processes, of groups without GPUs and name_prefix"
            )
        if self.max_restarts < -1:
            raise ValueError(f"max_restarts must be a number of restarts, or -1 for no limit, got {self.max_restarts}")
        if self.start_timeout_s <= 0:
            raise ValueError(f"start_timeout_s must be more than 0 seconds, got {self.start_timeout_s}")
        inner = self.runtime_env.get("env_vars", {})
        for name, value in (*inner.items(), *self.env_vars.items()):
            if not isinstance(name, str) or not isinstance(value, str):
                raise TypeError(f"environment variables must be strings: {name!r} has the value {value!r}")
        twice = sorted(name for name in inner if name in self.env_vars and inner[name] != self.env_vars[name])
        if twice:
            raise ValueError(
                f"{twice} have different values in env_vars and runtime_env['env_vars']. Pass each variable once"
            )
        reserved = sorted(name for name in (*inner, *self.env_vars) if name in RANK_VARIABLES)
        if reserved:
            raise ValueError(f"{reserved} are set by the group for each worker. Remove these names from env_vars")
        if self.placement_strategy not in _STRATEGIES:
            raise ValueError(
                f"placement_strategy must be one of {', '.join(_STRATEGIES)}, got {self.placement_strategy!r}"
            )

    def needs(self) -> dict[str, float]:
        """Return the resources that one worker takes."""
        amounts = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: float(amount) for name, amount in amounts.items() if amount > 0}

    def bundle(self) -> dict[str, float]:
        """Return the resources that the placement group has for one worker and what is reserved beside it."""
        needs, reserve = self.needs(), self.reserve
        return {name: needs.get(name, 0.0) + reserve.get(name, 0.0) for name in {**needs, **reserve}}

    def bundles(self, size: int) -> tuple[list[dict[str, float]], str]:
        """Return the bundles of a group of `size` workers and Ray's placement strategy for them.

        With `workers_per_node` a bundle holds all workers of a node. ValueError if the workers do not divide evenly.
        """
        each = self.workers_per_node
        if each is None:
            return [self.bundle() for _ in range(size)], self.placement_strategy
        if size % each:
            raise ValueError(f"workers_per_node={each} does not divide the {size} workers of this group")
        # STRICT_SPREAD puts each bundle on a node of its own, and a bundle has room for all workers of its node.
        node = {name: amount * each for name, amount in self.bundle().items()}
        return [dict(node) for _ in range(size // each)], "STRICT_SPREAD"

    def remote_options(self, rank: int) -> dict[str, Any]:
        """Return the keyword arguments for Ray's `options(...)` of one worker, in new containers."""
        # Ray accepts environment variables only as a part of the runtime environment.
        environment = dict(self.runtime_env)
        variables = {**environment.pop("env_vars", {}), **self.env_vars}
        if variables:
            environment["env_vars"] = variables
        options: dict[str, Any] = {
            "num_cpus": self.num_cpus,
            # The actors of the first of several groups in a bundle take all of its GPUs (`places`).
            "num_gpus": 0.0 if self.colocate is not None else self.bundle().get("GPU", 0.0),
            "max_restarts": self.max_restarts,
            "max_concurrency": self.max_concurrency,
        }
        if self.resources:
            options["resources"] = dict(self.resources)
        if environment:
            options["runtime_env"] = environment
        if self.name_prefix:
            options["name"] = f"{self.name_prefix}-{rank}"
        return options

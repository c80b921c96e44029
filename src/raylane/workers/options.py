"""What a worker group asks of Ray for each of its actors, as one typed, frozen value.

Pure: checked when it is made, turned into Ray's own words by `bundle` and `remote_options`. Called by `WorkerGroup`.
An option that is not a field here is a TypeError, so that none can be dropped silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

__all__ = ["RANK_VARIABLES", "WorkerOptions"]

RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Set by the group in each worker's process (meaning as in torchrun); `env_vars` may not name them."""

_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The same for all workers of a group. Mappings are copied; the caller's are never changed."""

    num_cpus: float = 1.0
    """Logical CPUs of each worker's bundle. Ray sets OMP_NUM_THREADS to it unless `env_vars` does."""
    num_gpus: float = 0.0
    """GPUs of each worker; Ray shows a worker only its own, so its device is index 0."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Further Ray resources, name -> amount."""
    env_vars: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that are there before the worker's Python starts."""
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    """Ray runtime environment (working_dir, pip, py_executable, ...); its env_vars are joined with `env_vars`."""
    max_restarts: int = 0
    """How often Ray may start a lost worker's process again. It comes back empty: see `WorkerGroup.rebuild_worker`."""
    max_concurrency: int = 1
    """Calls that run at the same time in one worker, each on a thread of its own."""
    name_prefix: str = ""
    """Actors are named f"{name_prefix}-{rank}" when this is set; names must be free in the Ray namespace."""
    placement_strategy: str = "PACK"
    """How bundles are spread over nodes: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD."""
    workers_per_node: int | None = None
    """Place exactly this many workers, with consecutive ranks, on each of size / this nodes. None: bundles are placed
    one by one as `placement_strategy` says. In both cases ranks are consecutive within a node."""
    start_timeout_s: float = 120.0
    """Limit for placing, starting and constructing all workers."""

    def __post_init__(self) -> None:
        for name in ("resources", "env_vars", "runtime_env"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        _check_amounts(self)
        _check_environment(self)
        if self.placement_strategy not in _STRATEGIES:
            raise ValueError(f"placement_strategy {self.placement_strategy!r} is not one of {', '.join(_STRATEGIES)}")

    def bundle(self) -> dict[str, float]:
        """What one worker reserves in the placement group."""
        amounts = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: float(amount) for name, amount in amounts.items() if amount > 0}

    def bundles(self, size: int) -> tuple[list[dict[str, float]], str]:
        """Return the bundles of a group of `size` workers and Ray's placement strategy for them.

        With `workers_per_node` a bundle holds all workers of a node. ValueError when they do not divide.
        """
        each = self.workers_per_node
        if each is None:
            return [self.bundle() for _ in range(size)], self.placement_strategy
        if size % each:
            raise ValueError(f"workers_per_node={each} does not divide the {size} workers of this group")
        node = {name: amount * each for name, amount in self.bundle().items()}
        return [dict(node) for _ in range(size // each)], "STRICT_SPREAD"

    def remote_options(self, rank: int) -> dict[str, Any]:
        """Keyword arguments for Ray's `options(...)` of one worker; fresh containers each time."""
        environment = dict(self.runtime_env)
        variables = {**environment.pop("env_vars", {}), **self.env_vars}
        if variables:
            environment["env_vars"] = variables
        options: dict[str, Any] = {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
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


def _check_amounts(options: WorkerOptions) -> None:
    amounts = {"num_cpus": options.num_cpus, "num_gpus": options.num_gpus, **options.resources}
    negative = {name: amount for name, amount in amounts.items() if amount < 0}
    if negative:
        raise ValueError(f"resources of a worker cannot be negative: {negative}")
    if not options.bundle():
        raise ValueError("a worker needs some resource to be placed by; set num_cpus, num_gpus or resources above 0")
    if options.max_concurrency < 1:
        raise ValueError(f"max_concurrency must be at least 1, got {options.max_concurrency}")
    if options.workers_per_node is not None and options.workers_per_node < 1:
        raise ValueError(f"workers_per_node must be at least 1, or None; got {options.workers_per_node}")
    if options.max_restarts < -1:
        raise ValueError(f"max_restarts is a count, or -1 for no limit; got {options.max_restarts}")
    if options.start_timeout_s <= 0:
        raise ValueError(f"start_timeout_s must be above 0 seconds, got {options.start_timeout_s}")


def _check_environment(options: WorkerOptions) -> None:
    inner = options.runtime_env.get("env_vars", {})
    for name, value in (*inner.items(), *options.env_vars.items()):
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"environment variables are text: {name!r} has the value {value!r}")
    twice = sorted(name for name in inner if name in options.env_vars and inner[name] != options.env_vars[name])
    if twice:
        raise ValueError(f"{twice} have one value in env_vars and another in runtime_env['env_vars']")
    reserved = sorted(name for name in (*inner, *options.env_vars) if name in RANK_VARIABLES)
    if reserved:
        raise ValueError(f"{reserved} are set by the group for each worker and cannot be given as env_vars")

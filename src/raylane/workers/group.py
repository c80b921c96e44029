"""A group of workers: one Ray actor per rank in one placement group, called together along named axes.

Owns the actors and the placement group from construction to `shutdown`. What goes to whom is decided in `dispatch`,
what can be called in `methods`; this module sends. Called by trainers and by users' drivers.

A call never waits: `run_*` send and return a `GroupFuture`; `get_all_worker_results` waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raylane import _ray
from raylane.errors import WorkerCallError, WorkerGroupError
from raylane.transport.api import put
from raylane.workers.batch import BatchDict
from raylane.workers.dispatch import Call, Plan, check_nesting, plan_sharded, plan_some, take
from raylane.workers.future import GroupFuture
from raylane.workers.host import Seat, WorkerHost
from raylane.workers.methods import check_call, check_constructor, check_worker_class
from raylane.workers.options import WorkerOptions
from raylane.workers.sharding import NamedSharding

__all__ = ["WorkerGroup", "WorkerOptions"]

_log = logging.getLogger(__name__)

_KILL_RESERVE_S = 5.0
"""Part of shutdown's time (at most half of it) that a cleanup method cannot use up: killing needs some too."""


class WorkerGroup:
    """Starts the workers and waits until all are constructed.

    `worker_class` is a plain class; each worker is `worker_class(*init_args, **init_kwargs)` in a process of its own,
    with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT in its environment. The
    port belongs to a store that rank 0's process already serves, and `torch.distributed.init_process_group(backend)`
    joins it (TORCHELASTIC_USE_AGENT_STORE). `sharding` holds the ranks 0..n-1 on named axes; a number n is one axis
    "worker". Needs an initialised Ray.

    Raises ValueError or TypeError for bad arguments, WorkerGroupError when the cluster cannot place the workers in
    time, WorkerCallError when a constructor raised, WorkerLostError when a worker died; nothing is left behind then.
    """

    def __init__(
        self,
        worker_class: type,
        sharding: NamedSharding | int,
        *,
        init_args: Sequence[Any] = (),
        init_kwargs: Mapping[str, Any] | None = None,
        options: WorkerOptions | None = None,
    ) -> None:
        check_worker_class(worker_class)
        self._class = worker_class
        self._sharding = NamedSharding.of(worker=sharding) if isinstance(sharding, int) else sharding
        if self._sharding.ranks != tuple(range(self._sharding.size)):
            raise ValueError(f"a group's ranks are 0 to {self._sharding.size - 1}, got {list(self._sharding.ranks)}")
        self._options = options or WorkerOptions()
        self._init = (tuple(init_args), dict(init_kwargs or {}))
        check_constructor(worker_class, *self._init)
        self._actors: list[Any] = []
        """Actor handles by rank; empty once shut down."""
        self._env: list[dict[str, str]] = []
        """Rank variables by rank."""
        self._placement: PlacementGroup | None = None
        self._dropped: weakref.finalize[..., Any] | None = None
        """Gives the placement group back if this object is dropped without `shutdown`."""
        self._closed = False
        try:
            self._start(time.monotonic() + self._options.start_timeout_s)
        except BaseException:
            self.shutdown(timeout_s=10)
            raise

    @property
    def sharding(self) -> NamedSharding:
        """The ranks on their axes."""
        return self._sharding

    @property
    def size(self) -> int:
        """How many workers there are."""
        return self._sharding.size

    # Calls ----------------------------------------------------------------------------------------------------------

    def run_single_worker_single_data(self, method: str, worker_idx: int, *args: Any, **kwargs: Any) -> GroupFuture:
        """Call one rank. Results come as a list of one."""
        self._sharding.get_index(worker_idx)
        return self._send(method, Plan((Call(worker_idx, (), returns=True),), ()), args, kwargs, {})

    def run_all_workers_single_data(
        self, method: str, *args: Any, run_rank_0_only_axes: Sequence[str] | None = None, **kwargs: Any
    ) -> GroupFuture:
        """Call every rank (on `run_rank_0_only_axes` only coordinate 0) with the same arguments."""
        return self._send(method, plan_some(self._sharding, run_rank_0_only_axes or ()), args, kwargs, {})

    def run_all_workers_multiple_data(
        self,
        method: str,
        *args: Sequence[Any],
        run_rank_0_only_axes: Sequence[str] | None = None,
        common_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Sequence[Any],
    ) -> GroupFuture:
        """Like `run_all_workers_single_data`, but arguments are lists with one entry per *called* worker, by rank."""
        plan = plan_some(self._sharding, run_rank_0_only_axes or (), one_each=True)
        return self._send(method, plan, args, kwargs, common_kwargs or {})

    def run_all_workers_sharded_data(
        self,
        method: str,
        *args: Any,
        in_sharded_axes: Sequence[str] | None = None,
        replicate_on_axes: Sequence[str] | None = None,
        output_is_replicated: Sequence[str] | None = None,
        make_dummy_calls_to_free_axes: bool = False,
        common_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> GroupFuture:
        """Call along axes: arguments are lists nested once per axis of `in_sharded_axes`, in that list's order.

        Workers along `replicate_on_axes` get the same slice; of an axis in neither list only coordinate 0 is called
        (the others with None, if `make_dummy_calls_to_free_axes`). Along `output_is_replicated` only coordinate 0
        returns: what the others return never leaves their process. `common_kwargs` are not nested. Every argument is
        checked before anything is sent: ValueError, TypeError, AttributeError name what is wrong and where.
        """
        plan = plan_sharded(
            self._sharding,
            in_sharded_axes or (),
            replicate_on_axes or (),
            output_is_replicated or (),
            make_dummy_calls_to_free_axes,
        )
        return self._send(method, plan, args, kwargs, common_kwargs or {})

    def get_all_worker_results(self, future: GroupFuture, timeout_s: float | None = None) -> list[Any]:
        """Wait for a call; the results of those workers that return, by ascending rank. See `GroupFuture.results`."""
        if not isinstance(future, GroupFuture):
            raise TypeError(f"get_all_worker_results takes what a run_* method returned, got {type(future).__name__}")
        return future.results(timeout_s)

    def _send(
        self,
        method: str,
        plan: Plan,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        common: Mapping[str, Any],
    ) -> GroupFuture:
        if self._closed:
            raise WorkerGroupError(f"{self!r}: {method!r} cannot be called any more; start a new group")
        both = sorted(set(kwargs) & set(common))
        if both:
            raise TypeError(f"{method}: {both} are given both for each worker and in common_kwargs")
        check_call(self._class, method, len(args), (*kwargs, *common))
        for name, value in (*((f"argument {i}", value) for i, value in enumerate(args)), *kwargs.items()):
            check_nesting(f"{self._class.__name__}.{method}: {name}", value, plan.nesting)
        slices = {path: _packed(_cut(args, kwargs, path)) for path in {call.path for call in plan.calls}}
        shared = _packed(dict(common))
        if len(slices) > 1:  # one that cannot be pickled must not be found after others were sent
            for one in slices.values():
                _try_pickling(f"{self._class.__name__}.{method}", one)
        refs = tuple(
            self._actors[call.rank].call.remote(method, call.returns, slices[call.path], shared) for call in plan.calls
        )
        return GroupFuture(f"{self._class.__name__}.{method}", plan, refs)

    # Life -----------------------------------------------------------------------------------------------------------

    def _start(self, deadline: float) -> None:
        bundles, strategy = self._options.bundles(self.size)
        self._placement = placement_group(bundles, strategy=strategy)
        self._dropped = weakref.finalize(self, _release, self._placement)
        self._dropped.atexit = False
        if not self._placement.wait(max(0.0, deadline - time.monotonic())):
            limit = self._options.start_timeout_s
            raise WorkerGroupError(
                f"the cluster could not place {self.size} workers of {self._options.bundle()} ({len(bundles)} bundles, "
                f"{strategy}) within {limit} s; free now: {_amounts(ray.available_resources())}, "
                f"in all: {_amounts(ray.cluster_resources())}"
            )
        remote_host = ray.remote(WorkerHost)
        for rank, bundle in enumerate(_bundle_of_each_rank(self._placement, self.size)):
            seat = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=bundle)
            options = self._options.remote_options(rank)
            self._actors.append(remote_host.options(scheduling_strategy=seat, **options).remote(rank))
        seats = self._first_calls(
            "starting", [actor.take_seat.remote(rank == 0) for rank, actor in enumerate(self._actors)], deadline
        )
        self._env = _rank_variables(seats)
        self._first_calls("__init__", [self._build(rank) for rank in range(self.size)], deadline)

    def _build(self, rank: int) -> Any:
        args, kwargs = self._init
        return self._actors[rank].build.remote(self._class, args, kwargs, self._env[rank])

    def _first_calls(self, what: str, refs: list[Any], deadline: float) -> list[Any]:
        calls = tuple(Call(rank, (), returns=True) for rank in range(len(refs)))
        future = GroupFuture(f"{self._class.__name__}.{what}", Plan(calls, ()), tuple(refs))
        try:
            return future.results(max(0.0, deadline - time.monotonic()))
        except WorkerCallError as error:
            if "timeout_s" not in error.fields:
                raise
            limit = self._options.start_timeout_s
            raise WorkerCallError(
                f"{future.label}: ranks {error.fields['ranks']} are not ready {limit} s after the start. Look at "
                "the logs of their processes, or raise start_timeout_s",
                ranks=error.fields["ranks"],
                timeout_s=limit,
            ) from error

    def rebuild_worker(self, rank: int, timeout_s: float | None = None) -> None:
        """Construct the worker of a rank again, after Ray restarted its process (`max_restarts`); waits.

        Its state starts anew, and a process group of torch.distributed that it was in does not come back by itself.
        """
        self._sharding.get_index(rank)
        if self._closed:
            raise WorkerGroupError(f"{self!r}: nothing to rebuild")
        label = f"{self._class.__name__}.__init__"
        GroupFuture(label, Plan((Call(rank, (), returns=True),), ()), (self._build(rank),)).results(timeout_s)

    def shutdown(self, timeout_s: float = 30.0, cleanup_method: str | None = None) -> bool:
        """End all workers and give the placement group back; waits at most about `timeout_s` seconds.

        `cleanup_method` is called on every worker first; what it raises, or that it takes too long, is logged, and the
        workers are killed all the same. Returns whether all went as it should. A second call does nothing: True.
        """
        if self._closed:
            return True
        deadline = time.monotonic() + timeout_s
        clean = True
        if cleanup_method is not None and self._actors and ray.is_initialized():
            clean = self._clean_up(cleanup_method, timeout_s - min(_KILL_RESERVE_S, timeout_s / 2))
        self._closed = True
        if self._dropped is not None:
            self._dropped.detach()
        actors, self._actors = self._actors, []
        placement, self._placement = self._placement, None
        if not ray.is_initialized():  # Ray took everything with it
            return clean
        for actor in actors:
            ray.kill(actor)
        if placement is not None:
            remove_placement_group(placement)
        return clean & _gone(actors, deadline) & _removed(placement, deadline)

    def _clean_up(self, method: str, timeout_s: float) -> bool:
        try:
            self.get_all_worker_results(self.run_all_workers_single_data(method), timeout_s)
        except (WorkerGroupError, AttributeError, TypeError) as error:
            _log.warning("%r: cleanup before shutdown failed: %s", self, error)
            return False
        return True

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        axes = " x ".join(f"{name}={size}" for name, size in self._sharding.shape.items())
        return f"WorkerGroup({self._class.__name__}, {axes}, {'shut down' if self._closed else 'running'})"


def _cut(args: Sequence[Any], kwargs: Mapping[str, Any], path: tuple[int, ...] | None) -> tuple[Any, ...]:
    return tuple(take(arg, path) for arg in args), {name: take(value, path) for name, value in kwargs.items()}


class _NoFile:
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return len(memoryview(data))


class _Trial(_ray.CloudPickler):  # type: ignore[misc]  # untyped base
    """Finds out whether a value can be pickled. Leaves references out: Ray never frees one that is pickled by hand."""

    def persistent_id(self, value: Any) -> str | None:
        return "" if isinstance(value, ray.ObjectRef) else None


def _try_pickling(call: str, value: Any) -> None:
    try:
        _Trial(_NoFile(), protocol=5).dump(value)
    except Exception as error:
        raise TypeError(f"{call}: an argument cannot be pickled, so nothing was sent: {error}") from error


def _release(placement: PlacementGroup) -> None:
    """Give back the placement group of a WorkerGroup that nobody shut down.

    On a thread: this runs wherever the garbage collector does, and removing takes a call to Ray.
    """
    warnings.warn("a WorkerGroup was dropped without shutdown()", ResourceWarning, stacklevel=2)
    threading.Thread(target=_remove_quietly, args=(placement,), name="raylane-release", daemon=True).start()


def _remove_quietly(placement: PlacementGroup) -> None:
    with suppress(Exception):  # Ray may have ended meanwhile, and took everything with it
        remove_placement_group(placement)


def _packed(value: Any) -> Any:
    """What stands for an argument in the call: itself if it is plain, else a reference to it, put once."""
    return put(value) if _carries_arrays(value) else value


def _carries_arrays(value: Any) -> bool:
    """Whether a tensor or an array lies in here, looking through plain containers."""
    if isinstance(value, (torch.Tensor, np.ndarray, BatchDict)):
        return True
    if isinstance(value, Mapping):
        return any(_carries_arrays(item) for item in value.values())
    return isinstance(value, (list, tuple)) and any(_carries_arrays(item) for item in value)


def _bundle_of_each_rank(placement: PlacementGroup, size: int) -> list[int]:
    """Return the bundle of each rank, so that ranks on one node are consecutive.

    Ray numbers bundles without regard to nodes. With ranks that alternate between nodes, the neighbours of a mesh axis
    would exchange everything over the network.
    """
    nodes: dict[int, str] = placement_group_table(placement)["bundles_to_node_id"]
    first = {node: min(index for index, other in nodes.items() if other == node) for node in nodes.values()}
    ordered = sorted(nodes, key=lambda index: (first[nodes[index]], index))
    each = size // len(ordered)
    return [index for index in ordered for _ in range(each)]


def _rank_variables(seats: Sequence[Seat]) -> list[dict[str, str]]:
    """Rank variables of each rank, from where each process runs; nodes are numbered as ranks first meet them."""
    nodes = list(dict.fromkeys(seat.node_id for seat in seats))
    local: dict[str, list[int]] = {node: [] for node in nodes}
    for rank, seat in enumerate(seats):
        local[seat.node_id].append(rank)
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(seats)),
            "LOCAL_RANK": str(local[seat.node_id].index(rank)),
            "LOCAL_WORLD_SIZE": str(len(local[seat.node_id])),
            "NODE_RANK": str(nodes.index(seat.node_id)),
            "MASTER_ADDR": seats[0].address,
            "MASTER_PORT": str(seats[0].store_port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        for rank, seat in enumerate(seats)
    ]


def _gone(actors: Sequence[Any], deadline: float) -> bool:
    """Wait until no actor answers any more: a call to a dead actor fails at once, one to a dying actor may not."""
    alive = list(actors)
    while alive:
        probes = {actor.take_seat.remote(False): actor for actor in alive}
        done, late = ray.wait(list(probes), num_returns=len(probes), timeout=max(0.0, deadline - time.monotonic()))
        alive = [probes[ref] for ref in done if not _is_dead(ref)]
        if late or (alive and time.monotonic() > deadline):
            return False
    return True


def _is_dead(ref: Any) -> bool:
    try:
        ray.get(ref)
    except RayActorError:
        return True
    return False


def _removed(placement: PlacementGroup | None, deadline: float) -> bool:
    while placement is not None:
        if placement_group_table(placement).get("state") == "REMOVED":
            break
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)  # Ray offers no event for this
    return True


def _amounts(resources: Mapping[str, float]) -> dict[str, float]:
    """Without Ray's own entries for nodes and placement groups."""
    return {name: amount for name, amount in resources.items() if ":" not in name and "_group_" not in name}

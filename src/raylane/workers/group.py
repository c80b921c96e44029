"""Worker groups: one Ray actor per rank in one placement group, called together along named axes.

A group owns its actors and placement group from construction to `shutdown`. `dispatch` plans the calls, `methods`
checks them, and this module sends them. Used by trainers and by users' drivers.

Calls do not wait: `call` sends and returns a `GroupFuture`, whose `results` waits.
"""

from __future__ import annotations

import functools
import logging
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import ray
import torch
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raylane import _ray
from raylane.core.deadline import Deadline
from raylane.core.process.environment import NICENESS_REMEDY
from raylane.core.process.finalizing import finalize_here
from raylane.errors import WorkerCallError, WorkerGroupError, WorkerLostError
from raylane.graph.values import references
from raylane.transport.api import put
from raylane.workers.batch import BatchDict
from raylane.workers.dispatch import DispatchPlan, WorkerCall, check_nesting, plan_call, plan_ranks, take
from raylane.workers.future import Failures, GroupFuture, PendingCalls, RefCalls
from raylane.workers.host import CONSTRUCT, REGROUP, Arguments, Seat, WorkerHost
from raylane.workers.methods import check_call, check_constructor, check_worker_class
from raylane.workers.options import WorkerOptions
from raylane.workers.places import Places, Share, rank_variables, release
from raylane.workers.sharding import NamedSharding
from raylane.workers.spares import Spares

_log = logging.getLogger(__name__)

_KILL_RESERVE_S = 5.0
"""Seconds of shutdown's time (at most half of it) that are reserved for killing the actors after a cleanup."""
ANSWER_S = 2.0
"""Seconds in which a living worker answers a call that does not wait."""
REGROUPS = 3
"""Attempts to form a group again while further workers die."""
STUCK_S = 5.0
"""Seconds after which workers that have not finished a failed call count as stuck, when the next call is sent."""

Path: TypeAlias = tuple[int, ...] | None
"""Index of a slice of nested arguments (`WorkerCall.path`)."""


class Dispatch(NamedTuple):
    """One call that was checked. Workers with the same path share one slice of the arguments."""

    label: str
    """Name of the call in messages, as ClassName.method."""
    method: str
    plan: DispatchPlan
    slices: Mapping[Path, Arguments]
    common: Mapping[str, Any]
    """Keyword arguments that are the same for all workers."""


class WorkerGroup:
    """A group of workers. The constructor starts the workers and waits until all are constructed.

    `worker_class` is a plain class; each worker is `worker_class(*init_args, **init_kwargs)` in its own process, with
    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT in the environment. The port
    is that of a store which rank 0's process already serves; `torch.distributed.init_process_group(backend)` joins the
    store (TORCHELASTIC_USE_AGENT_STORE). `sharding` holds the ranks 0..n-1 on named axes; a number n means one axis
    "worker". Needs an initialised Ray.

    Raises ValueError or TypeError for bad arguments, WorkerGroupError if the cluster cannot place the workers in time,
    WorkerCallError if a constructor raised, and WorkerLostError if a worker died. No actor or placement group remains
    after an error.
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
        self.worker_class = worker_class
        """Class of the workers: `inspect.signature(group.worker_class.method)` shows how to call a method."""
        self.sharding = NamedSharding.of(worker=sharding) if isinstance(sharding, int) else sharding
        if self.sharding.ranks != tuple(range(self.sharding.size)):
            raise ValueError(f"a group's ranks are 0 to {self.sharding.size - 1}, got {list(self.sharding.ranks)}")
        self._options = options or WorkerOptions()
        self._init = (tuple(init_args), dict(init_kwargs or {}))
        check_constructor(worker_class, *self._init)
        self._actors: list[Any] = []
        """Actor handles by rank; empty after `shutdown`."""
        self._env: list[dict[str, str]] = []
        """Environment variables of each worker, by rank."""
        self.node_ids: tuple[str, ...] = ()
        """Ray's ID of the node that each worker was placed on, by rank."""
        self._places: Places | None = None
        self._share: Share
        self._dropped: weakref.finalize[..., Any] | None = None
        """Finalizer that removes the placement group if this object is dropped without `shutdown`."""
        self._spares = Spares(self._options.spares)
        self._closed = False
        self._plans: dict[Any, DispatchPlan] = {}
        """Plans by the arguments from which they were made."""
        self._checked: set[tuple[Any, ...]] = set()
        """(method, number of positional arguments, names of the others) of calls that fit the worker class."""
        self._failures = Failures()
        """Failures that were read. Their number is the generation of calls (`host.Head`)."""
        self._under_way: list[GroupFuture] = []
        """Calls that had not ended when the last call was sent, also those whose futures the caller has dropped."""
        self._broken: str | None = None
        """Reason why no call may be sent before `recover`; None if there is none."""
        try:
            self._start(Deadline(self._options.start_timeout_s))
        except BaseException:
            # No reference to the group reaches the caller, so nobody else could shut down what was started.
            self.shutdown(timeout=10)
            raise

    @property
    def size(self) -> int:
        """Number of workers."""
        return self.sharding.size

    # Calls ----------------------------------------------------------------------------------------------------------

    def call(
        self,
        method: str,
        *args: Any,
        shard: Sequence[str] = (),
        replicate: Sequence[str] | None = None,
        one_result: Sequence[str] = (),
        ranks: Sequence[int] | None = None,
        call_free_axes: bool = False,
        common: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> GroupFuture:
        """Call a method of the workers, by default of all and with the same arguments. Does not wait for the call.

        All arguments are checked before anything is sent: ValueError, TypeError and AttributeError name the argument
        and the reason. A compiled group waits while its graph has no room for a further call.

        Args:
            method: Name of the method.
            *args: Its arguments; lists nested once for each axis of `shard`, in that order.
            shard: Axes of which each coordinate gets its own slice of the arguments.
            replicate: Axes along which all workers get the same slice; None means all that are not in `shard`. Of an
                axis in neither, a free one, only coordinate 0 is called.
            one_result: Axes along which the results are equal: only coordinate 0 returns. The results of the others
                never leave their processes.
            ranks: Workers to call instead; then there are no axes.
            call_free_axes: Call the other coordinates of free axes too, with None for each argument.
            common: Keyword arguments that are not nested. Also for names that are those of a parameter here.
            **kwargs: Further arguments of the method, like `args`.
        """
        if ranks is None:
            plan = self._plan(shard, replicate, one_result, call_free_axes)
        elif shard or replicate is not None or one_result or call_free_axes:
            raise ValueError(f"{method}: ranks={list(ranks)} name the workers, so there is no argument about axes")
        else:
            plan = plan_ranks(self.sharding, ranks)
        return self.send(method, plan, args, kwargs, common or {})

    def _plan(
        self,
        shard: Sequence[str],
        replicate: Sequence[str] | None,
        one_result: Sequence[str],
        call_free_axes: bool,
    ) -> DispatchPlan:
        """Return the plan for these axes, made once: a program repeats the same few calls."""
        how = (shard, replicate, one_result)
        if any(isinstance(axes, str) for axes in how):
            return plan_call(self.sharding, *how)  # raises TypeError: a string is no list of axes
        key = (*(None if axes is None else tuple(axes) for axes in how), call_free_axes)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = plan_call(self.sharding, *how, call_free_axes)
        return plan

    def send(
        self,
        method: str,
        plan: DispatchPlan,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        common: Mapping[str, Any],
    ) -> GroupFuture:
        """Send a call to the workers of a plan of one's own, after the checks of `call`."""
        if self._closed:
            raise WorkerGroupError(f"{self!r}: {method!r} cannot be called after shutdown. Start a new group")
        both = sorted(set(kwargs) & set(common))
        if both:
            raise TypeError(f"{method}: {both} are given both for each worker and in common. Pass each argument once")
        form = (method, len(args), *kwargs, *common)
        if form not in self._checked:  # inspecting a signature takes longer than sending a call through a graph
            check_call(self.worker_class, method, len(args), (*kwargs, *common))
            self._checked.add(form)
        for name, value in (*((f"argument {i}", value) for i, value in enumerate(args)), *kwargs.items()):
            check_nesting(f"{self.worker_class.__name__}.{method}: {name}", value, plan.nesting)
        if self._broken is not None or not self._actors:
            reason = self._broken or "its workers could not be started again"
            raise WorkerGroupError(f"{self!r}: {method!r} was not sent: {reason}. Call recover() or shutdown()")
        self._check_not_stuck(method, plan)
        # Workers with the same path share one slice, so that its tensors travel only once.
        slices = {
            path: (tuple(take(arg, path) for arg in args), {name: take(value, path) for name, value in kwargs.items()})
            for path in dict.fromkeys(call.path for call in plan.calls)
        }
        return self._future(Dispatch(f"{self.worker_class.__name__}.{method}", method, plan, slices, common))

    def _check_not_stuck(self, method: str, plan: DispatchPlan) -> None:
        """Raise WorkerGroupError if a worker of the plan is still in a call that was sent before a failure was read.

        It probably waits for the worker that failed in a collective, so a new call would wait behind it forever.
        """
        self._under_way = [future for future in self._under_way if not future.done()]
        deadline = Deadline(STUCK_S)
        for future in [call for call in self._under_way if call.generation < self._failures.count]:
            while late := sorted(set(future.late_ranks()).intersection(plan.called_ranks)):
                if deadline.left_s() == 0:
                    raise WorkerGroupError(
                        f"{self!r}: {method} was not sent: ranks {late} are still in {future.label}, {STUCK_S:g} s "
                        f"after {self._failures.last} failed. They probably wait for another rank in a "
                        "collective. Call recover(), or shutdown()",
                        ranks=late,
                    )
                time.sleep(0.01)  # there is no event for several kinds of futures

    def _future(self, dispatch: Dispatch) -> GroupFuture:
        """Send a call that was checked, and return its future."""
        calls = self._deliver(dispatch)
        # Not the group itself: one that is dropped has to be collected at once.
        free = functools.partial(_free, list(self._actors), self._failures) if self._runs_beside_ray else None
        future = GroupFuture(dispatch.label, dispatch.plan, calls, self._failures, self._failures.count, free)
        self._under_way.append(future)
        return future

    def _deliver(self, dispatch: Dispatch) -> PendingCalls:
        """Send a call to the workers of its plan by plain Ray calls."""
        label, plan = dispatch.label, dispatch.plan
        head = (self._failures.count, dispatch.method)
        put_slices = {path: _put_arrays(values_of_path) for path, values_of_path in dispatch.slices.items()}
        shared = _put_arrays(dict(dispatch.common))
        if len(put_slices) > 1:
            # Try to pickle all slices first: otherwise a bad one could be found after others were sent, and the
            # workers that were called would wait for the others in a collective.
            with open(os.devnull, "wb") as nowhere:
                for values_of_path in put_slices.values():
                    try:
                        _TrialPickler(nowhere, protocol=5).dump(values_of_path)
                    except Exception as error:
                        raise unpicklable(label, error) from error
        refs: list[Any] = []
        try:
            for call in plan.calls:
                sent = self._actors[call.rank].call.remote(head, call.returns, put_slices[call.path], shared)
                refs.append(sent)
        except BaseException as error:
            # Ctrl-C may come between a send and its ref, so it counts as sent.
            if refs or not isinstance(error, Exception):
                self._broken = f"{label} was interrupted while it was sent, so some workers have it and others do not"
            raise
        return RefCalls(refs)

    # Life -----------------------------------------------------------------------------------------------------------

    def _start(self, deadline: Deadline) -> None:
        if self._places is None:
            self._places, self._share = self._take_places(deadline)
            self._dropped = finalize_here(self, release, self._places, self._share)
            self._dropped.atexit = False  # Ray ends the placement group with the driver
        places = self._places
        # Create all actors before waiting for any of them, so that their processes start in parallel.
        for rank in range(self.size):
            self._actors.append(self._new_actor(rank))
        located = self._take_seats(deadline)
        order = places.settle(located, named=bool(self._options.name_prefix))  # a name has the rank in it
        if order != list(range(self.size)):
            self._actors = [self._actors[index] for index in order]
            located = self._take_seats(deadline)
        _warn_of_niceness(max(seat.niceness for seat in located))
        self._seat(located)
        self._first_results(self._construct(range(self.size)), deadline)
        self._spares.fill(self._new_spare)

    def _new_actor(self, rank: int) -> Any:
        """Create the actor of a rank in its place. Does not wait for its process."""
        return self._host_in(rank).remote(rank, self.worker_class.__name__)

    def _new_spare(self, number: int) -> Any:
        return self._host_in(number % self.size, num_cpus=0, resources=None).remote(-1, self.worker_class.__name__)

    def _host_in(self, rank: int, **options: Any) -> Any:
        """Return the actor class for the place of a rank."""
        assert self._places is not None
        bundle = self._places.indices[rank]
        seat = PlacementGroupSchedulingStrategy(self._places.placement, placement_group_bundle_index=bundle)
        return ray.remote(WorkerHost).options(scheduling_strategy=seat, **self._options.remote_options(rank) | options)

    def _seat(self, located: Sequence[Seat]) -> None:
        """Note where the workers are."""
        assert self._places is not None
        self.node_ids = tuple(seat.node_id for seat in located)
        variables = self._places.variables(self._share)
        self._env = [ranks | own for ranks, own in zip(rank_variables(located), variables, strict=True)]

    def _take_places(self, deadline: Deadline) -> tuple[Places, Share]:
        other = self._options.colocate
        if other is None:
            places = Places(self._options, self.size, deadline)
            return places, places.first_share
        if not isinstance(other, WorkerGroup):
            raise TypeError(f"colocate must be a WorkerGroup, got {type(other).__name__}")
        if other._places is None:
            raise WorkerGroupError(f"colocate: {other!r} has no places any more. Start it first")
        return other._places, other._places.join(self._options.needs(), self.size)

    def _take_seats(self, deadline: Deadline, *, again: bool = False) -> list[Seat]:
        seats = [actor.take_seat.remote(rank, again=again) for rank, actor in enumerate(self._actors)]
        label = f"{self.worker_class.__name__}.starting"
        starting = GroupFuture(label, plan_call(self.sharding), RefCalls(seats), self._failures)
        return self._first_results(starting, deadline)

    def _construct(self, ranks: Sequence[int], method: str = CONSTRUCT) -> GroupFuture:
        """Construct the workers of these ranks, each with its own environment variables; or form the group again."""
        # Pickled once for all ranks, and as Ray does it: classes of scripts and of modules registered by value travel.
        packed, held = references.pack((self.worker_class, *self._init))
        if held:  # by a plain call in any group: Ray counts the references of its own calls alone
            with suppress(RayActorError, ray.exceptions.GetTimeoutError):  # the call below reports the reason
                sent = [self._actors[rank].hold.remote(held) for rank in ranks]
                ray.get(sent, timeout=self._options.start_timeout_s)
        plan = DispatchPlan(tuple(WorkerCall(rank, (rank,), returns=True) for rank in ranks), ())
        slices: dict[Path, Arguments] = {(rank,): ((), {"env": self._env[rank]}) for rank in plan.called_ranks}
        label = f"{self.worker_class.__name__}.{method}"
        return self._future(Dispatch(label, method, plan, slices, {"packed": packed}))

    @property
    def _runs_beside_ray(self) -> bool:
        """True if methods do not keep Ray's thread of a worker from other calls."""
        return False

    def _first_results(self, future: GroupFuture, deadline: Deadline) -> list[Any]:
        """Wait for one startup call of every rank; the error of a timeout names start_timeout_s."""
        for wait_s in deadline.rounds(lambda: f"{future.label}: ranks {future.late_ranks()} are not ready"):
            try:
                return future.results(wait_s)
            except WorkerCallError as error:
                if "timeout_s" not in error.fields:
                    raise
        late, limit = future.late_ranks(), self._options.start_timeout_s
        raise WorkerCallError(
            f"{future.label}: ranks {late} are not ready {limit} s after the start. Check the logs of their processes, "
            "or raise start_timeout_s",
            ranks=late,
            timeout_s=limit,
        )

    def rebuild_worker(self, rank: int, timeout: float | None = None) -> None:
        """Construct the worker of a rank again after Ray restarted its process (`max_restarts`), and wait for it.

        The state of the worker is lost, and so is its membership in a process group of torch.distributed.
        """
        self.sharding.get_index(rank)
        if self._closed:
            raise WorkerGroupError(f"{self!r}: a worker cannot be rebuilt after shutdown. Start a new group")
        self._failures.count += 1  # what was sent before must not run in the workers that stayed alive
        self._construct([rank]).results(timeout)

    def recover(self) -> tuple[int, ...]:
        """Start the group again after a worker died or is stuck; wait until it is ready. Return the ranks that are new.

        If the worker class has a method `on_regroup(rank, world)`, only processes that have ended, or do not leave
        their method within 5 s, are replaced. The other workers keep their state: their process groups are destroyed,
        and `on_regroup` makes new ones, while the constructor does that in the new workers. If either raises, or
        without the method, all processes and workers are new, and the placement group too unless groups share it
        (`colocate`).

        Futures of earlier calls raise WorkerLostError. Raises the errors of the constructor; then no worker is left,
        and you may call `recover` again.
        """
        if self._closed:
            raise WorkerGroupError(f"{self!r}: recover cannot be called after shutdown. Start a new group")
        new = self._regrouped() if hasattr(self.worker_class, REGROUP) and self._actors else None
        if new is not None:
            return new
        shared = self._options.colocate is not None or (self._places is not None and self._places.is_shared)
        self._end_processes(time.monotonic() + _KILL_RESERVE_S, keep_places=shared)
        self._failures, self._under_way, self._broken = Failures(), [], None
        try:
            self._start(Deadline(self._options.start_timeout_s))
        except BaseException:
            # No worker is left, and `recover` may be called again: the group itself stays open.
            self._end_processes(time.monotonic() + _KILL_RESERVE_S)
            raise
        return tuple(range(self.size))

    def _regrouped(self) -> tuple[int, ...] | None:
        """Form the group again around the workers that live; return the new ranks, None if that fails."""
        deadline, new = Deadline(self._options.start_timeout_s), set[int]()
        for _ in range(REGROUPS):
            try:
                return tuple(sorted(new)) if self._regroup(deadline, new) else None
            except WorkerLostError as error:  # another one has died meanwhile
                cause: Exception = error
            except (WorkerGroupError, RayError, ValueError) as error:  # ValueError: Ray has not let go of a name yet
                cause = error
                break
        text = "%r: the group could not be formed again, so all its workers are new: %s"
        _log.warning(text, self, str(cause))
        return None

    def _regroup(self, deadline: Deadline, new: set[int]) -> bool:
        """Replace the ranks that do not answer, and form the group again; add to `new`. False if none answers."""
        self._failures.is_past = True
        self._failures = Failures(self._failures.count + 1)
        freed = [actor.free.remote(self._failures.count, STUCK_S) for actor in self._actors]
        ready = Deadline(STUCK_S + ANSWER_S)
        lost = [rank for rank, ref in enumerate(freed) if not _is_true(ref, ready)]
        if len(lost) == self.size:
            return False
        new.update(lost)
        gone = [self._actors[rank] for rank in lost]
        for actor in gone:
            ray.kill(actor)
        self._forget_calls()  # after the kills, which end the waits of other threads for these ranks
        if not _wait_dead(gone, time.monotonic() + _KILL_RESERVE_S):
            raise WorkerGroupError(f"{self!r}: ranks {lost} have not ended")
        for rank in lost:
            self._actors[rank] = self._spares.take(self.node_ids[rank]) or self._new_actor(rank)
        self._seat(self._take_seats(deadline, again=True))
        are_new = self._first_results(self._construct(range(self.size), REGROUP), deadline)
        new.update(rank for rank, is_new in enumerate(are_new) if is_new)  # also those that Ray has restarted
        self._spares.fill(self._new_spare)
        return True

    def _forget_calls(self) -> None:
        """Forget the calls that were sent: their workers have left them, or are lost."""
        self._under_way, self._broken = [], None

    def shutdown(self, timeout: float = 30.0, cleanup_method: str | None = None) -> bool:
        """End all workers, and remove the placement group unless other groups use it; wait about `timeout` seconds.

        `cleanup_method` is called on every worker first. An error or timeout of this method is logged, and the workers
        are killed all the same. Returns True if everything succeeded. A second call does nothing and returns True.
        """
        if self._closed:
            return True
        deadline = time.monotonic() + timeout
        clean = True
        if cleanup_method is not None and self._actors and ray.is_initialized():
            reserve_s = min(_KILL_RESERVE_S, timeout / 2)
            self._failures.count += 1  # a rank whose failure nobody has read cleans up too
            try:
                check_call(self.worker_class, cleanup_method, 0, ())
                plan = plan_call(self.sharding)
                label = f"{self.worker_class.__name__}.{cleanup_method}"
                future = self._future(Dispatch(label, cleanup_method, plan, {(): ((), {})}, {}))
                future.results(max(0.0, deadline - time.monotonic() - reserve_s))
            except (WorkerGroupError, AttributeError, TypeError) as error:
                _log.warning("%r: cleanup before shutdown failed: %s", self, error)
                clean = False
        self._closed = True
        self._init = ((), {})  # a closed group keeps no actor alive that was an argument
        return self._end_processes(deadline) and clean

    def _end_processes(self, deadline: float, *, keep_places: bool = False) -> bool:
        """Kill all workers and leave their places. Return False if they have not ended by the deadline."""
        actors, self._actors = [*self._actors, *self._spares.end()], []
        places = None
        if not keep_places:
            places, self._places = self._places, None
            if self._dropped is not None:
                self._dropped.detach()
                self._dropped = None
        self._under_way = []  # the calls hold graphs, and with them memory
        if not ray.is_initialized():  # the actors ended with the Ray session
            return True
        # Kill all actors before waiting for any of them: dying takes time.
        for actor in actors:
            ray.kill(actor)
        placement = None if places is None else places.leave(self._share)
        all_dead = _wait_dead(actors, deadline)
        # Wait for the placement group even if an actor is late.
        while placement is not None and placement_group_table(placement).get("state") != "REMOVED":
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)  # Ray has no event for this
        return all_dead

    if not TYPE_CHECKING:  # mypy would take every name for an attribute

        def __getattr__(self, name: str) -> Any:
            hint = ""
            if name.startswith(("run_all_workers_", "run_single_worker_", "get_all_worker_")):
                hint = ". Use call(method, ...), or a group of raylane.nemo.groups, which has the names of NeMo-RL"
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        axes = " x ".join(f"{name}={size}" for name, size in self.sharding.shape.items())
        return (
            f"{type(self).__name__}({self.worker_class.__name__}, {axes}, {'shut down' if self._closed else 'running'})"
        )


def unpicklable(label: str, error: Exception) -> TypeError:
    """Return the error for arguments of which one cannot be pickled."""
    return TypeError(f"{label}: an argument cannot be pickled, so nothing was sent: {error}")


class _TrialPickler(_ray.CloudPickler):  # type: ignore[misc]  # untyped base
    """A pickler that only tests whether a value can be pickled; it skips ObjectRefs and actor handles.

    Ray never frees an object or actor whose reference was pickled outside of Ray's own serialisation.
    """

    def persistent_id(self, value: Any) -> str | None:
        return "" if references.is_counted(value) else None


def _free(actors: Sequence[Any], failures: Failures) -> None:
    """End the collectives of these workers: one that died can join no more. Does not wait."""
    for actor in () if failures.is_past else actors:
        actor.free.remote(failures.count, 0.0)


def _is_true(ref: Any, deadline: Deadline) -> bool:
    """Return True if a call has answered so; False if it has failed, or does not answer in time."""
    try:
        return bool(ray.get(ref, timeout=deadline.left_s()))
    except RayError:  # also of the call itself, as of NCCL's abort
        return False


def _put_arrays(value: Any) -> Any:
    """Return an ObjectRef to a value with arrays, which is put once for all its workers; a plain value as it is."""
    return put(value) if _carries_arrays(value) else value


def _carries_arrays(value: Any) -> bool:
    """Return True if a value is, or contains in plain containers, a tensor or an array."""
    if isinstance(value, (torch.Tensor, np.ndarray, BatchDict)):
        return True
    if isinstance(value, Mapping):
        return any(_carries_arrays(item) for item in value.values())
    return isinstance(value, (list, tuple)) and any(_carries_arrays(item) for item in value)


@functools.cache  # once in a process
def _warn_of_niceness(niceness: int) -> None:
    if niceness > 0:
        _log.warning(
            "the workers run at niceness %d, so other programs on the same cores go first and calls may take ten times "
            "as long. Where cores are shared, %s",
            niceness,
            NICENESS_REMEDY,
        )


def _wait_dead(actors: Sequence[Any], deadline: float) -> bool:
    """Wait until all actors are dead. Returns False if the deadline passed first."""
    # A call to a dead actor fails at once, while a dying actor may still answer: repeat the calls until all fail.
    alive = list(actors)
    while alive:
        probes = {actor.__ray_ready__.remote(): actor for actor in alive}
        done, late = ray.wait(list(probes), num_returns=len(probes), timeout=max(0.0, deadline - time.monotonic()))
        alive = []
        for ref in done:
            try:
                ray.get(ref)
            except RayActorError:
                continue
            alive.append(probes[ref])
        if late or (alive and time.monotonic() > deadline):
            return False
    return True

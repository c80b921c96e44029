"""Worker groups whose calls travel through compiled graphs instead of plain Ray calls.

Every call of a group has a dispatch plan, and each plan gets one graph, compiled on first use and kept:

    driver --(generation, method, arguments)--> all ranks     the plan has no slices: one message for each host
    driver --(generation, method, common)-----> all ranks     the plan has slices: the common part as above,
           --slice i--------------------------> its ranks     and each slice to its ranks alone
    rank   --result, or only the end of the call--> driver    only ranks that return send a value

The name of the method is part of the message, so one graph serves all methods that are called in the same way. Methods
run on the graph thread of the actor, the constructor included. Ray's own thread runs none of them, so no two methods of
a worker overlap. Before a call of another plan is sent, the calls under way are awaited: graphs share the workers, and
all of them must run the calls in one order.
"""

from __future__ import annotations

import logging
import math
import pickle
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import ray
import torch
from ray.exceptions import RayError

from raylane import _ray
from raylane.core.deadline import Deadline
from raylane.errors import (
    GraphActorDiedError,
    GraphClosedError,
    GraphError,
    GraphPlanError,
    GraphTimeoutError,
    GraphValueError,
    WorkerCallError,
    WorkerGroupError,
    WorkerLostError,
)
from raylane.graph.api import compile as compile_graph
from raylane.graph.driver.graph import CompiledGraph
from raylane.graph.driver.result import GraphResult
from raylane.graph.nodes import InputNode, MultiOutputNode, bind, first
from raylane.graph.values import references
from raylane.workers.batch import BatchDict
from raylane.workers.call_states import CALLING_TRANSITIONS, Calling, CallingEvent
from raylane.workers.dispatch import DispatchPlan
from raylane.workers.future import PendingCalls, lost, translated
from raylane.workers.group import STUCK_S, Dispatch, Path, WorkerGroup, unpicklable
from raylane.workers.host import Arguments, Head
from raylane.workers.options import WorkerOptions
from raylane.workers.sharding import NamedSharding

_log = logging.getLogger(__name__)

DEFAULT_INFLIGHT = 4
"""Number of calls that one graph holds at a time unless the caller chooses another."""
_CAUSE_GRACE_S, _CAUSE_GRACE_OVER_HOSTS_S = 0.5, 2.0
"""Seconds to wait, after a method raised, for the news of a dead worker, which is then reported as the cause.

A worker that dies closes its connections to peers a moment before its process has ended, so a peer's "connection
closed" may arrive first. The end of a process on another host is known when connecting to it again has failed.
"""

Mode = Literal["off", "preferred", "required"]


class CallGraph:
    """Compiled graph of one dispatch plan."""

    def __init__(
        self, plan: DispatchPlan, actors: Sequence[Any], inflight: int, timeout_s: float | None = None
    ) -> None:
        """Compile the graph; waits for the actors, as `raylane.compile`, whose errors it raises."""
        self.paths = tuple(dict.fromkeys(call.path for call in plan.calls))
        self.ranks = plan.called_ranks
        """Rank of each member of the graph, from member 1 on."""
        nodes = {}
        with InputNode() as x:
            for call in plan.calls:
                actor = actors[call.rank]
                inputs = [x] if len(self.paths) == 1 else [x[0], x[1 + self.paths.index(call.path)]]
                nodes[call] = bind(actor.run if call.returns else actor.run_quietly, *inputs)
        returning = [node for call, node in nodes.items() if call.returns]
        silent = [node for call, node in nodes.items() if not call.returns]
        # `first` makes the calls of silent ranks count: their errors fail the output, their values stay where they are.
        outputs = [first([returning[0], *silent]), *returning[1:]]
        self.graph: CompiledGraph = compile_graph(MultiOutputNode(outputs), max_inflight=inflight, timeout=timeout_s)

    def execute(self, head: Head, slices: Mapping[Path, Arguments], common: Mapping[str, Any]) -> GraphResult:
        """Start one call. Raises GraphValueError if an argument cannot be pickled; then nothing was sent."""
        if len(self.paths) > 1:
            return self.graph.execute((head, common), *(slices[path] for path in self.paths))
        return self.graph.execute(((head, common), slices[self.paths[0]]))


class GraphCalls:
    """Calls under way in a graph."""

    def __init__(self, graph: CallGraph, result: GraphResult, rank_of_actor: Mapping[str, int]) -> None:
        self._graph = graph
        self._result = result
        self._rank_of_actor = rank_of_actor
        self._error: WorkerGroupError | None = None
        """Error that was raised when the result was read, so that it is raised again later."""

    def done(self) -> bool:
        """Return True if every called worker has answered or failed. Does not wait."""
        return self._graph.graph.ended(self._result)

    def late_ranks(self, plan: DispatchPlan) -> list[int]:
        """Return the ranks that have not answered. Does not wait."""
        return [self._graph.ranks[member - 1] for member in self._graph.graph.late_members(self._result)]

    def values(self, label: str, plan: DispatchPlan, deadline: Deadline) -> list[Any] | None:
        """Wait for all called workers, and return the results of the returning ones by rank; None after the deadline.

        WorkerLostError if a worker died, WorkerCallError if a method raised.
        """
        if self._error is not None:
            raise self._error
        remaining_s = deadline.left_s()
        try:
            values: list[Any] = self._result.get(math.inf if remaining_s is None else remaining_s)
            return values
        except RayError as error:
            # An error of this wait, not one of a method that waits for a graph of its own.
            raised = self._result.failed_call
            if raised is None and isinstance(error, GraphTimeoutError) and self._graph.graph.ended_by is None:
                return None
            self._error = self._translated(label, error, raised)
            raise self._error from error

    def _translated(self, label: str, error: RayError, raised: str | None) -> WorkerGroupError:
        """Return the error to raise; `raised` is the label of the task whose method raised, if one did."""
        graph = self._graph.graph
        if raised is not None:
            # The worker may have raised because another one has died.
            graph.drain(_CAUSE_GRACE_OVER_HOSTS_S if graph.spans_hosts else _CAUSE_GRACE_S)
        ended = graph.ended_by
        # A method that raised stays the reason after the group has closed its graph.
        if ended is not None and (raised is None or not isinstance(ended, GraphClosedError)):
            return lost_worker(label, ended, self._rank_of_actor)
        if raised is None:
            return WorkerCallError(f"{label} has no result: {error}", call=label)
        task = graph.plan.tasks[graph.plan.labels.index(raised)]
        return translated(error, self._graph.ranks[task.member - 1], label)


class FailedCalls:
    """A call that could not be sent because its graph has ended."""

    def __init__(self, error: WorkerGroupError) -> None:
        self._error = error

    def done(self) -> bool:
        """Return True: the call has failed."""
        return True

    def late_ranks(self, plan: DispatchPlan) -> list[int]:
        """Return no rank: none was called."""
        return []

    def values(self, label: str, plan: DispatchPlan, deadline: Deadline) -> list[Any] | None:
        """Raise the error."""
        raise self._error


def lost_worker(label: str, error: Exception, rank_of_actor: Mapping[str, int]) -> WorkerLostError:
    """Return the error for a graph that has ended with one of its actors, or with the connection to it."""
    if isinstance(error, GraphClosedError):
        reason = f"{label} has no result: its worker was ended by shutdown() or recover(), or left the graph: {error}."
        return WorkerLostError(reason, call=label, reason=reason)
    rank = rank_of_actor.get(getattr(error, "fields", {}).get("actor", ""))
    # What a user of graphs should do next is not what a user of groups should do.
    why = "its process has ended" if isinstance(error, GraphActorDiedError) else str(error).splitlines()[0]
    return lost(rank, label, why)


class CompiledWorkerGroup(WorkerGroup):
    """A worker group whose calls run through compiled graphs; same methods, same results and errors as `WorkerGroup`.

    Differences: a call costs microseconds instead of about a millisecond for each worker. All methods of a worker run
    on one thread, the graph thread of its process. A call waits while `inflight` calls are under way in its
    graph, and while calls of another dispatch plan are under way. ObjectRefs among the arguments are fetched by the
    driver. Tensors of replicated arguments are shared memory of the workers of a host: do not write to them.

    `mode`: "required" raises WorkerGroupError if graphs cannot be used; "preferred" then logs one warning and uses
    plain Ray calls, with the reason in `fallback_reason`; "off" uses plain Ray calls.
    """

    def __init__(
        self,
        worker_class: type,
        sharding: NamedSharding | int,
        *,
        init_args: Sequence[Any] = (),
        init_kwargs: Mapping[str, Any] | None = None,
        options: WorkerOptions | None = None,
        mode: Mode = "required",
        inflight: int = DEFAULT_INFLIGHT,
    ) -> None:
        if mode not in ("off", "preferred", "required"):
            raise ValueError(f"mode must be 'off', 'preferred' or 'required', got {mode!r}")
        if options is not None and options.max_concurrency > 1 and mode != "off":
            raise ValueError(
                f"max_concurrency={options.max_concurrency}: calls of a compiled group run one after the other on one "
                "thread. Use max_concurrency=1, or a WorkerGroup"
            )
        self.mode: Mode = mode
        self.inflight = inflight
        self.fallback_reason: str | None = None
        """Reason why this group uses plain Ray calls although graphs were preferred; None if it does not."""
        self._graphs: dict[DispatchPlan, CallGraph] = {}
        self._rank_of_actor: dict[str, int] = {}
        """Rank by Ray's actor id."""
        self._ended: list[CallGraph] = []
        """Graphs that have ended, until the next one is compiled."""
        self._unsettled: set[int] = set()
        """Ranks that may still be in a method of a graph that has ended."""
        self._calling = Calling.PLAIN if mode == "off" else Calling.UNTRIED
        """Way in which calls are sent; guarded by `_lock`."""
        self._lock = threading.RLock()  # guards the graphs: calls of several threads are sent one after the other
        self._send_within = Deadline(None)
        """Limit of the wait for earlier calls when a call is sent."""
        super().__init__(worker_class, sharding, init_args=init_args, init_kwargs=init_kwargs, options=options)

    @property
    def compiled(self) -> bool:
        """True if calls run through compiled graphs."""
        return self._calling is not Calling.PLAIN

    def _enter(self, event: CallingEvent) -> None:
        self._calling = CALLING_TRANSITIONS[self._calling, event]

    def _deliver(self, dispatch: Dispatch) -> PendingCalls:
        if not self.compiled:
            return super()._deliver(dispatch)
        label, plan = dispatch.label, dispatch.plan
        limit = self._send_within.left_s()
        if not self._lock.acquire(timeout=-1 if limit is None else limit):
            raise WorkerGroupError(f"{self!r}: {label} was not sent: another thread is sending a call")
        try:
            if self._calling is Calling.PLAIN:  # another thread has given up graphs meanwhile
                return super()._deliver(dispatch)
            if not self._actors:
                raise WorkerGroupError(f"{self!r}: {label} was not sent: the group has ended its workers meanwhile")
            if dead := self._settle(label, plan):
                return FailedCalls(dead)
            graph = self._graphs.get(plan) or self._compile(plan)
            self._wait_for_turn(label, graph)
            arguments = {
                path: (tuple(map(_value, args)), {name: _value(value) for name, value in kwargs.items()})
                for path, (args, kwargs) in dispatch.slices.items()
            }
            head = (self._failures.count, dispatch.method)
            common = {name: _value(value) for name, value in dispatch.common.items()}
            result = graph.execute(head, arguments, common)
            return GraphCalls(graph, result, self._rank_of_actor)
        except GraphValueError as error:
            raise unpicklable(label, error) from error
        except GraphError as error:
            may_fall_back = self._calling is Calling.UNTRIED and self.mode == "preferred"
            if may_fall_back and not isinstance(error, GraphActorDiedError):
                self._enter(CallingEvent.FALL_BACK)
                self.fallback_reason = f"{type(error).__name__}: {error}"
                _log.warning(
                    "%r: compiled graphs cannot be used, so calls are plain Ray calls, about a millisecond for each "
                    "worker. Reason: %s",
                    self,
                    self.fallback_reason,
                )
                return super()._deliver(dispatch)
            if isinstance(error, GraphPlanError):
                raise WorkerGroupError(f"{self!r}: no graph could be compiled for {label}: {error}") from error
            alive = all(known.graph.ended_by is None for known in self._graphs.values())
            if isinstance(error, GraphTimeoutError) and alive:
                raise WorkerGroupError(f"{self!r}: {label} was not sent: {error}") from error
            return FailedCalls(lost_worker(label, error, self._rank_of_actor))
        finally:
            self._lock.release()

    def _compile(self, plan: DispatchPlan) -> CallGraph:
        # Graphs are few: one for each way in which the program calls its workers.
        self._rank_of_actor = {_ray.actor_id_of(actor): rank for rank, actor in enumerate(self._actors)}
        graph = CallGraph(plan, self._actors, self.inflight, self._send_within.left_s())
        self._enter(CallingEvent.COMPILE)
        self._graphs[plan] = graph
        # After the new graph: the thread of a worker ends with the last graph of its process.
        ended, self._ended = self._ended, []
        for old in ended:
            old.graph.teardown(0.0)
        return graph

    def _settle(self, label: str, plan: DispatchPlan) -> WorkerLostError | None:
        """Put graphs that have ended aside, and wait until workers of the plan have ended the calls of such graphs.

        A graph ends with one of its workers, or by Ctrl-C during a call. Return the error if a worker of the plan has
        died; WorkerGroupError if one is still in its method after STUCK_S.
        """
        ended = [known for known, graph in self._graphs.items() if graph.graph.ended_by is not None]
        if ended:
            self._failures.count += 1  # calls from now on are of a generation that the workers accept
            self._failures.last = "a graph"
            for ended_plan in ended:
                self._unsettled.update(ended_plan.called_ranks)
                self._ended.append(self._graphs.pop(ended_plan))
            self._enter(CallingEvent.GRAPH_ENDED)
            # Workers refuse what waits in the rings. Ray's thread of each worker is free. Errors of dead workers are
            # raised by the calls that need them.
            for rank in self._unsettled:
                self._actors[rank].fence.remote(self._failures.count, 0.0)
        if self._calling is not Calling.UNSETTLED:
            return None
        ranks = sorted(self._unsettled.intersection(plan.called_ranks))
        fences = {rank: self._actors[rank].fence.remote(self._failures.count, STUCK_S) for rank in ranks}
        busy = []
        for rank, fence in fences.items():
            try:
                if not ray.get(fence, timeout=STUCK_S + _CAUSE_GRACE_OVER_HOSTS_S):
                    busy.append(rank)
            except ray.exceptions.GetTimeoutError:
                return lost(rank, label, "it does not answer")
            except ray.exceptions.RayActorError as error:
                return lost(rank, label, str(error).strip().splitlines()[0])
        if busy:
            raise WorkerGroupError(
                f"{self!r}: {label} was not sent: ranks {busy} are still in an earlier call, {STUCK_S:g} s after its "
                "graph has ended. They probably wait for another rank in a collective. Call recover() or "
                "shutdown()",
                ranks=busy,
            )
        self._unsettled.difference_update(ranks)
        if not self._unsettled:
            self._enter(CallingEvent.SETTLE)
        return None

    def _wait_for_turn(self, label: str, graph: CallGraph) -> None:
        """Wait until the calls under way in other graphs have ended, and until this graph has room for a call."""
        for other in self._graphs.values():
            allowed = 0 if other is not graph else self.inflight - 1
            # No limit while all is well: a call may take hours.
            if other.graph.drain(self._send_within.left_s(), remaining=allowed, stop_at_failure=True):
                continue
            limit = self._send_within.left_s()
            if not other.graph.drain(STUCK_S if limit is None else min(STUCK_S, limit), remaining=allowed):
                raise WorkerGroupError(
                    f"{self!r}: {label} was not sent: an earlier call has failed, or was not done in time, and other "
                    "workers are still in it. They probably wait in a collective. Call recover() or shutdown()"
                )

    def shutdown(self, timeout: float = 30.0, cleanup_method: str | None = None) -> bool:
        """End all workers, as `WorkerGroup.shutdown`."""
        self._send_within = Deadline(timeout / 2)
        return super().shutdown(timeout, cleanup_method)

    @property
    def _runs_beside_ray(self) -> bool:
        return self.compiled

    def _forget_calls(self) -> None:
        with self._lock:
            # Kept until the next one is compiled: with its last graph the thread of a worker would end.
            self._ended += self._graphs.values()
            self._graphs, self._unsettled = {}, set()
            self._enter(CallingEvent.RESTART)
            super()._forget_calls()

    def _end_processes(self, deadline: float, *, keep_places: bool = False) -> bool:
        # Before the lock: a thread that waits for its turn holds it, and wakes when its graph ends.
        for graph in [*self._graphs.values(), *self._ended]:
            graph.graph.teardown(0.0)
        with self._lock:
            self._graphs, self._ended, self._unsettled = {}, [], set()
            self._enter(CallingEvent.RESTART)
            return super()._end_processes(deadline, keep_places=keep_places)


class _PickledByValue:
    """Stand-in for a value, pickled as Ray pickles it; unpickling gives the value itself."""

    def __init__(self, value: Any) -> None:
        try:
            self._pickled = _ray.dumps(value, _refused)
        except references.ReferenceInside as inside:
            raise references.refused(value, inside.reference) from None
        except Exception as error:  # of any __reduce__
            raise GraphValueError(str(error)) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._pickled,)


def _refused(item: Any) -> None:
    """Refuse a reference, which Ray would not count; pickle everything else."""
    references.refuse(item)


def _value(argument: Any) -> Any:
    """Return an argument in the form in which it can travel in a graph."""
    # Graphs carry no ObjectRefs, and pickle functions and classes of importable modules by name. Ray fetches the one,
    # and respects ray.cloudpickle.register_pickle_by_value for the other.
    if isinstance(argument, ray.ObjectRef):
        return ray.get(argument)
    if _ray.has_modules_by_value() and not isinstance(argument, torch.Tensor | np.ndarray | BatchDict | int | str):
        return _PickledByValue(argument)
    return argument

"""Worker groups whose methods have the names and arguments of NeMo-RL's; each is a call of `WorkerGroup.call`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raylane.workers.compiled import CompiledWorkerGroup
from raylane.workers.dispatch import DispatchPlan, WorkerCall, axis_names, plan_call
from raylane.workers.future import GroupFuture
from raylane.workers.group import WorkerGroup


class NemoWorkerGroup(WorkerGroup):
    """A `WorkerGroup` with NeMo-RL's names. All methods return at once, and raise the errors of `WorkerGroup.call`."""

    def run_single_worker_single_data(self, method: str, worker_idx: int, *args: Any, **kwargs: Any) -> GroupFuture:
        """Call one rank. The future's results are a list with one item."""
        return self.call(method, *args, ranks=[worker_idx], **kwargs)

    def run_all_workers_single_data(
        self, method: str, *args: Any, run_rank_0_only_axes: Sequence[str] = (), **kwargs: Any
    ) -> GroupFuture:
        """Call every rank (only coordinate 0 on `run_rank_0_only_axes`) with the same arguments."""
        return self.call(method, *args, replicate=self._others(run_rank_0_only_axes), **kwargs)

    def run_all_workers_multiple_data(
        self,
        method: str,
        *args: Sequence[Any],
        run_rank_0_only_axes: Sequence[str] = (),
        common_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Sequence[Any],
    ) -> GroupFuture:
        """Do as `run_all_workers_single_data`, with lists of one entry per *called* worker (by rank) as arguments."""
        ranks = plan_call(self.sharding, replicate=self._others(run_rank_0_only_axes)).called_ranks
        calls = tuple(WorkerCall(rank, (i,), returns=True) for i, rank in enumerate(ranks))
        plan = DispatchPlan(calls, (("called workers", len(ranks)),))
        return self.send(method, plan, args, kwargs, common_kwargs or {})

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
        """Call workers with arguments that are lists nested once for each axis of `in_sharded_axes`, in that order.

        Of an axis in neither list only coordinate 0 is called, here also if both are empty.
        """
        return self.call(
            method,
            *args,
            shard=in_sharded_axes or (),
            replicate=replicate_on_axes or (),
            one_result=output_is_replicated or (),
            call_free_axes=make_dummy_calls_to_free_axes,
            common=common_kwargs,
            **kwargs,
        )

    def get_all_worker_results(self, future: GroupFuture, timeout_s: float | None = None) -> list[Any]:
        """Wait for a call and return the results by ascending rank; raises the errors of `GroupFuture.results`."""
        return future.results(timeout_s)

    def _others(self, axes: Sequence[str]) -> list[str]:
        """Return the axes that are not among these. Raises as `WorkerGroup.call` for a wrong one."""
        zero_axes = axis_names(axes)
        self.sharding.check_axes(zero_axes, "run_rank_0_only_axes")
        return [axis for axis in self.sharding.names if axis not in zero_axes]


class NemoCompiledWorkerGroup(NemoWorkerGroup, CompiledWorkerGroup):
    """A `CompiledWorkerGroup` with NeMo-RL's names."""

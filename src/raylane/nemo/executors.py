"""Executors over the data-parallel shards of a compiled group, under the names that NeMo-RL's pull request 1612 uses.

A *shard* is all workers with one coordinate on the data axis: together they hold one replica of the model. The
executors choose workers and arguments; the group sends the calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raylane.workers.compiled import CompiledWorkerGroup
from raylane.workers.dispatch import DispatchPlan, WorkerCall
from raylane.workers.future import GroupFuture


class CompiledGraphExecutor:
    """Calls of the workers of one data-parallel shard; the workers of other shards take no part.

    `axis` is the data axis of the group and `shard` a coordinate on it. ValueError for an unknown axis or coordinate.
    """

    def __init__(self, group: CompiledWorkerGroup, shard: int, axis: str = "data_parallel") -> None:
        self._group = group
        self.ranks = tuple(sorted(group.sharding.get_ranks_by_coord(**{axis: shard})))
        """Ranks of the workers of this shard, ascending."""
        self._plan = DispatchPlan(tuple(WorkerCall(rank, (), rank == self.ranks[0]) for rank in self.ranks), ())

    def execute(self, method: str, *args: Any, **kwargs: Any) -> GroupFuture:
        """Call every worker of the shard with the same arguments; the lowest rank returns its result.

        Does not wait for the call. Raises AttributeError and TypeError for a method or arguments that do not fit.
        """
        return self._group.send(method, self._plan, args, kwargs, {})


class MultiDPCompiledGraphExecutor:
    """Calls of all data-parallel shards in one graph, each shard with its own slice of the arguments.

    One execution runs all shards, so a failure in one shard fails the call for all of them.
    """

    def __init__(self, group: CompiledWorkerGroup, axis: str = "data_parallel") -> None:
        group.sharding.check_axes([axis], "axis")
        self._group = group
        self._axis = axis

    @property
    def shards(self) -> int:
        """Number of shards."""
        return self._group.sharding.get_axis_size(self._axis)

    def execute(
        self, method: str, *args: Sequence[Any], common_kwargs: Mapping[str, Any] | None = None, **kwargs: Sequence[Any]
    ) -> GroupFuture:
        """Call all workers with lists of one entry per shard; the first worker of each shard returns its result.

        Does not wait for the call. `common_kwargs` are the same for all. Raises ValueError and TypeError for lists of
        another length, and for a method or arguments that do not fit.
        """
        others = [name for name in self._group.sharding.names if name != self._axis]
        return self._group.call(
            method,
            *args,
            shard=[self._axis],
            one_result=others,
            common=common_kwargs,
            **kwargs,  # type: ignore[arg-type]  # mypy takes them for the named parameters
        )

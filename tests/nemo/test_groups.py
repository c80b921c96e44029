"""Groups and executors under NeMo-RL's names: which workers are called with what, and which results come back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray
import torch

from raylane.nemo.executors import CompiledGraphExecutor, MultiDPCompiledGraphExecutor
from raylane.nemo.groups import NemoCompiledWorkerGroup
from raylane.workers.batch import BatchDict
from raylane.workers.options import WorkerOptions
from raylane.workers.sharding import NamedSharding
from workers import seed_worker
from workers.seed_worker import SeedWorker

ray.cloudpickle.register_pickle_by_value(seed_worker)


@pytest.fixture(scope="module")
def group(ray_session: None) -> Iterator[NemoCompiledWorkerGroup]:
    sharding = NamedSharding.of(data_parallel=2, tensor_parallel=2)
    with NemoCompiledWorkerGroup(SeedWorker, sharding, options=WorkerOptions(num_cpus=0.1)) as group:
        yield group


def test_methods_have_the_arguments_of_nemo(group: NemoCompiledWorkerGroup) -> None:
    single = group.run_single_worker_single_data("work", 3, "single")
    assert (single.called_ranks, group.get_all_worker_results(single, 60)) == ((3,), [3])
    assert group.run_all_workers_single_data("work", "all").results(60) == [0, 1, 2, 3]
    first = group.run_all_workers_single_data("work", "first", run_rank_0_only_axes=["tensor_parallel"])
    assert first.results(60) == [0, 2]
    parts = BatchDict({"ids": torch.arange(4)}).shard(2)
    each = group.run_all_workers_multiple_data(
        "both", parts, run_rank_0_only_axes=["tensor_parallel"], common_kwargs={"scale": 10}, mask=["m0", "m1"]
    )
    assert (each.called_ranks, each.results(60)) == ((0, 2), [([0, 10], "m0"), ([20, 30], "m1")])
    sharded = {"in_sharded_axes": ["data_parallel"], "output_is_replicated": ["tensor_parallel"]}
    assert group.run_all_workers_sharded_data("rows", parts, **sharded).called_ranks == (0, 2)
    copies = group.run_all_workers_sharded_data("rows", parts, replicate_on_axes=["tensor_parallel"], **sharded)
    assert (copies.called_ranks, copies.results(60)) == ((0, 1, 2, 3), [[0, 1], [2, 3]])


def test_wrong_arguments_are_refused_before_anything_is_sent(group: NemoCompiledWorkerGroup) -> None:
    with pytest.raises(ValueError, match="expected 4 entries, one for each coordinate of 'called workers', found 8"):
        group.run_all_workers_multiple_data("work", list(range(8)))
    with pytest.raises(ValueError, match="run_rank_0_only_axes: no axis 'tp' here"):
        group.run_all_workers_multiple_data("work", ["x"], run_rank_0_only_axes=["tp"])
    with pytest.raises(TypeError, match=r"For one axis write \['data_parallel'\]"):
        group.run_all_workers_single_data("work", "x", run_rank_0_only_axes="data_parallel")
    with pytest.raises(ValueError, match="rank 4 is not in this layout"):
        group.run_single_worker_single_data("work", 4, "x")


def test_executors_run_one_shard_or_all(group: NemoCompiledWorkerGroup) -> None:
    """F3, F5: ranks were list positions, and each shard was a graph of its own."""
    shard = CompiledGraphExecutor(group, 1)
    future = shard.execute("work", "shard")
    assert (future.called_ranks, future.returning_ranks, future.results(60)) == ((2, 3), (2,), [2])
    every = MultiDPCompiledGraphExecutor(group)
    batches = BatchDict({"ids": torch.arange(8)}).shard(every.shards)
    future = every.execute("both", batches, mask=["m0", "m1"], common_kwargs={"scale": 2})
    assert future.returning_ranks == (0, 2)
    assert future.results(60) == [([0, 2, 4, 6], "m0"), ([8, 10, 12, 14], "m1")]
    with pytest.raises(ValueError, match="no axis 'data'"):
        CompiledGraphExecutor(group, 0, axis="data")
    with pytest.raises(ValueError, match="axis 'data_parallel' has coordinates 0 to 1, got 2"):
        CompiledGraphExecutor(group, 2)

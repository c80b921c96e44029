"""Order of the passes of a pipeline over edges."""

from __future__ import annotations

from itertools import product

import pytest

from raylane.errors import ConfigError
from raylane.training.config.policy import EDGE_SCHEDULES
from raylane.training.parallel.mesh import ParallelDims
from raylane.training.parallel.passes import Work, passes_of_step, worker_order
from raylane.workers.dispatch import DispatchPlan, WorkerCall
from sft import tiny_run

SIZES = [
    (schedule, workers, per_worker, rounds * workers)
    for schedule, workers, rounds in product(EDGE_SCHEDULES, (2, 3, 4), (1, 2, 3))
    for per_worker in ((2, 3) if schedule == "interleaved_1f1b" else (1,))
]


@pytest.mark.parametrize(("schedule", "workers", "per_worker", "micro_batches"), SIZES)
def test_every_pass_runs_once_and_forward_first(
    schedule: str, workers: int, per_worker: int, micro_batches: int
) -> None:
    for worker in range(workers):
        order = worker_order(schedule, worker, workers, per_worker, micro_batches)
        stages = [worker + i * workers for i in range(per_worker)]
        assert sorted(order) == sorted(Work(*one) for one in product((True, False), stages, range(micro_batches)))
        for work in order:
            if not work.forward:
                assert order.index(work._replace(forward=True)) < order.index(work)


@pytest.mark.parametrize(("schedule", "workers", "per_worker", "micro_batches"), SIZES)
def test_plans_of_all_sizes_end(schedule: str, workers: int, per_worker: int, micro_batches: int) -> None:
    """No order waits for itself, and every pass but those of the ends has the source that it needs."""
    dims = ParallelDims(pp=workers, dp_shard=2, tp=2)
    passes = passes_of_step(schedule, dims, per_worker, micro_batches)
    DispatchPlan(tuple(WorkerCall(rank, (), returns=True) for rank in range(dims.world)), (), passes)
    stages = workers * per_worker
    assert len(passes) == dims.world * (2 * per_worker * micro_batches + 1)
    for one in passes[: -dims.world]:
        own, micro_batch = one.args
        stage = dims.coordinates(one.rank)["pp"] + own * workers
        end = 0 if one.method == "forward_pass" else stages - 1
        assert (one.source is None) is (stage == end)
        if one.source is not None:
            other = passes[one.source]
            assert other.method == one.method
            assert other.args[1] == micro_batch
            place, there = dims.coordinates(one.rank), dims.coordinates(other.rank)
            assert {**place, "pp": 0} == {**there, "pp": 0}
            assert there["pp"] + other.args[0] * workers == stage + (-1 if one.method == "forward_pass" else 1)


def test_1f1b_keeps_no_more_micro_batches_than_stages() -> None:
    for worker in range(3):
        held = most = 0
        for work in worker_order("1f1b", worker, 3, 1, 8):
            held += 1 if work.forward else -1
            most = max(most, held)
        assert most == 3 - worker


def test_orders_are_those_of_the_literature() -> None:
    """1F1B of three micro-batches on two workers, as PipeDream-Flush draws it."""
    shown = [
        " ".join(f"{'F' if work.forward else 'B'}{work.micro_batch}" for work in worker_order("1f1b", worker, 2, 1, 3))
        for worker in (0, 1)
    ]
    assert shown == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy.compiled_graph.mode": "off"}, "needs compiled graphs, and policy.compiled_graph.mode=off"),
        (
            {"policy.dtensor_cfg.pipeline_schedule": "interleaved_zero_bubble"},
            "runs the schedules 1f1b, gpipe, interleaved_1f1b, not interleaved_zero_bubble",
        ),
    ],
)
def test_settings_that_edges_cannot_run_are_refused(tmp_path, changes: dict[str, str], message: str) -> None:
    layout = {"cluster.num_workers": 2, "policy.dtensor_cfg.pipeline_parallel_size": 2}
    with pytest.raises(ConfigError, match=message):
        tiny_run.config_of(tmp_path, {**layout, "policy.dtensor_cfg.pipeline_edges": "raylane", **changes})

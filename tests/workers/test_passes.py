"""Calls with passes: workers exchange values inside one call of a group, without the driver."""

from __future__ import annotations

import pytest
import ray

from raylane.errors import WorkerCallError, WorkerGroupError, WorkerLostError
from raylane.workers.compiled import CompiledWorkerGroup
from raylane.workers.dispatch import DispatchPlan, Pass, WorkerCall
from raylane.workers.group import WorkerGroup, WorkerOptions
from workers import worker_classes
from workers.worker_classes import Relay

ray.cloudpickle.register_pickle_by_value(worker_classes)

SMALL = WorkerOptions(num_cpus=0.5)
CALLS = tuple(WorkerCall(rank, (), returns=True) for rank in (0, 1))


@pytest.fixture(scope="module")
def group(ray_session):
    """Two workers, kept for all tests that leave them alive."""
    with CompiledWorkerGroup(Relay, 2, options=SMALL) as group:
        yield group


def run(group, *passes, value=1):
    """Call `begin` and these passes on all workers; return their last results."""
    future = group.call("begin", value, replicate=["worker"], passes=passes)
    return future.results(60)


@pytest.mark.claim("worker groups", "values go from worker to worker within a pass, without the driver")
def test_values_go_from_worker_to_worker(group):
    passes = [
        Pass(0, "add", (10,)),
        Pass(1, "add", (20,), source=0),
        Pass(0, "add", (30,), source=1),
        Pass(1, "add", (40,), source=2),
    ]
    assert run(group, *passes) == [63, 104]
    assert run(group, *passes, value=2) == [66, 108]  # the graph is used again


def test_passes_of_a_worker_run_in_their_order(group):
    passes = [Pass(rank, "add", (i,)) for i in range(20) for rank in (1, 0)]
    found = run(group, *passes, Pass(0, "end", ()), Pass(1, "end", ()))
    assert found == [["begin", *(f"add {i}" for i in range(20))]] * 2


def test_slices_reach_the_first_call(group):
    passes = (Pass(0, "add", (0,)), Pass(1, "add", (0,), source=0))
    future = group.call("begin", [5, 7], shard=["worker"], passes=passes)
    assert future.results(60) == [5, 12]


def test_only_wanted_results_come_back(group):
    future = group.call(
        "begin",
        3,
        replicate=["worker"],
        one_result=["worker"],
        passes=[Pass(0, "add", (0,)), Pass(1, "add", (0,))],
    )
    assert future.results(60) == [3]


def test_no_pass_of_a_worker_runs_after_a_failed_one(group):
    passes = [Pass(0, "fail", (0,)), Pass(1, "fail", (0,), source=0), Pass(0, "add", (1,)), Pass(1, "add", (1,))]
    with pytest.raises(WorkerCallError, match=r"Relay\.begin raised on rank 0: KeyError: 'no pass'"):
        run(group, *passes)
    assert group.call("end").results(60) == [["begin", "fail"], ["begin"]]


def test_tensors_are_released_within_a_step(group):
    """A pipeline would otherwise keep the activations of all micro-batches until its step ends."""
    passes = []
    for _ in range(5):
        passes += [Pass(0, "make", (100_000,)), Pass(1, "take", (), source=len(passes))]
    assert run(group, *passes, Pass(1, "alive", ()))[1] == 0


def test_worker_that_dies_in_a_pass_is_reported(cluster):
    with CompiledWorkerGroup(Relay, 2, options=SMALL) as group:
        with pytest.raises(WorkerLostError, match=r"rank 1 died during Relay\.begin"):
            run(group, Pass(0, "add", (1,)), Pass(1, "die", (), source=0), Pass(0, "fail", (9,), source=1))
        group.recover()
        assert run(group, Pass(0, "add", (1,)), Pass(1, "add", (1,), source=0)) == [2, 4]


def test_groups_with_plain_calls_refuse_passes(cluster):
    with (
        WorkerGroup(Relay, 1, options=SMALL) as group,
        pytest.raises(WorkerGroupError, match="Use a CompiledWorkerGroup with mode='required'"),
    ):
        run(group, Pass(0, "end", ()))


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ([Pass(2, "end", ())], r"rank 2 is not called; the called ranks are \[0, 1\]"),
        ([Pass(0, "end", (), source=0)], "source 0 must be the position of an earlier pass"),
        ([Pass(0, "end", ())], r"every called rank needs at least one, and ranks \[1\] have none"),
    ],
)
def test_plans_that_cannot_run_are_refused(passes, message):
    with pytest.raises(ValueError, match=message):
        DispatchPlan(CALLS, (), tuple(passes))


def test_methods_of_passes_are_checked_before_anything_is_sent(group):
    with pytest.raises(TypeError, match="add"):
        run(group, Pass(0, "add", ()), Pass(1, "end", ()))
    with pytest.raises(AttributeError, match="ad"):
        run(group, Pass(0, "ad", ()), Pass(1, "end", ()))

"""Compiled worker groups beyond what both kinds of groups do: order, threads, failures, deadlines, fall-back."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import ray
import torch
from tests.process_tools import stop

from raylane.errors import WorkerCallError, WorkerGroupError, WorkerLostError
from raylane.workers.batch import BatchDict
from raylane.workers.compiled import CompiledWorkerGroup
from raylane.workers.group import STUCK_S, WorkerOptions
from raylane.workers.sharding import NamedSharding
from workers import seed_worker
from workers.seed_worker import SeedWorker

ray.cloudpickle.register_pickle_by_value(seed_worker)

SMALL = WorkerOptions(num_cpus=0.5)
BOTH = ["data_parallel", "tensor_parallel"]


def new_group(ranks=2, **options):
    sharding = NamedSharding.of(data_parallel=2, tensor_parallel=2) if ranks == 4 else ranks
    return CompiledWorkerGroup(SeedWorker, sharding, options=SMALL, **options)


@pytest.fixture(scope="module")
def group(ray_session):
    """Four workers, kept for all tests that leave them healthy."""
    with new_group(4) as group:
        yield group


def test_calls_of_several_plans_run_in_one_order_without_overlap(group):
    """F7: training ran on one thread while saving ran on another."""
    sent = [
        group.call("work", "train", replicate=BOTH, one_result=BOTH, seconds=0.05),
        group.call("work", "evaluate", seconds=0.02),
        group.call("work", "save"),
        group.call("work", "train", replicate=BOTH, one_result=BOTH),
        group.call("work", "report", ranks=[0]),
    ]
    assert [future.results(60) for future in sent] == [[0], [0, 1, 2, 3], [0, 1, 2, 3], [0], [0]]
    for rank, log in enumerate(group.call("log_of_calls").results(60)):
        names = [name for name, *_ in log]
        assert names == ["train", "evaluate", "save", "train", *["report"] * (rank == 0)]
        assert len({thread for _, thread, *_ in log}) == 1
        assert all(first[3] <= second[2] for first, second in itertools.pairwise(log)), "no two overlap"


def test_constructor_and_methods_share_thread_and_settings(group):
    everyone = group.call("settings").results(60)
    one = group.call("settings", ranks=[3]).results(60)
    assert {*everyone, *one} == {(True, True, False)}


def ticks_of(pid, thread):
    """Processor time of a thread in ticks of 10 ms."""
    fields = Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_idle_graphs_of_a_group_use_no_processor(group):
    pids = group.call("process_id").results(60)
    threads = dict(zip(pids, group.call("native_thread").results(60), strict=True))
    before = sum(ticks_of(*one) for one in threads.items())
    time.sleep(1.0)  # the time over which use is measured
    used = sum(ticks_of(*one) for one in threads.items()) - before
    assert used <= 20, "four threads that wait by spinning would use 400 ticks, or all of two cores"


def test_next_batch_is_sent_while_a_call_runs(group, tmp_path):
    """F9: communication overlaps with computation."""
    how = {"replicate": BOTH, "one_result": BOTH}
    running = group.call("wait_for", str(tmp_path / "go"), **how)
    following = group.call("rows", {"ids": torch.arange(1 << 18)}, **how)
    assert not running.done(), "the batch is in the shared memory of the workers; the call before still runs"
    (tmp_path / "go").touch()
    assert running.results(60) == [0]
    assert following.results(60) == [list(range(1 << 18))]


def test_large_tensors_arrive_by_lease_and_results_stay_valid(group):
    batch = BatchDict({"ids": torch.arange(1 << 18)})
    future = group.call("rows", batch.shard(2), shard=BOTH[:1], replicate=BOTH[1:], one_result=BOTH[1:])
    first, second = future.results(60)
    assert first + second == list(range(1 << 18))


def test_call_may_take_longer_than_the_limit_of_graphs(cluster, tmp_path, monkeypatch):
    """F6: a step of more than ten seconds lost its result."""
    monkeypatch.setenv("RAYLANE_TIMEOUT_S", "3")
    with new_group(inflight=1) as group:
        slow = group.call("wait_for", str(tmp_path / "go"))
        queued: list[object] = []
        sender = threading.Thread(target=lambda: queued.append(group.call("work", "next")))
        sender.start()  # waits for room in the graph, beyond its limit too
        with pytest.raises(WorkerCallError, match=r"ranks \[0, 1\] have not answered within 4 s. Nothing is lost"):
            slow.results(4)
        assert not slow.done()
        (tmp_path / "go").touch()
        assert slow.results() == [0, 1]
        sender.join(60)
        assert queued[0].results(60) == [0, 1]


def test_stopped_worker_is_waited_for(cluster, monkeypatch):
    """A debugger holds a worker for longer than any limit of graphs."""
    monkeypatch.setenv("RAYLANE_TIMEOUT_S", "2")
    with new_group() as group:
        pid = group.call("process_id").results(60)[1]
        stop(pid)
        future = group.call("work", "held")
        with pytest.raises(WorkerCallError, match=r"ranks \[1\] have not answered"):
            future.results(3)
        os.kill(pid, signal.SIGCONT)
        assert future.results() == [0, 1]


@pytest.mark.faults
def test_rank_that_raises_fails_the_call_beside_a_collective(cluster):
    """Its peer waits in an all-reduce; later calls do not join it, and recover() starts all workers again."""
    with new_group() as group:
        assert group.call("reduce_or_raise", None).results(60) == [1.0, 1.0]
        before = group.call("process_id").results(60)
        failed = group.call("reduce_or_raise", 1)
        ahead = group.call("reduce_or_raise", None)
        with pytest.raises(
            WorkerCallError, match="reduce_or_raise raised on rank 1: ArithmeticError: rank 1 left"
        ) as told:
            failed.results(60)
        assert told.value.fields["rank"] == 1
        with pytest.raises(WorkerCallError, match="rank 1 refused reduce_or_raise: an earlier call, reduce_or_raise"):
            ahead.results(60)
        started = time.monotonic()
        with pytest.raises(WorkerGroupError, match=r"ranks \[0\] are still in .*Call recover\(\)"):
            group.call("work", "next")
        assert time.monotonic() - started < STUCK_S + 20, "bounded, not the ten minutes of the process group"
        group.recover()
        after = group.call("process_id").results(60)
        assert not set(before) & set(after)
        assert group.call("reduce_or_raise", None).results(60) == [1.0, 1.0]
        with pytest.raises(WorkerCallError):
            failed.results(60)


def test_rank_that_raises_alone_leaves_the_group_usable(group):
    with pytest.raises(WorkerCallError, match=r"raised on rank 2: ArithmeticError: rank 2 cannot go on") as told:
        group.call("raise_on", 2).results(60)
    assert told.value.fields == {"rank": 2, "call": "SeedWorker.raise_on"}
    assert group.call("raise_on", 9).results(60) == [0, 1, 2, 3]


@pytest.mark.claim("worker groups", "a killed worker fails every pending call, and the group recovers")
@pytest.mark.faults
def test_killed_worker_is_noticed_and_the_group_recovers(cluster):
    with new_group() as group:
        future = group.call("die_on", 1)
        with pytest.raises(WorkerLostError, match=r"rank 1 died during SeedWorker.die_on") as lost:
            future.results(2)  # too late would be a WorkerCallError
        assert lost.value.fields["rank"] == 1
        with pytest.raises(WorkerLostError, match="rank 1"):
            group.call("work", "x", ranks=[1]).results(60)
        group.recover()
        assert group.call("work", "again").results(60) == [0, 1]


@pytest.mark.claim("worker groups", "calls by compiled graphs fall back to plain calls with one warning")
def test_preferred_graphs_fall_back_loudly_once(cluster, caplog):
    """F1, R11: every call tried to build its graph again, and printed an exception each time."""
    with (
        caplog.at_level(logging.WARNING, logger="raylane"),
        new_group(1, mode="preferred", inflight=1 << 40) as group,
    ):
        assert not group.compiled
        assert "cannot create the channels" in group.fallback_reason
        assert group.call("work", "a").results(60) == [0]
        assert group.call("work", "b").results(60) == [0]
    assert len([record for record in caplog.records if "calls are plain Ray calls" in record.getMessage()]) == 1


def test_required_graphs_that_cannot_be_used_end_the_start(cluster):
    with pytest.raises(
        WorkerGroupError, match=r"no graph could be compiled for SeedWorker.__init__.*Lower max_inflight"
    ):
        new_group(1, mode="required", inflight=1 << 40)


def test_mode_off_uses_plain_calls(cluster):
    with new_group(1, mode="off") as group:
        assert not group.compiled
        assert group.call("work", "a").results(60) == [0]
        assert group.call("settings").results(60) == [(True, True, False)]


def test_wrong_options_of_a_compiled_group_are_refused():
    with pytest.raises(ValueError, match="mode must be 'off', 'preferred' or 'required', got 'on'"):
        CompiledWorkerGroup(SeedWorker, 1, mode="on")
    with pytest.raises(ValueError, match="max_concurrency=2: calls of a compiled group run one after the other"):
        CompiledWorkerGroup(SeedWorker, 1, options=WorkerOptions(max_concurrency=2))

"""Groups of both kinds after failures: nothing mixes, nothing hangs, and healthy workers are left alone."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import pytest
import ray

from raylane.errors import WorkerCallError, WorkerGroupError, WorkerLostError
from raylane.workers import compiled, group
from raylane.workers.compiled import CompiledWorkerGroup
from raylane.workers.group import WorkerGroup, WorkerOptions
from workers import seed_worker
from workers.seed_worker import Reluctant, SeedWorker

ray.cloudpickle.register_pickle_by_value(seed_worker)

SMALL = WorkerOptions(num_cpus=0.5)
KINDS = pytest.mark.parametrize("kind", [WorkerGroup, CompiledWorkerGroup])


@pytest.fixture
def impatient(monkeypatch):
    """Let workers count as stuck after half a second."""
    monkeypatch.setattr(group, "STUCK_S", 0.5)
    monkeypatch.setattr(compiled, "STUCK_S", 0.5)


@KINDS
def test_failed_call_that_was_dropped_does_not_mix_with_the_next(cluster, impatient, kind):
    """Its peer still waits in an all-reduce, which the next call of the failed rank must not join."""
    with kind(SeedWorker, 2, options=SMALL) as workers:
        assert workers.call("reduce_or_raise", None).results(60) == [1.0, 1.0]
        with pytest.raises(WorkerCallError, match="rank 1 left the step"):
            workers.call("reduce_or_raise", 1).results(60)
        gc.collect()
        with pytest.raises(WorkerGroupError, match="Call recover"):
            workers.call("reduce_or_raise", None).results(60)


@KINDS
def test_old_failure_does_not_limit_long_calls(cluster, impatient, kind):
    with kind(SeedWorker, 2, options=SMALL) as workers:
        with pytest.raises(WorkerCallError):
            workers.call("raise_on", 0).results(60)
        sent = [workers.call("work", str(i), seconds=0.8) for i in range(3)]
        assert [future.results(60) for future in sent] == [[0, 1]] * 3


@KINDS
def test_shutdown_lets_a_running_call_end_before_the_cleanup(cluster, impatient, kind, tmp_path):
    workers = kind(SeedWorker, 1, options=SMALL)
    workers.call("work", "long", seconds=1.5)
    assert workers.shutdown(40, cleanup_method="log_of_calls"), "the cleanup ran"


@KINDS
def test_recover_may_be_called_again_after_it_failed(cluster, kind, tmp_path):
    flag = tmp_path / "flag"
    with kind(Reluctant, 1, init_args=(str(flag),), options=SMALL) as workers:
        flag.touch()
        with pytest.raises(WorkerCallError, match="the file exists"):
            workers.recover()
        with pytest.raises(WorkerGroupError, match=r"could not be started again. Call recover\(\)"):
            workers.call("work", "x")
        flag.unlink()
        workers.recover()
        assert workers.call("work", "x").results(60) == [0]


@KINDS
def test_timeout_that_a_method_raises_is_its_own(cluster, kind):
    with (
        kind(SeedWorker, 1, options=SMALL) as workers,
        pytest.raises(WorkerCallError, match="time_out raised on rank 0: GraphTimeoutError: a graph of this worker"),
    ):
        workers.call("time_out").results(60)


def test_interrupted_send_of_plain_calls_closes_the_group(cluster, monkeypatch):
    with WorkerGroup(SeedWorker, 2, options=SMALL) as workers:
        workers._actors[1], second = None, workers._actors[1]  # the second send fails
        with pytest.raises(AttributeError):
            workers.call("work", "half")
        workers._actors[1] = second
        with pytest.raises(WorkerGroupError, match="some workers have it and others do not"):
            workers.call("work", "x")


def test_shutdown_does_not_wait_for_a_thread_that_is_sending(cluster, tmp_path):
    workers = CompiledWorkerGroup(SeedWorker, 1, options=SMALL, inflight=1)
    workers.call("wait_for", str(tmp_path / "never"))
    ended = []

    def send() -> None:
        try:
            workers.call("work", "x").results(60)
        except WorkerGroupError as error:
            ended.append(str(error))

    sender = threading.Thread(target=send)
    sender.start()
    while not workers._lock._is_owned() and workers._lock.acquire(blocking=False):
        workers._lock.release()
        time.sleep(0.001)  # until the thread holds the lock: there is no event for it
    assert not workers.shutdown(3, cleanup_method="log_of_calls")
    sender.join(60)
    assert len(ended) == 1


@pytest.mark.faults
def test_busy_survivor_of_a_dead_worker_takes_no_call(cluster, impatient, tmp_path):
    with CompiledWorkerGroup(SeedWorker, 2, options=SMALL) as workers:
        running = workers.call("wait_for", str(tmp_path / "go"))
        pid = workers._actors[1].__ray_call__.remote(lambda instance: os.getpid())
        queued = workers.call("work", "queued")
        os.kill(ray.get(pid), signal.SIGKILL)
        with pytest.raises(WorkerLostError, match="rank 1"):
            running.results(60)
        with pytest.raises(WorkerGroupError, match=r"ranks \[0\] are still in an earlier call"):
            workers.call("work", "early", ranks=[0])
        (tmp_path / "go").touch()
        deadline = time.monotonic() + 60
        while True:
            try:
                assert workers.call("work", "late", ranks=[0]).results(60) == [0]
                break
            except WorkerGroupError:  # until the worker has seen the file
                assert time.monotonic() < deadline
        log = workers.call("log_of_calls", ranks=[0]).results(60)[0]
        assert [name for name, *_ in log] == ["late"], "what was queued did not run"
        with pytest.raises(WorkerLostError):
            queued.results(60)

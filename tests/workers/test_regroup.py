"""Groups that lose a rank: collectives of the others end, only that rank is started again, the others keep state."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import ray
from tests.process_tools import stop

from raylane.errors import WorkerCallError, WorkerLostError
from raylane.workers.collectives import end_collectives, gloo_sockets, leave_process_groups
from raylane.workers.compiled import CompiledWorkerGroup
from raylane.workers.group import WorkerGroup, WorkerOptions
from workers import regrouping
from workers.regrouping import Summer

ray.cloudpickle.register_pickle_by_value(regrouping)

SMALL = WorkerOptions(num_cpus=0.5)
RANKS = 4


def sums(group: WorkerGroup, **options: Any) -> list[tuple[float, int, int]]:
    return group.call("sum", 1.0, common=options).results(60)


@pytest.mark.claim("worker groups", "a dead rank ends the collectives of the others, and is replaced alone")
def test_survivors_of_a_collective_keep_state_and_process(cluster: None) -> None:
    with CompiledWorkerGroup(Summer, RANKS, options=SMALL) as group:
        before = sums(group)
        for calls, victim in ((2, 2), (3, 0)):  # rank 0 has the store of the rendezvous
            with pytest.raises(WorkerLostError, match=f"rank {victim} died"):
                sums(group, dies=victim)
            assert group.recover() == (victim,)
            after = sums(group)
            assert [total for total, *_ in after] == [RANKS] * RANKS
            kept = [rank for rank in range(RANKS) if rank != victim]
            assert [after[rank][2] for rank in kept] == [before[rank][2] for rank in kept]
            assert after[victim][2] != before[victim][2]
            assert [after[rank][1] for rank in kept] == [before[rank][1] + 1 for rank in kept], calls
            before = after


def test_a_spare_takes_the_place_of_a_dead_rank(cluster: None, eventually: Callable[..., None]) -> None:
    with CompiledWorkerGroup(Summer, 2, options=WorkerOptions(num_cpus=0.5, spares=1)) as group:
        for victim in (1, 0):
            (seat,) = group._spares._seats.values()
            waiting = ray.get(seat, timeout=60).pid
            with pytest.raises(WorkerLostError, match=f"rank {victim} died"):
                sums(group, dies=victim)
            assert group.recover() == (victim,)
            after = sums(group)
            assert after[victim][2] == waiting
            assert [total for total, *_ in after] == [2.0] * 2
            os.kill(after[1 - victim][2], signal.SIGKILL)  # before another spare is ready, or after
            assert group.recover() == (1 - victim,)
            assert [total for total, *_ in sums(group)] == [2.0] * 2
    with pytest.raises(ValueError, match="without GPUs"):
        WorkerOptions(num_gpus=1, spares=1)


def test_a_rank_that_raises_before_a_collective_loses_nobody(cluster: None) -> None:
    with CompiledWorkerGroup(Summer, 3, options=SMALL) as group:
        before = sums(group)
        with pytest.raises(WorkerCallError, match="rank 1 leaves the step"):
            sums(group, raises=1)
        assert group.recover() == ()
        assert [pid for *_, pid in sums(group)] == [pid for *_, pid in before]


def test_futures_of_before_leave_the_new_calls_alone(cluster: None) -> None:
    with CompiledWorkerGroup(Summer, 3, options=SMALL) as group:
        lost, dropped = group.call("sum", 1.0, common={"dies": 2}), group.call("sum", 1.0)
        with pytest.raises(WorkerLostError):
            lost.results(60)
        assert group.recover() == (2,)
        present = group.call("sum", 1.0)
        with pytest.raises(WorkerLostError):
            dropped.results(60)
        assert [total for total, *_ in present.results(60)] == [3.0] * 3
        assert [total for total, *_ in sums(group)] == [3.0] * 3


def test_a_stuck_rank_is_replaced_while_a_thread_waits_to_send(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylane.workers.group.STUCK_S", 0.5)
    with CompiledWorkerGroup(Summer, 2, options=SMALL, inflight=1) as group:
        pid = sums(group)[1][2]
        stop(pid)
        group.call("sum", 1.0)
        errors: list[Exception] = []

        def send() -> None:
            try:
                group.call("sum", 1.0).results(60)
            except Exception as error:
                errors.append(error)

        sending = threading.Thread(target=send)
        sending.start()
        assert group.recover() == (1,)
        sending.join(60)
        assert not sending.is_alive()
        assert [total for total, *_ in sums(group)] == [2.0] * 2


@pytest.mark.parametrize("kind", [WorkerGroup, CompiledWorkerGroup])
def test_a_rank_that_dies_between_calls_is_replaced_alone(cluster: None, kind: type[WorkerGroup]) -> None:
    with kind(Summer, 2, options=SMALL) as group:
        before = sums(group)
        os.kill(before[1][2], signal.SIGKILL)
        assert group.recover() == (1,)
        after = sums(group)
        assert ([total for total, *_ in after], after[0][1:]) == ([2.0, 2.0], (2, before[0][2]))


def test_a_worker_that_cannot_regroup_is_new(cluster: None, caplog: pytest.LogCaptureFixture) -> None:
    with CompiledWorkerGroup(Summer, 2, init_args=(True,), options=SMALL) as group:
        before = sums(group)
        os.kill(before[0][2], signal.SIGKILL)
        assert group.recover() == (0, 1)
        assert "this worker cannot form its groups again" in caplog.text
        assert not {pid for *_, pid in sums(group)} & {pid for *_, pid in before}


def test_processes_without_collectives_have_none_to_end() -> None:
    assert gloo_sockets() == set()
    assert end_collectives() == 0
    leave_process_groups()

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.__main__ import main
from benchmarks.graph import cases as graph_cases
from benchmarks.graph import run as graph
from benchmarks.graph import values as graph_values
from benchmarks.graph import wake_ups
from benchmarks.graph import workloads as graph_workloads
from benchmarks.graph.actors import Peer, Stepper
from benchmarks.graph.cases import CASES, Case, blocks_of, cases, contender_names, group_by_graph, step_times_us
from benchmarks.measure import Tally
from tests.benchmarks.quick import quick_run

from raylane.core.memory.segment import Segment
from raylane.core.native import PAGE_BYTES
from raylane.core.signals import semaphore

FIELDS = {"case", "contender", "n", "p50_us", "p90_us", "p99_us", "min_us", "first_us", "cpu_s"}


def test_cases_and_who_takes_part() -> None:
    assert list(CASES) == [
        *("echo", "echo-1ms", "echo-10ms", "async", "chain-4", "chain-4-1ms"),
        *("scatter-4", "scatter-8", "broadcast-8"),
        *("array-10MB-4", "array-10MB-4-empty", "idle-8", "step-20ms", "throughput-8", "million", "compile-8"),
        *("beside-150", "allreduce-1MB-2", "allreduce-1MB-4"),
        *(f"values-{name}" for name in graph_values.NAMES),
        *("echo-busy1", "echo-busy2", "chain-4-busy1", "chain-4-busy2"),
    ]
    assert cases(None) == list(CASES.values())
    with pytest.raises(ValueError, match="unknown cases chain-5; the cases are echo, echo-1ms"):
        cases("echo,chain-5")
    for case in CASES.values():
        assert "raylane" in case.contenders
        assert ("ray:compiled" in case.contenders) == (case.name not in ("million", "beside-150"))
        assert ("raylane:block" in case.contenders) == bool(case.busy)
        assert ("raylane:beside" in case.contenders) == bool(case.idle_graphs)
    assert "loop" in CASES["step-20ms"].contenders
    assert CASES["broadcast-8"].contenders == ("raylane", "ray:compiled", "ray:calls")
    assert {name for name, case in CASES.items() if "wake-ups" in case.contenders} == {
        *("echo", "echo-1ms", "echo-10ms", "chain-4", "chain-4-1ms", "scatter-8"),
        *(name for name, case in CASES.items() if case.busy),
    }
    assert {name for name, case in CASES.items() if "copies" in case.contenders} == {
        *("array-10MB-4", "values-array-10MB", "values-tensor-10MB"),
    }


def test_cases_with_the_same_graph_share_it() -> None:
    together = [[case.name for case in several] for several in group_by_graph(cases(None))]
    assert ["scatter-8", "broadcast-8", "idle-8"] in together
    for alone in ("compile-8", "beside-150", "array-10MB-4-empty"):
        assert [alone] in together
    assert ["async"] in together
    assert ["throughput-8"] in together
    assert sorted(itertools.chain(*together)) == sorted(CASES)
    assert contender_names(cases("echo,echo-busy1")) == [
        "raylane",
        "ray:compiled",
        "ray:calls",
        "loop",
        "wake-ups",
        "raylane:block",
    ]
    assert contender_names(cases("million")) == ["raylane"]


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_plans_have_an_end_and_quick_ones_a_near_one(case: Case) -> None:
    full, quick = blocks_of(case, quick=False), blocks_of(case, quick=True)
    for each in (full, quick):
        assert (each.calls > 0) == (case.workload in ("steps", "million"))
        assert each.rounds * max(each.block_s, each.calls * 20e-6) <= 20
    assert quick.rounds * quick.block_s <= 2
    assert 0 < quick.calls <= 20_000 or quick.block_s


def test_blocks_of_idle_steps_and_million_match_their_names() -> None:
    idle, steps, million = (blocks_of(CASES[name], quick=False) for name in ("idle-8", "step-20ms", "million"))
    assert idle.rounds * idle.block_s == 10
    assert steps.rounds * steps.calls == 200
    assert million.rounds * million.calls == 1_000_000


def test_a_step_has_ended_when_all_actors_have_ended_it() -> None:
    assert step_times_us(1.0, [[2.0, 4.0], [3.0, 3.5]]) == pytest.approx([2e6, 1e6])
    assert step_times_us(1.0, [[5.0, 5.5], [2.0, 5.75]]) == pytest.approx([4e6, 0.75e6])


class Line:
    """Answers in order; counts how many are under way."""

    def __init__(self) -> None:
        self.submitted = self.finished = self.most = 0

    def submit(self) -> int:
        self.submitted += 1
        self.most = max(self.most, self.submitted - self.finished)
        return self.submitted

    def finish(self, token: int) -> None:
        self.finished += 1
        assert token == self.finished, "not the oldest"


def test_steps_keep_so_many_in_flight_and_time_each() -> None:
    line = Line()
    tally = graph_workloads.steps(line.submit, line.finish, 2, 7)
    assert (line.submitted, line.finished, line.most) == (7, 7, 2)
    assert len(tally.samples_us) == tally.calls == 7
    line = Line()
    assert graph_workloads.steps(line.submit, line.finish, 4, 2).calls == 2
    assert line.submitted == 2


def test_a_stream_keeps_so_many_in_flight_and_leaves_none() -> None:
    line = Line()
    tally = graph_workloads.stream(line.submit, line.finish, 8, 0.0)
    assert line.most == 8
    assert line.submitted == line.finished == tally.calls + 8
    assert tally.calls == len(tally.samples_us) * graph_workloads.CALLS_PER_SAMPLE


class Clock:
    """Stands for the module `time`: moves only when slept on, or told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_one_call_after_the_other_and_pauses_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(graph_workloads, "time", clock)
    tally = graph_workloads.back_to_back(lambda: clock.sleep(0.25), 1.0)
    assert (tally.samples_us, tally.calls) == ([250_000.0] * 4, 4)
    tally = graph_workloads.back_to_back(lambda: clock.sleep(0.25), 1.0, gap_s=0.25)
    assert (tally.samples_us, tally.calls) == ([250_000.0] * 2, 2)
    assert graph_workloads.back_to_back(lambda: None, 0.0).calls == 1, "at least one"

    async def call() -> None:
        clock.sleep(0.5)

    tally = asyncio.run(graph_workloads.in_event_loop(call, 1.0))
    assert (tally.samples_us, tally.calls) == ([500_000.0] * 2, 2)


def test_idling_calls_nothing() -> None:
    tally = graph_workloads.idle(0.01)
    assert tally.calls == 1
    assert tally.samples_us[0] >= 10_000


def test_a_million_tells_memory_at_start_middle_and_end() -> None:
    called: list[None] = []
    tally = graph_workloads.million(lambda: called.append(None), 40, lambda: {"seen": len(called)})
    assert tally.extra["seen"] == [0, 20, 40]
    assert len(tally.samples_us) == tally.calls == 40
    assert tally.extra["p50_first_tenth_us"] > 0
    assert tally.extra["p50_last_tenth_us"] > 0


def test_idle_is_recorded_as_one_block_steps_by_their_mean() -> None:
    idle = graph.tally_to_record(CASES["idle-8"], Tally([2.5e6, 2.6e6], 2, 0.1))
    assert (idle.samples_us, idle.calls, idle.cpu_s) == ([5.1e6], 1, 0.1)
    steps = graph.tally_to_record(CASES["step-20ms"], Tally([10.0, 40.0], 2))
    assert steps.extra == {"mean_us": 25.0}


@pytest.mark.processes
def test_busy_processes_end_with_the_block() -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = set(children.read_text().split())
    with graph.busy(2):
        started = set(children.read_text().split()) - before
        assert len(started) == 2
    assert not started & set(children.read_text().split())


def test_the_loop_in_the_worker() -> None:
    peer = Peer()
    assert peer.echo({"a": 1}) == {"a": 1}
    assert peer.touch([1.0, 5.0, 3.0]) == 4.0
    assert all(us >= 0 for us in peer.loop("echo", 1, 0.001, 0.0))


def test_a_step_works_on_one_core_and_repeats() -> None:
    import torch

    threads = torch.get_num_threads()
    try:
        stepper = Stepper()
        assert stepper.calibrate(0.002) >= 1
        stepper.repeat(2)
        before = stepper.model[0].weight.clone()
        assert stepper.step("x") == "x"
        assert torch.get_num_threads() == 1
        assert not torch.equal(before, stepper.model[0].weight)
        ends = stepper.steps(3)
        assert ends == sorted(ends)
    finally:
        torch.set_num_threads(threads)


def test_actors_of_a_chain_wake_the_next_others_the_driver() -> None:
    assert [wake_ups.next_of(number, 4, chain=True) for number in range(1, 5)] == [2, 3, 4, 0]
    assert [wake_ups.next_of(number, 4, chain=False) for number in range(1, 5)] == [0] * 4


@pytest.mark.processes
def test_wake_ups_need_a_compiler_and_have_a_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = Segment.make(PAGE_BYTES)
    for number in range(2):
        semaphore.init(segment.address + number * semaphore.SEMAPHORE_BYTES)
    bare = wake_ups.WakeUps(wake_ups.build(str(tmp_path)), segment.address)
    bare.prepare([0], 60.0)
    assert bare.call()
    bare.prepare([1], 0.0)
    assert not bare.call()
    assert semaphore.value(segment.address + semaphore.SEMAPHORE_BYTES) == 1
    monkeypatch.setenv("CC", "/nonexistent/cc")
    with pytest.raises(SystemExit, match=r"wake_ups.c could not be compiled: .*/nonexistent/cc.* Install a C compiler"):
        wake_ups.build(str(tmp_path))


@pytest.mark.processes
def test_the_actors_need_no_torch() -> None:
    """They are many and start at once: what is imported there is waited for."""
    code = "import sys, benchmarks.graph.actors; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_case_is_answered_with_those_there_are() -> None:
    with pytest.raises(SystemExit, match="benchmarks: unknown cases ecko; the cases are echo"):
        main(["graph", "--only", "ecko"])


@pytest.mark.slow
def test_a_quick_run_writes_what_it_should(tmp_path: Path) -> None:
    only = "echo,async,million"
    report, printed = quick_run("graph", only, tmp_path / "graph.json")
    assert report["quick"] is True
    records = report["records"]
    for name in only.split(","):
        found = [record["contender"] for record in records if record["case"] == name]
        assert sorted(found) == sorted(graph_cases.CASES[name].contenders)
    for record in records:
        extra = {"driver_rss_bytes", "actor_rss_bytes", "p50_first_tenth_us", "p50_last_tenth_us"}
        assert set(record) == (FIELDS | extra if record["case"] == "million" else FIELDS)
        assert 0 < record["min_us"] <= record["p50_us"] <= record["p90_us"] <= record["p99_us"]
        assert record["n"] > 0
    assert "x compiled" in printed

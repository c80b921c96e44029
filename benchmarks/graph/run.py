"""Benchmark of calls through compiled graphs, against Ray's compiled graphs, plain calls and a loop in the worker.

Starts Ray, runs the cases (`graph_cases`) and shuts Ray down. Called by `benchmarks.__main__`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import goals, measure
from benchmarks.graph import cases as graph_cases
from benchmarks.graph.cases import CALLS, COMPILED, Blocks, Case, blocks_of, group_by_graph
from benchmarks.graph.contenders import Contender, start
from benchmarks.local_ray import local_ray

WARM_S, WARM_CALLS = 0.05, 4
"""Length of the warm-up before each block: processes run again after SIGCONT, and waiters adapt to the case."""
RESUME_S = 0.3
"""Time in seconds before an idle block, in which the actors finish the work that SIGCONT causes."""
EXIT_TIMEOUT_S = 10.0
"""Time in seconds in which the processes of ended actors must disappear."""
BUSY_PROGRAM = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"


def run(selected: Sequence[Case], *, quick: bool) -> list[dict[str, Any]]:
    """Start Ray, run every case, and shut Ray down; return one record per case and contender."""
    with local_ray():
        records = [record for group in group_by_graph(selected) for record in _run_cases(group, quick=quick)]
    names = [case.name for case in selected]
    return sorted(records, key=lambda record: names.index(record["case"]))


def table(records: Sequence[dict[str, Any]], more: Mapping[str, tuple[str, str]] | None = None) -> str:
    """Return the records as text, with ratios to Ray's compiled graph (time, CPU time) and to Ray's calls (time).

    Then the goals. `more` adds columns as `measure.table` takes them.
    """
    columns = {"x compiled": (COMPILED, "p50"), "x its CPU": (COMPILED, "cpu"), "x calls": (CALLS, "p50")}
    table = measure.table(records, columns | dict(more or {}))
    return "\n".join([table, *goals.lines(goals.reached(graph_cases.GOALS, records, graph_cases.FLOORS))])


def _run_cases(group: Sequence[Case], *, quick: bool) -> list[dict[str, Any]]:
    """Run a group of cases with the same graph, which is compiled once and torn down after the last case."""
    records = []
    with asyncio.Runner() as runner:  # one event loop for the whole group: graphs are bound to it
        began = time.perf_counter()
        contenders = start(group, runner)
        first_us = {}
        try:
            for contender in contenders:
                first_us[contender.name] = _open(contender, runner)
                measure.stop([contender])  # some use CPU from now on, even while idle
            print(f"{group[0].name}: {time.perf_counter() - began:.1f} s to get ready", flush=True)
            for case in group:
                tallies = _run_case(case, blocks_of(case, quick=quick), contenders)
                records += [measure.record(case.name, name, tally, first_us[name]) for name, tally in tallies.items()]
        finally:
            _close(contenders)
    return records


def _run_case(case: Case, blocks: Blocks, contenders: Sequence[Contender]) -> dict[str, measure.Tally]:
    """Run one case; return the sum of the blocks of each contender."""
    began = time.perf_counter()
    measure.stop(contenders)  # also those that are not part of this case
    taking_part = [contender for contender in contenders if contender.name in case.contenders]
    brief = dataclasses.replace(blocks, block_s=WARM_S, calls=WARM_CALLS)
    called = dataclasses.replace(case, workload="calls") if case.workload in ("idle", "million") else case

    def warm(contender: Contender) -> None:
        contender.take_value(case)
        contender.block(called, brief)
        if case.workload == "idle":
            time.sleep(RESUME_S)

    with busy(case.busy):
        tallies = measure.take_turns(
            taking_part, blocks.rounds, lambda who: who.block(case, blocks), seed=case.name, warm=warm
        )
    print(f"{case.name}: {time.perf_counter() - began:.1f} s", flush=True)
    return {name: tally_to_record(case, tally) for name, tally in tallies.items()}


def tally_to_record(case: Case, tally: measure.Tally) -> measure.Tally:
    """Return the tally to record: idle time as one sample, and for steps also the mean."""
    if case.workload == "idle":
        return dataclasses.replace(tally, samples_us=[sum(tally.samples_us)], calls=1)
    if case.workload == "steps":
        mean = sum(tally.samples_us) / len(tally.samples_us)
        return dataclasses.replace(tally, extra=tally.extra | {"mean_us": round(mean, 1)})
    return tally


def _open(contender: Contender, runner: asyncio.Runner) -> float:
    """Compile and make the first call; return its microseconds. RuntimeError if the answer is wrong.

    If the case measures compilation, the microseconds are those of the first compilation and call.
    """

    async def opened() -> float:
        contender.open()
        began = time.perf_counter()
        answer = await contender.call_async()
        return _checked(contender, answer, began)

    if contender.case.workload == "asyncio":
        return runner.run(opened())
    opening = time.perf_counter()
    contender.open()
    began = time.perf_counter()
    if contender.case.workload == "compile":  # what is measured is the compilation
        began = opening
    return _checked(contender, contender.call(), began)


def _checked(contender: Contender, answer: Any, began: float) -> float:
    """Return the microseconds since `began`; RuntimeError if `answer` is not the expected answer."""
    first_us = (time.perf_counter() - began) * 1e6
    if answer != contender.answer:
        raise RuntimeError(
            f"{contender.case.name}: {contender.name} returned {answer!r}, expected {contender.answer!r}. This is a bug"
        )
    return first_us


def _close(contenders: Sequence[Contender]) -> None:
    """Tear down graphs and end all actors, and wait until their processes have gone: the next case needs the CPUs."""
    measure.send(signal.SIGCONT, contenders)
    for contender in contenders:
        contender.close()
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    pids = [pid for contender in contenders for pid in contender.pids]
    while running := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        if time.monotonic() > deadline:
            print(f"processes {running} of ended actors still exist after {EXIT_TIMEOUT_S:.0f} s", flush=True)
            return
        time.sleep(0.02)


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Run `count` processes that use as much CPU as they can get, until the `with` block or this process ends."""
    # Each process ends by itself if this one is killed: its parent process ID changes then.
    processes = [subprocess.Popen([sys.executable, "-S", "-E", "-c", BUSY_PROGRAM]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()

"""`raylane bench graph`: what a call through a compiled graph costs, against Ray's own compiled graphs, plain calls and
a loop inside the worker. Starts Ray, carries out the cases (`graph_cases`), shuts it down.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from raylane.bench import measure
from raylane.bench.graph_cases import CALLS, COMPILED, Case, Plan, cases, plan, same_graph
from raylane.bench.graph_contenders import Contender, start

__all__ = ["cases", "run", "table"]

WARM_S, WARM_CALLS = 0.05, 4
"""Of calls before each block: who was stopped has to catch up, and those who wait learn how long to expect."""
SETTLE_S = 0.3
"""Before idling is measured, for what SIGCONT sets going in the actors."""
GONE_S = 10.0
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"


def run(wanted: Sequence[Case], *, quick: bool) -> list[dict[str, Any]]:
    """Start Ray, run every case, shut down. One record a case and contender."""
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="warning")
    try:
        records = [record for together in same_graph(wanted) for record in _run_cases(together, quick=quick)]
    finally:
        ray.shutdown()
    names = [case.name for case in wanted]
    return sorted(records, key=lambda record: names.index(record["case"]))


def table(records: Sequence[dict[str, Any]]) -> str:
    """The records as text; how many times less time and CPU than Ray's compiled graph, and less time than its calls."""
    columns = {"x compiled": (COMPILED, "p50"), "x its CPU": (COMPILED, "cpu"), "x calls": (CALLS, "p50")}
    return measure.table(records, columns)


def _run_cases(together: Sequence[Case], *, quick: bool) -> list[dict[str, Any]]:
    """Cases with the same graph: compiled once for all of them, and torn down after the last."""
    records = []
    with asyncio.Runner() as runner:
        began = time.perf_counter()
        contenders = start(together, runner)
        first_us = {}
        try:
            for contender in contenders:
                first_us[contender.name] = _open(contender, runner)
                measure.stop([contender])  # some are never quiet from here on
            print(f"{together[0].name}: {time.perf_counter() - began:.1f} s to get ready", flush=True)
            for case in together:
                tallies = _run_case(case, plan(case, quick=quick), contenders)
                records += [measure.record(case.name, name, tally, first_us[name]) for name, tally in tallies.items()]
        finally:
            _close(contenders)
    return records


def _run_case(case: Case, planned: Plan, contenders: Sequence[Contender]) -> dict[str, measure.Tally]:
    began = time.perf_counter()
    measure.stop(contenders)  # those of the other cases too
    taking_part = [contender for contender in contenders if contender.name in case.contenders]
    with busy(case.busy):
        tallies = measure.take_turns(
            taking_part, planned.rounds, lambda who: who.block(case, planned), seed=case.name, warm=_warm(case, planned)
        )
    print(f"{case.name}: {time.perf_counter() - began:.1f} s", flush=True)
    return {name: _as_recorded(case, tally) for name, tally in tallies.items()}


def _open(contender: Contender, runner: asyncio.Runner) -> float:
    """Compile and make the first call; its microseconds. RuntimeError if it answers wrongly."""

    async def opened() -> float:
        contender.open()
        began = time.perf_counter()
        found = await contender.call_async()
        return _checked(contender, found, began)

    if contender.case.drive == "asyncio":
        return runner.run(opened())
    contender.open()
    began = time.perf_counter()
    return _checked(contender, contender.call(), began)


def _checked(contender: Contender, found: Any, began: float) -> float:
    first_us = (time.perf_counter() - began) * 1e6
    if found != contender.answer:
        raise RuntimeError(f"{contender.case.name}: {contender.name} answered {found!r}, not {contender.answer!r}")
    return first_us


def _warm(case: Case, planned: Plan) -> Callable[[Contender], None]:
    brief = dataclasses.replace(planned, block_s=WARM_S, calls=WARM_CALLS)
    called = dataclasses.replace(case, drive="calls") if case.drive in ("idle", "million") else case

    def warm(contender: Contender) -> None:
        contender.block(called, brief)
        if case.drive == "idle":
            time.sleep(SETTLE_S)

    return warm


def _as_recorded(case: Case, tally: measure.Tally) -> measure.Tally:
    """Idling is one stretch of time, in however many blocks; of steps the mean counts too."""
    if case.drive == "idle":
        return dataclasses.replace(tally, samples_us=[sum(tally.samples_us)], calls=1)
    if case.drive == "steps":
        mean = sum(tally.samples_us) / len(tally.samples_us)
        return dataclasses.replace(tally, extra=tally.extra | {"mean_us": round(mean, 1)})
    return tally


def _close(contenders: Sequence[Contender]) -> None:
    """Tear down and end all actors; wait until their processes are gone, so that the next case has the machine."""
    measure.send(signal.SIGCONT, contenders)
    for contender in contenders:
        contender.close()
    deadline = time.monotonic() + GONE_S
    pids = [pid for contender in contenders for pid in contender.pids]
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        if time.monotonic() > deadline:
            print(f"processes {left} of actors that were ended are still there after {GONE_S:.0f} s", flush=True)
            return
        time.sleep(0.02)


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that use all the CPU they get; they end with the block, or with this process."""
    processes = [subprocess.Popen([sys.executable, "-S", "-E", "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()

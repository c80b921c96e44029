"""Benchmark of the driver of a training run: the time that sending steps and reading metrics adds to a step.

Called by `benchmarks.__main__`; `measure` describes how contenders take turns.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import goals, measure
from benchmarks.local_ray import local_ray
from benchmarks.sft import peers as sft_peers
from benchmarks.sft.cases import (
    CASES,
    GOALS,
    LOOP,
    PLAIN,
    RAY,
    RPC,
    Case,
    blocks_of,
    group_by_workers,
)
from benchmarks.sft.contenders import KINDS, Contender
from benchmarks.sft.training import THREADS, PlainTrainer, TrainWorker, training_config, write_conversations
from raylane.sft.data.prepare import prepare

STEP_S = 20e-3
"""Duration of the work of a `step20ms` step on one thread, in seconds."""
SETTLE_S = 1.0
"""Time in seconds before calibration, in which Ray finishes the start of the workers."""
CONVERSATIONS = 2000


def run(selected: Sequence[Case], *, quick: bool) -> list[dict[str, Any]]:
    """Start Ray, run every case, and shut Ray down; return one record per case and contender.

    The runs against other trainers start a Ray of their own, so they come before this one; they have a record for each
    round.
    """
    peers = [case for case in selected if case.work == "peers"]
    selected = [case for case in selected if case.work != "peers"]
    of_peers = sft_peers.run(quick=quick) if peers else []
    if not selected:
        return of_peers
    with local_ray():
        records = [record for group in group_by_workers(selected) for record in _run_group(group, quick=quick)]
    names = [case.name for case in selected]
    return [*sorted(records, key=lambda record: names.index(record["case"])), *of_peers]


def _run_group(group: Sequence[Case], *, quick: bool) -> list[dict[str, Any]]:
    """Run the cases that share their workers."""
    began = time.perf_counter()
    contenders: list[Contender] = []
    records = []
    try:
        _start(group, contenders)
        print(f"{group[0].name}: {time.perf_counter() - began:.1f} s to get ready", flush=True)
        for case in group:
            records += _run_case(case, contenders, quick=quick)
    finally:
        # Stopped processes cannot run their cleanup, and `shutdown` would wait for its whole timeout.
        measure.send(signal.SIGCONT, contenders)
        for contender in contenders:
            contender.close()
    return records


def _start(group: Sequence[Case], contenders: list[Contender]) -> None:
    """Start the workers of all contenders of a group, and add each contender to the list at once."""
    case = group[0]
    if not case.trains:
        # One after the other: 32 processes that import torch at once would exceed the start timeout on few cores.
        for name in case.contenders:
            contenders.append(KINDS[name](name, case.workers))
        if any(each.work == "step20ms" for each in group):
            # The same work per step for all workers: about STEP_S seconds while as many of them work as have a core.
            # The workers of the first contender work at the same time, as they will in a step.
            measure.stop(contenders[1:])
            try:
                time.sleep(SETTLE_S)
                counts = contenders[0].ask("calibrate", STEP_S)
            finally:
                measure.send(signal.SIGCONT, contenders[1:])
            for contender in contenders:
                contender.products = round(sum(counts) / len(counts))
        return
    # The workers map the token cache in `setup`, and mapped files outlive their folder.
    with tempfile.TemporaryDirectory() as folder:
        write_conversations(Path(folder) / "train.jsonl", CONVERSATIONS)
        config = training_config(Path(folder), case.workers)
        prepared = prepare(config)
        for name in case.contenders:
            # The plain loop gets all threads in one process, because torch alone needs no second process on one host.
            alone = name == PLAIN
            workers, threads = (1, THREADS) if alone else (case.workers, THREADS // case.workers)
            contenders.append(KINDS[name](name, workers, PlainTrainer if alone else TrainWorker, threads))
            contenders[-1].ask("setup", config, prepared, config.sft.max_num_steps)


def _run_case(case: Case, contenders: Sequence[Contender], *, quick: bool) -> list[dict[str, Any]]:
    """Run one case; return the record of each contender."""
    began = time.perf_counter()
    blocks = blocks_of(case, quick=quick)
    first_us = {}
    for contender in contenders:
        if not case.trains:
            contender.ask("repeat", contender.products if case.work == "step20ms" else 0)
        # The first call includes compilation, which happens in `open` for Ray's graph and in the call for raylane's.
        opening = time.perf_counter()
        contender.open(case)
        contender.run(case, 1)
        first_us[contender.name] = (time.perf_counter() - opening) * 1e6
        contender.ask("take_times")
        measure.stop([contender])  # the actors of Ray's compiled graph use the CPU from now on, even while idle
    tallies = measure.take_turns(
        contenders,
        blocks.rounds,
        lambda contender: contender.block(case, blocks),
        seed=case.name,
        warm=lambda contender: contender.warm(case, blocks),
    )
    for contender in contenders:
        contender.end()
        tallies[contender.name].extra = contender.extra(case)
    print(f"{case.name}: {time.perf_counter() - began:.1f} s", flush=True)
    return [measure.record(case.name, name, tally, first_us[name]) for name, tally in tallies.items()]


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return the records as text: overheads with ratios to Ray's calls and Ray's compiled graph, then step times.

    A step that computes has its time against the loop, or its tokens per second against the plain training loop. Then
    the goals.
    """
    of_peers = [record for record in records if record["case"].startswith("peers-")]
    records = [record for record in records if not record["case"].startswith("peers-")]
    if not records:
        return sft_peers.table(of_peers)
    columns = {"x rpc": (RPC, "p50"), "x its CPU": (RPC, "cpu"), "x ray:compiled": (RAY, "p50")}
    lines = [measure.table(records, columns), ""]
    by_key = {(record["case"], record["contender"]): record for record in records}
    for record in records:
        name = f"{record['case']} {record['contender']}:"
        if (plain := by_key.get((record["case"], PLAIN))) is not None:
            rate = record["tokens_per_s"]
            lines.append(f"{name} {rate:,.0f} tokens/s, {rate / plain['tokens_per_s']:.3f} of plain")
        elif CASES[record["case"]].work != "noop":
            loop = by_key[record["case"], LOOP]
            lines.append(
                f"{name} {record['step_us'] / 1000:.2f} ms a step, {record['work_us'] / 1000:.2f} ms of it work; "
                f"{record['step_us'] / loop['step_us'] - 1:+.1%} against the loop"
            )
    return "\n".join([*lines, *goals.lines(goals.reached(GOALS, records)), sft_peers.table(of_peers)])

"""Benchmark of weights that trainers publish: raylane's publishers and readers, other ways, and a bare memcpy.

`measure` describes how contenders take turns. Called by `benchmarks.__main__`.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from typing import Any

import ray

from benchmarks import goals, measure
from benchmarks.local_ray import local_ray
from benchmarks.weights import cases as weights_cases
from benchmarks.weights.cases import COPIED, MAPPED, RAYLANE, STORE, Case, grouped, rounds_of
from benchmarks.weights.contenders import Contender, forget_peak, start, unavailable

WARM_UPS = 3
"""Samples before the measurement, the first one included: one for each slot of raylane's keeper."""


def run(selected: Sequence[Case], *, quick: bool) -> list[dict[str, Any]]:
    """Start Ray, run every case, and shut Ray down; return one record per case and contender."""
    with local_ray(address="local"):
        records = [record for group in grouped(selected) for record in run_group(group, quick=quick)]
    names = [case.name for case in selected]
    return sorted(records, key=lambda record: names.index(record["case"]))


def run_group(group: Sequence[Case], *, quick: bool) -> list[dict[str, Any]]:
    """Run cases whose contenders take turns, on the Ray that this process is connected to."""
    contenders: list[Contender] = []
    with contextlib.ExitStack() as stack:
        for case in group:
            reasons = {name: unavailable(name) for name in case.contenders}
            for name, reason in reasons.items():
                if reason is not None:
                    print(f"{case.name}: contender {name} left out, because {reason}", flush=True)
            contenders += start(case, [name for name, reason in reasons.items() if reason is None], stack)
        stack.callback(measure.send, signal.SIGCONT, contenders)  # a stopped process could not be ended
        return _measure(contenders, rounds_of(group, quick=quick))


def _measure(contenders: Sequence[Contender], rounds: int) -> list[dict[str, Any]]:
    first_us, memory = {}, {}
    # Agents of NIXL, made in the first transfer, keep a core each busy from then on: they come last, and are stopped.
    for contender in sorted(contenders, key=lambda contender: contender.label.endswith("nixl")):
        memory[contender.name] = {kind: contender.memory(kind) for kind in ("RssAnon", "Pss")}
        samples = []
        for _ in range(WARM_UPS):
            contender.ready()
            samples += contender.sample()
        contender.check()
        first_us[contender.name] = samples[0]
        for pid in contender.pids:
            forget_peak(pid)
        if contender.label.endswith("nixl"):
            measure.stop([contender])

    def block(contender: Contender) -> measure.Tally:
        samples = contender.sample()
        return measure.Tally(samples, len(samples))

    tallies = measure.take_turns(contenders, rounds, block, seed=contenders[0].name, warm=Contender.ready)
    records = []
    for contender in contenders:
        print(f"{contender.name}: {rounds} samples", flush=True)
        tally = tallies[contender.name]
        tally.extra["peak_bytes"] = contender.memory("VmHWM")
        if contender.label == RAYLANE:
            tally.extra |= _of_raylane(contender, memory[contender.name])
        records.append(measure.record(contender.case.name, contender.label, tally, first_us[contender.name]))
    return records


def _of_raylane(contender: Contender, before: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Return further fields of a record of raylane: the share of planning, and the memory that readers gained."""
    readers = contender.deployment.readers
    if contender.case.workload == COPIED:
        contender.ready()
        return {"planning_share": max(ray.get([reader.planning_share.remote() for reader in readers]))}
    if contender.case.workload != MAPPED:
        return {}
    nbytes = contender.case.nbytes // contender.case.parts
    gains = {
        kind: [after - before[kind][name] for name, after in contender.memory(kind).items() if "reader" in name]
        for kind in before
    }
    return {
        "gained_share": max(gains["RssAnon"]) / nbytes,
        "gained_bytes": gains["RssAnon"],
        "gained_pss": gains["Pss"],
    }


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return the records as text, and the goals with what was reached."""
    table = measure.table(records, {"x store": (STORE, "p50")})
    return "\n".join([table, *goals.lines(weights_cases.goals(records))])

"""Benchmark of tensor transfer: raylane's transports, those of Ray, and bare copies, in one run.

`measure` describes how contenders take turns. Called by `benchmarks.__main__`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import goals, measure
from benchmarks.local_ray import local_ray
from benchmarks.transfer import cases as transfer_cases
from benchmarks.transfer.cases import BASELINE, PASS, SIZES, Case, blocks_of, grouped
from benchmarks.transfer.contenders import Contender, start, unavailable


def run(selected: Sequence[Case], *, quick: bool) -> list[dict[str, Any]]:
    """Start Ray, run every case, and shut Ray down; return one record per case and contender.

    SystemExit if a case needs a GPU that this machine does not have.
    """
    if any(case.cuda for case in selected) and not torch.cuda.is_available():
        raise SystemExit("benchmarks: --cuda needs a GPU that torch can use (torch.cuda.is_available() is False)")
    with local_ray():
        records = [record for group in grouped(selected) for record in _run_group(group, quick=quick)]
    names = [case.name for case in selected]
    return sorted(records, key=lambda record: names.index(record["case"]))


def _run_group(group: Sequence[Case], *, quick: bool) -> list[dict[str, Any]]:
    """Run cases that use the same actors."""
    reasons = {name: unavailable(name) for name in group[0].contenders}
    for name, reason in reasons.items():
        if reason is not None:
            print(f"{group[0].name}: contender {name} left out, because {reason}", flush=True)
    contenders = start(group[0], [name for name, reason in reasons.items() if reason is None])
    try:
        return [record for case in group for record in _run_case(case, contenders, quick=quick)]
    finally:
        for contender in contenders:
            contender.close()


def _run_case(case: Case, contenders: Sequence[Contender], *, quick: bool) -> list[dict[str, Any]]:
    """Measure one case with all contenders; return one record for each."""
    rounds, samples = blocks_of(case, quick=quick)
    for contender in contenders:
        contender.prepare(case)
    first = {contender.name: contender.sample(case, 1)[0] for contender in contenders}
    for contender in contenders:  # warm up connections, memory pools and lazily loaded code
        contender.sample(case, 2)

    def block(contender: Contender) -> measure.Tally:
        return measure.Tally(contender.sample(case, samples), samples)

    tallies = measure.take_turns(contenders, rounds, block, seed=case.name)
    print(f"{case.name}: {rounds * samples} samples each", flush=True)
    return [measure.record(case.name, name, tally, first[name]) for name, tally in tallies.items()]


def table(records: list[dict[str, Any]]) -> str:
    """Return the records as text; column `x faster` is the baseline's p50 divided by the record's. Then the goals."""
    table = measure.table(records, {"x faster": (BASELINE, "p50")})
    return "\n".join([table, *goals.lines(goals.reached(transfer_cases.GOALS, records, transfer_cases.FLOORS))])


def draw(records: Sequence[dict[str, Any]], out: Path) -> None:
    """Draw time against size for all contenders, as a PNG: one picture for held tensors, one for new ones.

    Needs matplotlib (extra `sft`). ValueError if the records have no case that is a size.
    """
    from matplotlib.figure import Figure

    sizes = SIZES | {"1GB": 1_000_000_000}
    medians = {(row["case"], row["contender"]): row["p50_us"] for row in records}
    if not any(case in sizes for case, _ in medians):
        raise ValueError(f"the picture needs cases of tensor sizes, such as {', '.join(sizes)}")
    figure = Figure(figsize=(11, 4.5), layout="constrained", dpi=130)
    for axes, ending in zip(figure.subplots(1, 2, sharey=True), ("", "-new"), strict=True):
        for name in PASS:
            line = [
                (size, medians[case + ending, name]) for case, size in sizes.items() if (case + ending, name) in medians
            ]
            if line:
                style = "-o" if name.startswith("raylane") else "--s"
                axes.plot(*zip(*line, strict=True), style, label=name, markersize=4)
        axes.set(
            title="new tensor in every call" if ending else "tensor that the producer keeps",
            xscale="log",
            yscale="log",
            xlabel="size in bytes",
        )
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("time of one call and its transfer in us (p50)")
    figure.axes[0].legend(fontsize=8)
    figure.savefig(out)

"""The `raylane bench` command: measure this machine against stock Ray (`raylane.bench`) and write a report."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from raylane.bench import environment, graph_cases, sft_cases, transfer_cases
from raylane.cli.help import describe

CaseT = TypeVar("CaseT")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one sub-command for each benchmark."""
    commands = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    summary = "transfer of tensors between processes, against Ray's transports and bare copies"
    examples = (
        "raylane bench transfer --only 1MB,100MB-new",
        "raylane bench transfer --large --json transfer.json --plot transfer.png",
    )
    notes = (
        f"cases: {', '.join(case.name for case in transfer_cases.cases(large=True, only=None))}\n"
        "Contenders with NIXL take part if it is installed (pip install 'raylane[nixl]')."
    )
    transfer = commands.add_parser("transfer", help=summary, **describe(summary, *examples, notes=notes))
    transfer.add_argument("--large", action="store_true", help="include 1 GB tensors (needs about 12 GB of memory)")
    transfer.add_argument("--plot", type=Path, metavar="FILE", help="draw size against time (PNG; needs matplotlib)")
    summary = "calls through compiled graphs, one at a time and several in flight"
    examples = ("raylane bench graph --only echo,chain-4", "raylane bench graph --quick --json graph.json")
    notes = f"cases: {', '.join(graph_cases.CASES)}"
    graph = commands.add_parser("graph", help=summary, **describe(summary, *examples, notes=notes))
    summary = "steps of a worker group: what the driver adds to them, and training against plain torch"
    examples = ("raylane bench sft --only noop-8-worker-fed,train-2", "raylane bench sft --quick --json sft.json")
    notes = f"cases: {', '.join(sft_cases.CASES)}"
    sft = commands.add_parser("sft", help=summary, **describe(summary, *examples, notes=notes))
    for command in (transfer, graph, sft):
        command.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions and records to FILE")
        command.add_argument(
            "--quick", action="store_true", help="make few calls: a test that it runs; the results mean nothing"
        )
        command.add_argument("--only", metavar="CASE[,CASE]", help="run these cases only")


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark, print its table and write the report. Return the exit status."""
    measure = {"transfer": _transfer, "graph": _graph, "sft": _sft}[args.benchmark]
    records, text = measure(args)
    print(text)
    if args.json is not None:
        environment.write_report(args.json, records, quick=args.quick)
    return 0


def _transfer(args: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    chosen = _chosen(lambda: transfer_cases.cases(large=args.large, only=args.only))
    from raylane.bench import transfer  # imports torch and Ray

    records = transfer.run(chosen, quick=args.quick)
    if args.plot is not None:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        transfer.draw(records, args.plot)
        print(f"written to {args.plot}")
    return records, transfer.table(records)


def _graph(args: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    chosen = _chosen(lambda: graph_cases.cases(args.only))
    from raylane.bench import graph  # imports NumPy and Ray: a mistyped case name is answered before

    records = graph.run(chosen, quick=args.quick)
    return records, graph.table(records)


def _sft(args: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    chosen = _chosen(lambda: sft_cases.cases(args.only))
    from raylane.bench import sft  # imports torch and Ray

    records = sft.run(chosen, quick=args.quick)
    return records, sft.table(records)


def _chosen(cases: Callable[[], list[CaseT]]) -> list[CaseT]:
    """Return the chosen cases, or exit with a message that lists the known ones."""
    try:
        return cases()
    except ValueError as error:
        raise SystemExit(f"raylane bench: {error}") from None

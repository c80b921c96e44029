"""The `raylane bench` command: measure this machine against stock Ray (`raylane.bench`) and write a report."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raylane.bench import environment, graph_cases, rl_cases, sft_cases, transfer_cases, weights_cases
from raylane.cli.help import describe


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
        f"with --cuda: {', '.join(case.name for case in transfer_cases.cases(large=True, only=None, cuda=True))}\n"
        "Contenders with NIXL take part if it is installed (pip install 'raylane[nixl]')."
    )
    transfer = commands.add_parser("transfer", help=summary, **describe(summary, *examples, notes=notes))
    transfer.add_argument("--large", action="store_true", help="include 1 GB tensors (needs about 12 GB of memory)")
    transfer.add_argument("--cuda", action="store_true", help="move CUDA tensors between processes on one GPU instead")
    transfer.add_argument("--plot", type=Path, metavar="FILE", help="draw size against time (PNG; needs matplotlib)")
    summary = "calls through compiled graphs, one at a time and several in flight"
    examples = ("raylane bench graph --only echo,chain-4", "raylane bench graph --quick --json graph.json")
    notes = f"cases: {', '.join(graph_cases.CASES)}"
    graph = commands.add_parser("graph", help=summary, **describe(summary, *examples, notes=notes))
    summary = "steps of a worker group: what the driver adds to them, and training against plain torch"
    examples = ("raylane bench sft --only noop-8-worker-fed,train-2", "raylane bench sft --quick --json sft.json")
    notes = f"cases: {', '.join(sft_cases.CASES)}"
    sft = commands.add_parser("sft", help=summary, **describe(summary, *examples, notes=notes))
    summary = "weights from two ranks of a trainer to readers, against memcpy, Ray's transports, gloo and checkpoints"
    examples = (
        "raylane bench weights --only publish-100MB,move-2-100MB",
        "raylane bench weights --large --json weights.json",
    )
    notes = f"cases: {', '.join(case.name for case in weights_cases.cases(large=True, only=None))}"
    published = commands.add_parser("weights", help=summary, **describe(summary, *examples, notes=notes))
    published.add_argument("--large", action="store_true", help="include 1 GB of weights (needs about 16 GB of memory)")
    summary = "samples through a queue, and the loop of GRPO, against queues and a plain loop on Ray"
    examples = ("raylane bench rl --only queue-4KB", "raylane bench rl --quick --json rl.json")
    notes = f"cases: {', '.join(rl_cases.CASES)}"
    rl = commands.add_parser("rl", help=summary, **describe(summary, *examples, notes=notes))
    for command in (transfer, graph, sft, published, rl):
        command.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions and records to FILE")
        command.add_argument(
            "--quick", action="store_true", help="make few calls: a test that it runs; the results mean nothing"
        )
        command.add_argument("--only", metavar="CASE[,CASE]", help="run these cases only")


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark, print its table and write the report. Return the exit status."""
    choose: dict[str, Callable[[], list[Any]]] = {
        "transfer": lambda: transfer_cases.cases(large=args.large, only=args.only, cuda=args.cuda),
        "graph": lambda: graph_cases.cases(args.only),
        "sft": lambda: sft_cases.cases(args.only),
        "weights": lambda: weights_cases.cases(large=args.large, only=args.only),
        "rl": lambda: rl_cases.cases(args.only),
    }
    try:
        chosen = choose[args.benchmark]()
    except ValueError as error:
        raise SystemExit(f"raylane bench: {error}") from None
    # Imports torch and Ray: a mistyped case name is answered before.
    benchmark = importlib.import_module(f"raylane.bench.{args.benchmark}")
    records = benchmark.run(chosen, quick=args.quick)
    if args.benchmark == "transfer" and args.plot is not None:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        benchmark.draw(records, args.plot)
        print(f"written to {args.plot}")
    print(benchmark.table(records))
    if args.json is not None:
        environment.write_report(args.json, records, quick=args.quick)
    return 0

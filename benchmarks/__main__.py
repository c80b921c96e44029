"""Measure this machine against stock Ray, print a table and write a report: `python -m benchmarks NAME`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import environment
from raylane.cli.help import describe


class Benchmark(NamedTuple):
    """One benchmark. Its package has `cases.cases`, `run.run` and `run.table`."""

    summary: str
    arguments: tuple[str, ...]
    """Arguments of the examples in its help."""
    switches: tuple[tuple[str, str], ...] = ()
    """Switches that its `cases` takes, with what they do."""


BENCHMARKS = {
    "transfer": Benchmark(
        "transfer of tensors between processes, against Ray's transports and bare copies",
        ("--only 1MB,100MB-new", "--large --json transfer.json --plot transfer.png"),
        (
            ("large", "include 1 GB tensors (needs about 12 GB of memory)"),
            ("cuda", "move CUDA tensors between processes on one GPU instead"),
        ),
    ),
    "graph": Benchmark(
        "calls through compiled graphs, one at a time and several in flight",
        ("--only echo,chain-4", "--quick --json graph.json"),
    ),
    "sft": Benchmark(
        "steps of a worker group: what the driver adds to them, and training against plain torch",
        ("--only noop-8-worker-fed,train-2", "--quick --json sft.json"),
    ),
    "weights": Benchmark(
        "weights from two ranks of a trainer to readers, against memcpy, Ray's transports, gloo and checkpoints",
        ("--only publish-100MB,move-2-100MB", "--large --json weights.json"),
        (("large", "include 1 GB of weights (needs about 16 GB of memory)"),),
    ),
    "rl": Benchmark(
        "samples through a queue, and the loop of GRPO, against queues and a plain loop on Ray",
        ("--only queue-4KB", "--quick --json rl.json"),
    ),
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    summary = "compare the speed of raylane with stock Ray on this machine"
    examples = ("python -m benchmarks transfer", "python -m benchmarks graph --quick --only echo")
    parser = argparse.ArgumentParser(prog="python -m benchmarks", **describe(summary, *examples))
    commands = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name, benchmark in BENCHMARKS.items():
        known = importlib.import_module(f"benchmarks.{name}.cases").cases
        every = dict.fromkeys([switch for switch, _ in benchmark.switches if switch != "cuda"], True)
        notes = f"cases: {', '.join(case.name for case in known(only=None, **every))}\n"
        if name == "transfer":
            on_gpus = known(only=None, large=True, cuda=True)
            notes += f"with --cuda: {', '.join(case.name for case in on_gpus)}\n"
            notes += "Contenders with NIXL take part if it is installed (pip install 'raylane[nixl]')."
        calls = [f"python -m benchmarks {name} {arguments}" for arguments in benchmark.arguments]
        command = commands.add_parser(name, help=benchmark.summary, **describe(benchmark.summary, *calls, notes=notes))
        for switch, text in benchmark.switches:
            command.add_argument(f"--{switch}", action="store_true", help=text)
        command.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions and records to FILE")
        command.add_argument(
            "--quick", action="store_true", help="make few calls: a test that it runs; the results mean nothing"
        )
        command.add_argument("--only", metavar="CASE[,CASE]", help="run these cases only")
        if name == "transfer":
            text = "draw size against time (PNG; needs matplotlib)"
            command.add_argument("--plot", type=Path, metavar="FILE", help=text)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen benchmark, print its table and write the report. Return the exit status.

    SystemExit names a case that does not exist.
    """
    args = build_parser().parse_args(argv)
    package = f"benchmarks.{args.benchmark}"
    switches = {switch: getattr(args, switch) for switch, _ in BENCHMARKS[args.benchmark].switches}
    try:
        chosen = importlib.import_module(f"{package}.cases").cases(only=args.only, **switches)
    except ValueError as error:
        raise SystemExit(f"benchmarks: {error}") from None
    # Imports torch and Ray: a mistyped case name is answered before.
    benchmark = importlib.import_module(f"{package}.run")
    records = benchmark.run(chosen, quick=args.quick)
    print(benchmark.table(records))
    if getattr(args, "plot", None) is not None:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        benchmark.draw(records, args.plot)
        print(f"written to {args.plot}")
    if args.json is not None:
        environment.write_report(args.json, records, quick=args.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())

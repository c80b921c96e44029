"""`raylane bench`: measurements that anybody can repeat, against stock Ray, in one run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from raylane.cli import bench_graph_cases

Case = TypeVar("Case")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    words = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    transfer = words.add_parser("transfer", help="one tensor from actor to actor")
    _add_common(transfer, "1MB,100MB-new")
    transfer.add_argument("--large", action="store_true", help="1 GB too (needs some 8 GB of memory)")
    graph = words.add_parser("graph", help="calls through compiled graphs, one after the other and several in flight")
    _add_common(graph, "echo,chain-4")
    graph.epilog = f"cases: {', '.join(bench_graph_cases.CASES)}"


def _add_common(word: argparse.ArgumentParser, some: str) -> None:
    word.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions and records to FILE")
    word.add_argument("--quick", action="store_true", help="few calls: to see that it runs, not to quote")
    word.add_argument("--only", metavar="CASE[,CASE]", help=f"these cases only, e.g. {some}")


def run(args: argparse.Namespace) -> int:
    records, text = _transfer(args) if args.benchmark == "transfer" else _graph(args)
    print(text)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        report = {"machine": machine(), "versions": versions(), "quick": args.quick, "records": records}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
        print(f"written to {args.json}")
    return 0


def _transfer(args: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    from raylane.cli import bench_transfer  # imports torch

    wanted = _chosen(lambda: bench_transfer.cases(large=args.large, only=args.only))
    records = bench_transfer.run(wanted, quick=args.quick)
    return records, bench_transfer.table(records)


def _graph(args: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    wanted = _chosen(lambda: bench_graph_cases.cases(args.only))
    from raylane.cli import bench_graph

    records = bench_graph.run(wanted, quick=args.quick)
    return records, bench_graph.table(records)


def _chosen(cases: Callable[[], list[Case]]) -> list[Case]:
    """The cases, or the end of the command with a message that names those there are."""
    try:
        return cases()
    except ValueError as error:
        raise SystemExit(f"raylane bench: {error}") from None


def machine() -> dict[str, Any]:
    """What a reader must know to compare figures; nothing that names the machine's owner."""
    with open("/proc/cpuinfo") as file:
        models = {line.partition(":")[2].strip() for line in file if line.startswith("model name")}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": ", ".join(sorted(models)) or platform.processor(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "load_at_end": os.getloadavg(),
    }


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("raylane", "ray", "torch", "numpy", "nixl"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found

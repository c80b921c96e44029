"""`raylane bench`: measurements that anybody can repeat, against stock Ray, in one run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from raylane.cli import bench_transfer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    words = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    transfer = words.add_parser("transfer", help="one tensor from actor to actor")
    transfer.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions and records to FILE")
    transfer.add_argument("--quick", action="store_true", help="few calls: to see that it runs, not to quote")
    transfer.add_argument("--large", action="store_true", help="1 GB too (needs some 8 GB of memory)")
    transfer.add_argument("--only", metavar="CASE[,CASE]", help="these cases only, e.g. 1MB,100MB-new")


def run(args: argparse.Namespace) -> int:
    cases = bench_transfer.cases(large=args.large, only=args.only)
    records = bench_transfer.measure(cases, quick=args.quick)
    print(bench_transfer.table(records))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        report = {"machine": machine(), "versions": versions(), "quick": args.quick, "records": records}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
        print(f"written to {args.json}")
    return 0


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

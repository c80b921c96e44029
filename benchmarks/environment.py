"""Facts about the machine and the installed versions that a reader needs in order to compare benchmark results."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from raylane.core.process.environment import WORKER_NICENESS


def machine() -> dict[str, Any]:
    """Return the hardware, kernel and load of this machine; nothing that identifies its owner."""
    import torch

    with open("/proc/cpuinfo") as file:
        models = {line.partition(":")[2].strip() for line in file if line.startswith("model name")}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": ", ".join(sorted(models)) or platform.processor(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "load_at_end": os.getloadavg(),
        "niceness": worker_niceness(),
    }


def worker_niceness() -> int | None:
    """Return the niceness of actors in `local_ray`; None in a running cluster, which was started with its own."""
    return None if os.environ.get("RAY_ADDRESS") else int(os.environ.get(WORKER_NICENESS, 0))


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that affect results; None for a package not installed."""
    versions_by_name: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("raylane", "ray", "torch", "numpy", "nixl", "vllm"):
        try:
            versions_by_name[name] = version(name)
        except PackageNotFoundError:
            versions_by_name[name] = None
    return versions_by_name


def write_report(path: Path, records: Sequence[Mapping[str, Any]], *, quick: bool) -> None:
    """Write machine, versions and records to a JSON file, and print its path. Creates the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine(), "versions": versions(), "quick": quick, "records": records}
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {path}")

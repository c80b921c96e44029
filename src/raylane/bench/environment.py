"""Facts about the machine and the installed versions that a reader needs in order to compare benchmark results."""

from __future__ import annotations

import importlib
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def machine() -> dict[str, Any]:
    """Return the hardware, kernel and load of this machine; nothing that identifies its owner."""
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
    """Return the versions of Python and of the packages that affect results; None for a package not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("raylane", "ray", "torch", "numpy", "nixl", "vllm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    if wheel := os.environ.get("RAYLANE_VLLM_WHEEL"):
        found["vllm"] = os.path.basename(os.path.normpath(wheel))
    return found


def native() -> dict[str, bool]:
    """Return {"native": True} if raylane's hot path runs as native code, False if as Python.

    Empty for a raylane that has no native code.
    """
    try:
        module = importlib.import_module("raylane.core.native")
    except ModuleNotFoundError:
        return {}
    found = getattr(module, "NATIVE", None)
    return {} if found is None else {"native": bool(found)}

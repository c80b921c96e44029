"""Run of a benchmark as a user starts it, with few calls."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def quick_run(name: str, only: str, out: Path) -> tuple[dict[str, Any], str]:
    """Run cases of a benchmark with `--quick`; return the report that it writes to `out`, and what it prints."""
    command = [sys.executable, "-m", "benchmarks", name, "--quick", "--only", only, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(out.read_text())
    return report, done.stdout

"""The example runs as its first line says, in a process of its own, and prints what it should."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_example_runs() -> None:
    done = subprocess.run(
        [sys.executable, "examples/direct_transport.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if ": " in line and not line.startswith(("\x1b", "("))]
    shown = {line.split(":")[0].strip(): line.split(":")[1].strip() for line in lines}
    assert shown["summed by the consumer"][:6] == shown["summed by the driver"][:6] == shown["through Ray's store"][:6]
    assert shown["one of them"] == "(1000, 1000)"
    assert float(shown["put by an actor"]) == 2_000_000

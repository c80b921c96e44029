"""Runs an example in a process of its own, as its docstring tells the user to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def output_of(name: str) -> str:
    """Return the output of `examples/NAME`; fail if the program fails."""
    done = subprocess.run(
        [sys.executable, f"examples/{name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
        # Without an address, Ray would connect to the last cluster that anybody has started on this machine.
        env={"RAY_ADDRESS": "local", **os.environ},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

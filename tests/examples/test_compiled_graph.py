"""The example of the compiled-graph page runs in a process of its own, and prints what the page shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_example_runs_and_the_page_shows_its_output() -> None:
    done = subprocess.run(
        [sys.executable, "examples/compiled_graph.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs/howto/graphs.md").read_text()
    shown = done.stdout[done.stdout.index("graph of 3 actors") :].strip()
    for line in shown.splitlines():
        assert line in page

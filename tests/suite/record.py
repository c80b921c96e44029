"""Record of a test run: seconds of each file, and a log of each failed test, in build/tests.

`tests/conftest.py` registers a `Recorder` in the process that controls a run. `durations.py` and `outcome.py` read what
it writes.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "tests"
PHASES = ("setup", "call", "teardown")


class Recorder:
    """Plugin of pytest that adds up the seconds of each phase by file, and keeps the text of each failure."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._seconds: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PHASES, 0.0))
        self._failed: dict[str, str] = {}
        """Path of the log, below the root, of each failed test by its id."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a report; write the log of a failure at once, because the run may be killed before its end."""
        file = report.nodeid.partition("::")[0]
        self._seconds[file][report.when] += report.duration
        if report.failed:
            self._keep(report.nodeid, report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep the text of a file that could not be imported."""
        if report.failed:
            self._keep(report.nodeid, report)

    def _keep(self, nodeid: str, report: Any) -> None:
        path = self._folder / "failed" / f"{re.sub(r'[^A-Za-z0-9_.=-]+', '-', nodeid)[-150:]}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        sections = [f"{title}\n{content}" for title, content in report.sections]
        with path.open("a", encoding="utf-8") as file:
            file.write("\n\n".join([nodeid, report.longreprtext, *sections]) + "\n")
        self._failed[nodeid] = os.path.relpath(path, ROOT)
        self._write()
        # At once, because a run that is ended from outside prints no summary.
        print(f"\nFAILED {nodeid}: {reason(report)}", flush=True)

    def pytest_sessionfinish(self) -> None:
        """Write the record of this run."""
        self._write()

    def _write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        record = {
            "files": self._seconds,
            "failed": self._failed,
        }
        (self._folder / f"run-{os.getpid()}.json").write_text(json.dumps(record, indent=1))


def reason(report: Any) -> str:
    """Return the first line of the error of a failed test or of a file that could not be imported."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else report.longreprtext).strip().splitlines()
    return lines[0][:300] if lines else ""


def records(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Return the records of all runs in a folder, oldest first."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("run-*.json"), key=os.path.getmtime)]

"""Last lines of a failed run of CI: which tests failed, where their logs are, and how to run them alone."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tests.suite.record import records

MOST_LINES = 10


def last_lines(runs: Sequence[Mapping[str, Any]], stage: str) -> list[str]:
    """Return at most ten lines about failed tests; without any, the stage of `.ci/run` that failed."""
    failed = {nodeid: log for run in runs for nodeid, log in run["failed"].items()}
    if not failed:
        return [
            f"`make {stage}` failed, and no test did: the cause is above. Run `make {stage}` alone to see it again."
        ]
    command = f"make only ARGS={shlex.quote(' '.join(shlex.quote(nodeid) for nodeid in failed))}"
    shown = list(failed.items())[: MOST_LINES - 3]
    lines = [f"FAILED: {len(failed)} tests", *(f"{nodeid}  log: {log}" for nodeid, log in shown)]
    if len(failed) > len(shown):
        lines.append(f"and {len(failed) - len(shown)} more, with logs in build/tests/failed")
        command = f"make only ARGS={shlex.quote(' '.join(sorted({nodeid.partition('::')[0] for nodeid in failed})))}"
    return [*lines, f"alone: {command}"]


if __name__ == "__main__":
    print("\n".join(last_lines(records(), sys.argv[1])))

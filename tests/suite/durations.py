"""Table of the seconds of each test file, with a budget for each: tests/durations.txt.

`make durations` runs all tests and writes the table; `make durations ARGS=tests/graph` only the rows of these files. A
budget goes down by itself and up by hand: a file that needs more seconds needs another number in the same commit.
`tests/suite/test_durations.py` checks the table. No test measures time: the table does, when it is written.
"""

from __future__ import annotations

import ast
import datetime
import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.suite.affected import files_with_tests
from tests.suite.record import PHASES, records

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "durations.txt"
LIMIT_S = 3000
"""Most seconds that the budgets of all files may have together, for each of the two test processes."""
PROCESSES = 2


@dataclass(frozen=True)
class Row:
    """Seconds of one file in one run, and the most that it may take."""

    file: str
    budget: int
    setup: float = 0.0
    call: float = 0.0
    teardown: float = 0.0
    functions: int = 0
    """Number of test functions that the file had when it was measured."""

    @property
    def seconds(self) -> float:
        return self.setup + self.call + self.teardown


def sum_up(runs: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the seconds of each phase by file. A file that ran twice, by two selections of tests, has the sum."""
    total: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PHASES, 0.0))
    for run in runs:
        for file, measured in run["files"].items():
            for phase in PHASES:
                total[file][phase] += measured[phase]
    return total


def updated(
    rows: Mapping[str, Row], measured: Mapping[str, Mapping[str, float]], functions: Mapping[str, int]
) -> dict[str, Row]:
    """Return the table after a run: new seconds, lower budgets, rows for new files and none for files that are gone.

    A budget is a quarter and one second above the measured time. One that exists is never raised.
    """
    merged = {file: row for file, row in rows.items() if file in functions}
    for file, of_file in measured.items():
        if (count := functions.get(file)) is None:
            continue
        row = Row(file, 0, *(round(of_file[phase], 1) for phase in PHASES), count)
        budget = math.ceil(row.seconds * 1.25 + 1)
        merged[file] = replace(row, budget=min(budget, rows[file].budget) if file in rows else budget)
    return merged


def problems(rows: Mapping[str, Row], functions: Mapping[str, int]) -> list[str]:
    """Return what is wrong with a table, a line each; `functions` has the number of test functions of each file."""
    lines = []
    for file, count in functions.items():
        row = rows.get(file)
        if row is None:
            lines.append(f"{file} has no row. Run `make durations ARGS={file}`.")
        elif row.functions != count:
            lines.append(
                f"{file} has {count} test functions, its row {row.functions}. Run `make durations ARGS={file}`."
            )
    for row in rows.values():
        if row.file not in functions:
            lines.append(f"{row.file} has a row, but does not exist. Delete the row.")
        if row.seconds > row.budget:
            lines.append(f"{row.file} took {row.seconds:.1f} s of {row.budget}. Make it quicker, or raise its budget.")
    total = sum(row.budget for row in rows.values())
    if total > LIMIT_S * PROCESSES:
        lines.append(
            f"All budgets are {total} s, the limit is {PROCESSES} x {LIMIT_S}. Make the dearest files quicker."
        )
    return lines


def count_of_tests(path: Path) -> int:
    """Return the number of test functions in a file."""
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return sum(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_") for node in tree
    )


def functions_of_files(root: Path = ROOT) -> dict[str, int]:
    """Return the number of test functions of each test file, except of those that CI cannot run."""
    skipped = {"gpu", "vllm", "release"}
    return {file: count_of_tests(root / file) for file in files_with_tests(root) if file.split("/")[1] not in skipped}


def read(text: str) -> dict[str, Row]:
    """Return the rows of a table."""
    rows = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            budget, setup, call, teardown, functions, file = line.split(maxsplit=5)
            rows[file] = Row(file, int(budget), float(setup), float(call), float(teardown), int(functions))
    return rows


def written(rows: Mapping[str, Row], heading: str) -> str:
    """Return the text of a table, the dearest files first."""
    total, budget = sum(row.seconds for row in rows.values()), sum(row.budget for row in rows.values())
    lines = [
        f"# {heading}",
        f"# {total:.0f} s of {PROCESSES} test processes together, budgets {budget} s; written by `make durations`.",
        "# budget setup   call teardown functions file",
    ]
    for row in sorted(rows.values(), key=lambda row: (-row.budget, row.file)):
        lines.append(f"{row.budget:8} {row.setup:5} {row.call:6} {row.teardown:8} {row.functions:9} {row.file}")
    return "\n".join(lines) + "\n"


def machine() -> str:
    """Return the processor and the date of a measurement."""
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    return f"{os.cpu_count()} cores, {cpu.partition(': ')[2] or os.uname().machine}, {datetime.date.today()}"


def main() -> int:
    """Write the table from the records of the last runs; return 1 if a file is above its budget."""
    rows = read(TABLE.read_text()) if TABLE.exists() else {}
    functions = functions_of_files()
    rows = updated(rows, sum_up(records()), functions)
    TABLE.write_text(written(rows, machine()))
    print("\n".join(written(rows, machine()).splitlines()[:13]))
    print("\n".join(lines := problems(rows, functions)))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())

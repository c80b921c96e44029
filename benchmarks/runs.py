"""Records of the newest runs of a benchmark, and texts of what was measured: medians over the runs, and ranges."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from benchmarks.goals import P50, P99, Goal, figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
Records: TypeAlias = Mapping[tuple[str, str], Mapping[str, Any]]
"""Records of one run by case and contender."""


class Measured(NamedTuple):
    """A figure of several runs."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Measured:
        """Return the figure of runs that gave these values."""
        return cls(statistics.median(values), min(values), max(values))


class Runs:
    """The runs of one benchmark on the newest day that has any: `NAME-DATE.json`, or `NAME-DATE-1.json` and on."""

    def __init__(self, benchmark: str, folder: Path = RESULTS) -> None:
        dated = re.compile(rf"{benchmark}-(\d{{4}}-\d\d-\d\d)(-\d+)?\.json")
        paths = {path: match[1] for path in folder.iterdir() if (match := dated.fullmatch(path.name))}
        self.date = max(paths.values())
        self._reports = [json.loads(path.read_text()) for path in sorted(paths) if paths[path] == self.date]
        self.machine: dict[str, Any] = self._reports[0]["machine"]
        self.records: list[Records] = [
            {(record["case"], record["contender"]): record for record in report["records"]} for report in self._reports
        ]

    @cached_property
    def of_all(self) -> Records:
        """Records that every run has, those of the first run."""
        first, *others = self.records
        return {key: record for key, record in first.items() if all(key in other for other in others)}

    def cases(self, pattern: str = ".*") -> list[str]:
        """Return the cases whose names match a pattern as a whole, each once."""
        return list(dict.fromkeys(case for case, _ in self.of_all if re.fullmatch(pattern, case)))

    def has(self, case: str, contender: str) -> bool:
        """Return True if every run has this record."""
        return (case, contender) in self.of_all

    def measured(self, of: Callable[[Records], float]) -> Measured:
        """Return what a function of the records of one run gives."""
        return Measured.of([of(records) for records in self.records])

    def get(self, case: str, contender: str, name: str = P50) -> float:
        """Return the median of a figure of a record over the runs."""
        return self.measured(lambda records: figure(records[case, contender], name)).median

    def ratio(self, case: str, over: str, under: str, name: str = P50) -> Measured:
        """Return how many times the figure of `under` fits into that of `over`, in the same run."""
        return self.measured(lambda records: figure(records[case, over], name) / figure(records[case, under], name))

    def times(self, case: str, contender: str) -> str:
        """Return p50 and p99 of a record, medians over the runs; "" if the contender does not take part."""
        if not self.has(case, contender):
            return ""
        return f"{time(self.get(case, contender))} / {time(self.get(case, contender, P99))}"

    def goals(self, goals_of: Callable[[list[Any]], list[Goal]]) -> list[list[Goal]]:
        """Return, for each goal of one run, that goal in every run."""
        of_each_run = [goals_of(list(records.values())) for records in self.records]
        return [list(same) for same in zip(*of_each_run, strict=True)]

    def number(self) -> str:
        """Return the date, and how many runs there are."""
        return f"{self.date}, {'one run' if len(self._reports) == 1 else f'{len(self._reports)} runs'}"

    def origin(self) -> str:
        """Return when, how often and on what was measured."""
        machine, versions = self.machine, self._reports[0]["versions"]
        return (
            f"{self.number()}, {machine['cores']} cores ({machine['cpu']}), "
            f"Linux {machine['kernel'].partition('-')[0]}, CPython {versions['python']}, Ray {versions['ray']}, torch "
            f"{versions['torch'].partition('+')[0]}"
        )


def time(microseconds: float, micro: str = "us") -> str:
    """Return a time with three significant digits and its unit."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= 0.9995 * size:
            return f"{digits(microseconds / size)} {unit}"
    return f"{digits(microseconds)} {micro}"


def digits(number: float) -> str:
    """Return a number with three significant digits."""
    return f"{number:.0f}" if number >= 99.95 else f"{number:.3g}"


def _short(ratio: float) -> str:
    return digits(ratio) if ratio >= 10 else f"{ratio:.2g}"


def factor(ratio: Measured) -> str:
    """Return a ratio such as 12.8x (11 to 13): the median, and the range if there are several runs."""
    least, most = _short(ratio.least), _short(ratio.most)
    return f"{_short(ratio.median)}x" + (f" ({least} to {most})" if least != most else "")


def row(cells: Iterable[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cells)} |".replace("|  ", "| ")


def table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join([row(head), row(["---"] * len(head)), *map(row, rows)])


def with_parts(text: str, kind: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """Return a page with its generated parts of one kind made anew: `<!-- KIND: PART -->` to `<!-- end of KIND -->`.

    KeyError for an unknown part.
    """
    return re.sub(
        rf"(<!-- {kind}: (\w+) -->\n).*?(\n<!-- end of {kind} -->)",
        lambda match: match[1] + parts[match[2]]() + match[3],
        text,
        flags=re.DOTALL,
    )


def goal_table(goals: Iterable[Sequence[Goal]]) -> str:
    """Return the number of goals that were reached in all runs, and the others as a table with values and floors."""
    rows, goals = [], list(goals)
    for same in goals:
        first, count = same[0], sum(goal.reached for goal in same)
        if count == len(same):
            continue
        value = Measured.of([goal.value for goal in same])
        shown = f"{value.median:.2f}"
        if len(same) > 1:
            shown += f" ({value.least:.2f} to {value.most:.2f})"
        bound = "at least" if first.at_least else "at most"
        runs = "all" if not count else f"{len(same) - count}/{len(same)}"
        limit = f"{bound} {first.limit:g} {first.unit}"
        floor = f"{first.floor} {time(statistics.median(goal.floor_us for goal in same))}" if first.floor else ""
        rows.append([first.case, first.text, f"{shown} {first.unit}", limit, runs, floor])
    reached = f"Of {len(goals)} targets {len(goals) - len(rows)} were reached"
    if not rows:
        return f"{reached}."
    head = ["case", "figure", "measured", "goal", "runs missed", "floor"]
    shown_columns = len(head) if any(floor for *_, floor in rows) else len(head) - 1
    return f"{reached}; the others:\n\n" + table(head[:shown_columns], [row[:shown_columns] for row in rows])

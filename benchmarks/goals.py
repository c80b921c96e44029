"""Goals of the benchmarks: a figure of some records, and the limit that it should keep. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

P50, P99, FIRST, CPU = "p50_us", "p99_us", "first_us", "cpu_us"
"""Fields of records, and the CPU time of a call, which follows from two fields."""


class Goal(NamedTuple):
    """A figure of a case with its limit."""

    case: str
    text: str
    value: float
    limit: float
    unit: str
    at_least: bool = False
    """True if the limit is the least value, False if it is the largest."""
    floor: str = ""
    """Contender that shows what the machine can do, as text; empty for none."""
    floor_us: float = 0.0
    """The same figure of that contender, in microseconds."""

    @property
    def reached(self) -> bool:
        """True if the goal is reached."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        bound = "at least" if self.at_least else "at most"
        verdict = "reached" if self.reached else "missed"
        floor = f"  ({self.floor}: {self.floor_us:,.1f} us)" if self.floor else ""
        return f"{self.case:22}{self.text:52}{self.value:9.2f} {self.unit:3}{bound:>9} {self.limit:g}  {verdict}{floor}"


class Ratio(NamedTuple):
    """A goal that follows from one or two records of a case: a quotient, or a time in milliseconds."""

    case: str
    text: str
    over: tuple[str, ...]
    """Contenders; the least figure of those that have a record counts."""
    under: str
    """Contender whose figure divides; empty for a time in milliseconds."""
    limit: float
    at_least: bool = False
    figures: tuple[str, str] = (P50, P50)
    """Fields of the records of `over` and `under`."""
    under_case: str = ""
    """Case of the record that divides, if it is another one."""

    def goal(self, rows: Mapping[tuple[str, str], Mapping[str, Any]], floors: Mapping[str, str]) -> Goal | None:
        """Return the goal with its value and the first of the floors (texts by contender); None without the records."""
        least = [figure(rows[self.case, name], self.figures[0]) for name in self.over if (self.case, name) in rows]
        divisor = rows.get((self.under_case or self.case, self.under))
        if not least or (self.under and divisor is None):
            return None
        # Without a contender that divides, the figure is a time: from microseconds to milliseconds.
        by = 1000.0 if divisor is None else figure(divisor, self.figures[1])
        goal = Goal(self.case, self.text, min(least) / by, self.limit, "x" if self.under else "ms", self.at_least)
        floor = next((name for name in floors if (self.case, name) in rows), None)
        if floor is None or not self.figures[0].endswith("_us"):
            return goal
        return goal._replace(floor=floors[floor], floor_us=figure(rows[self.case, floor], self.figures[0]))


def faster(case: str, text: str, other: str | tuple[str, ...], ours: str, factor: float, figure: str = P50) -> Ratio:
    """Return the goal to be `factor` times as fast as another contender, or as the best of several."""
    over = (other,) if isinstance(other, str) else other
    return Ratio(case, text, over, ours, factor, at_least=True, figures=(figure, figure))


def at_most(case: str, text: str, ours: str, other: str, factor: float, figure: str = P50) -> Ratio:
    """Return the goal to take at most `factor` times as long as another contender."""
    return Ratio(case, text, (ours,), other, factor, figures=(figure, figure))


def figure(row: Mapping[str, Any], name: str) -> float:
    """Return a figure of a record: a field, or the CPU time of a call in microseconds."""
    return float(row["cpu_s"] / row["n"] * 1e6 if name == CPU else row[name])


def reached(
    ratios: Iterable[Ratio], records: Sequence[Mapping[str, Any]], floors: Mapping[str, str] | None = None
) -> list[Goal]:
    """Return the goals for which there are records. `floors` are texts by contender, the most telling first."""
    rows = {(row["case"], row["contender"]): row for row in records}
    return [goal for ratio in ratios if (goal := ratio.goal(rows, floors or {})) is not None]


def lines(goals: Sequence[Goal]) -> list[str]:
    """Return goals as lines of text, with an empty line and a title before them."""
    return ["", "goals", *map(str, goals)] if goals else []

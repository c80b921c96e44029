"""The README, the site and the page of figures quote the same dated runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import figures, goals, runs


@pytest.mark.parametrize("page", figures.PAGES)
def test_figures_of_pages_are_those_of_the_newest_runs(page: str) -> None:
    text = (runs.ROOT / page).read_text()
    assert figures.filled(text) == text, "run `make figures`"


def test_every_generated_part_is_on_a_page() -> None:
    pages = "".join((runs.ROOT / page).read_text() for page in figures.PAGES)
    assert set(re.findall(r"<!-- figures: (\w+) -->", pages)) == set(figures.PARTS)


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [(6.7, "6.7 us"), (999.4, "999 us"), (999.6, "1 ms"), (16957.2, "17 ms"), (231080.4, "231 ms"), (3.66e6, "3.66 s")],
)
def test_times_have_three_digits_and_a_unit(microseconds: float, text: str) -> None:
    assert runs.time(microseconds) == text


def written(folder: Path, name: str, case: str = "echo", niceness: int = 0, **medians_us: float) -> None:
    records = [
        {
            "case": case,
            "contender": contender.replace("_", ":"),
            "n": 10,
            "cpu_s": 1e-3,
            "p50_us": us,
            "p99_us": 2 * us,
        }
        for contender, us in medians_us.items()
    ]
    machine = {"cores": 2, "cpu": "Some CPU", "kernel": "6.18.4-x", "niceness": niceness}
    versions = {"python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0+cpu"}
    (folder / name).write_text(json.dumps({"machine": machine, "versions": versions, "records": records}))


def test_figures_are_medians_over_the_runs_of_the_newest_day(tmp_path: Path) -> None:
    written(tmp_path, "graph-2026-11-25.json", raylane=1, ray_compiled=1)
    written(tmp_path, "graph-2026-11-26-1.json", raylane=10, ray_compiled=120, loop=1)
    written(tmp_path, "graph-2026-11-26-2.json", raylane=30, ray_compiled=150)
    written(tmp_path, "graph-2026-11-26-3.json", raylane=20, ray_compiled=100)
    written(tmp_path, "graph-more-2026-11-27.json", raylane=7)
    measured = runs.Runs("graph", tmp_path)
    assert measured.date == "2026-11-26"
    assert measured.times("echo", "raylane") == "20 us / 40 us"
    assert measured.times("echo", "loop") == ""  # not in every run
    assert measured.ratio("echo", "ray:compiled", "raylane") == (5, 5, 12)
    assert runs.factor(measured.ratio("echo", "ray:compiled", "raylane")) == "5x (5 to 12)"
    assert "2026-11-26, 3 runs, 2 cores (Some CPU), Linux 6.18.4, CPython 3.11.7" in measured.origin()
    ratio = goals.faster("echo", "faster", "ray:compiled", "raylane", 6)
    missing = goals.faster("other", "faster", "ray:compiled", "raylane", 6)
    table = runs.goal_table(measured.goals(lambda records: goals.reached([ratio, missing], records)))
    assert table.startswith("Of 1 targets 0 were reached; the others:\n\n| case |")
    assert table.splitlines()[4:] == ["| echo | faster | 5.00 (5.00 to 12.00) x | at least 6 x | 2/3 |"]


def test_missed_goals_have_their_floor_beside_them(tmp_path: Path) -> None:
    written(tmp_path, "graph-2026-11-26-1.json", raylane=10, ray_compiled=20, ring=4)
    written(tmp_path, "graph-2026-11-26-2.json", raylane=10, ray_compiled=20, ring=6)
    ratios = [goals.at_most("echo", "of Ray's", "raylane", "ray:compiled", 0.1)]
    measured = runs.Runs("graph", tmp_path)
    table = runs.goal_table(measured.goals(lambda records: goals.reached(ratios, records, {"ring": "bare ring"})))
    assert table.splitlines()[2:] == [
        "| case | figure | measured | goal | runs missed | floor |",
        "| --- | --- | --- | --- | --- | --- |",
        "| echo | of Ray's | 0.50 (0.50 to 0.50) x | at most 0.1 x | all | bare ring 5 us |",
    ]


def test_busy_table_has_a_second_part_for_niced_actors(tmp_path: Path) -> None:
    written(tmp_path, "graph-2026-11-26.json", "echo-busy1", raylane=10)
    row = "| echo-busy1 | 10 us / 20 us | | | |"
    assert figures.graph_busy(tmp_path).splitlines()[2:] == [row]
    written(tmp_path, "graph-niceness-2026-11-27.json", "echo-busy1", niceness=15, raylane=10)
    lines = figures.graph_busy(tmp_path).splitlines()
    assert lines[2:5] == [row, "", "With actors of niceness 15 (2026-11-27, one run):"]
    assert lines[-1] == row


def test_one_run_has_no_range(tmp_path: Path) -> None:
    written(tmp_path, "graph-2026-11-25.json", raylane=10, ray_compiled=120)
    measured = runs.Runs("graph", tmp_path)
    assert runs.factor(measured.ratio("echo", "ray:compiled", "raylane")) == "12x"
    assert ", one run, " in measured.origin()
    ratio = goals.at_most("echo", "of Ray's", "raylane", "ray:compiled", 0.1)
    table = runs.goal_table(measured.goals(lambda records: goals.reached([ratio], records)))
    assert table == "Of 1 targets 1 were reached."

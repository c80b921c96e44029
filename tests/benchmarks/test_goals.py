"""Goals of benchmarks: what they compare, and that they name cases and contenders that exist."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.goals import CPU, FIRST, P50, Goal, Ratio, at_most, faster, lines, reached
from benchmarks.graph import cases as graph_cases
from benchmarks.sft import cases as sft_cases
from benchmarks.transfer import cases as transfer_cases


def record(contender: str, us: float, case: str = "echo", **more: float) -> dict[str, Any]:
    return {"case": case, "contender": contender, "p50_us": us, "first_us": 5 * us, "cpu_s": us / 1e5, "n": 20} | more


def test_goals_compare_two_records() -> None:
    records = [record("ours", 10), record("theirs", 60), record("other", 40), record("ours", 30, "fan")]
    ratios = [
        faster("echo", "faster", "theirs", "ours", 6),
        faster("echo", "faster than the better", ("theirs", "other", "absent"), "ours", 6),
        at_most("echo", "of theirs", "ours", "theirs", 0.1),
        faster("echo", "less CPU", "theirs", "ours", 5, CPU),
        Ratio("echo", "first", ("ours",), "ours", 3, figures=(FIRST, P50)),
        Ratio("echo", "time", ("ours",), "", 0.01),
        Ratio("fan", "8 readers, of one", ("ours",), "ours", 2, under_case="echo"),
        faster("echo", "faster", "absent", "ours", 6),
        faster("absent", "faster", "theirs", "ours", 6),
    ]
    found = reached(ratios, records)
    assert [round(goal.value, 3) for goal in found] == [6, 4, 0.167, 6, 5, 0.01, 3]
    assert [goal.reached for goal in found] == [True, False, False, True, False, True, False]
    assert [goal.unit for goal in found] == ["x", "x", "x", "x", "x", "ms", "x"]
    assert lines(found)[:2] == ["", "goals"]
    assert lines(found)[2].split() == ["echo", "faster", "6.00", "x", "at", "least", "6", "reached"]
    assert lines([]) == []
    assert str(Goal("echo", "of", 2, 1, "x")).endswith("at most 1  missed")


def test_goals_carry_the_first_floor_that_took_part() -> None:
    floors = {"absent": "bare NIXL", "ring": "bare ring", "loop": "loop"}
    records = [record("ours", 10), record("ring", 4), record("loop", 1), record("ours", 10, "fan")]
    ratios = [
        at_most("echo", "of the ring", "ours", "ring", 2),
        at_most("echo", "CPU", "ours", "ring", 2, CPU),
        Ratio("fan", "time", ("ours",), "", 1),
        Ratio("echo", "calls", ("ours",), "ring", 1, figures=("n", "n")),
    ]
    found = reached(ratios, records, floors)
    assert [(goal.floor, round(goal.floor_us, 3)) for goal in found] == [
        ("bare ring", 4),
        ("bare ring", 2),
        ("", 0),  # no floor took part
        ("", 0),  # not a time
    ]
    assert str(found[0]).endswith("at most 2  missed  (bare ring: 4.0 us)")
    assert reached(ratios, records)[0].floor == ""


@pytest.mark.parametrize("cases", [graph_cases, transfer_cases, sft_cases])
def test_goals_name_cases_and_contenders_that_exist(cases: Any) -> None:
    known = transfer_cases.cases(large=True, only=None) if cases is transfer_cases else cases.cases(None)
    by_name = {case.name: case for case in known}
    for ratio in cases.GOALS:
        assert set(ratio.over) <= set(by_name[ratio.case].contenders), ratio
        assert ratio.under in ("", *by_name[ratio.under_case or ratio.case].contenders), ratio
    for floor in getattr(cases, "FLOORS", ()):
        assert any(floor in case.contenders for case in known), floor

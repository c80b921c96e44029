"""The table of durations: its arithmetic, and that the one in the repository keeps all budgets."""

from __future__ import annotations

import pytest
from tests.suite import durations
from tests.suite.durations import Row

A, B = "tests/graph/test_a.py", "tests/graph/test_b.py"


def measured(seconds: float) -> dict[str, float]:
    return {"setup": 1.0, "call": seconds - 1.0, "teardown": 0.0}


def test_update_lowers_a_budget_and_never_raises_one() -> None:
    rows = {A: Row(A, 30, 1, 20, 0, 2), B: Row(B, 5, 1, 3, 0, 1)}
    new = durations.updated(rows, {A: measured(8.0), B: measured(9.0)}, {A: 3, B: 1})
    assert new[A] == Row(A, 11, 1.0, 7.0, 0.0, 3)
    assert new[B] == Row(B, 5, 1.0, 8.0, 0.0, 1)
    assert durations.problems(new, {A: 3, B: 1}) == [f"{B} took 9.0 s of 5. Make it quicker, or raise its budget."]


def test_update_drops_files_that_are_gone_and_keeps_others() -> None:
    rows = {A: Row(A, 30, 1, 20, 0, 2), B: Row(B, 5, 1, 3, 0, 1)}
    assert durations.updated(rows, {"tests/gpu/test_c.py": measured(2)}, {A: 2}) == {A: rows[A]}


def test_table_with_a_changed_file_names_the_command() -> None:
    lines = durations.problems({A: Row(A, 30, 1, 20, 0, 2)}, {A: 3, B: 1})
    assert lines == [
        f"{A} has 3 test functions, its row 2. Run `make durations ARGS={A}`.",
        f"{B} has no row. Run `make durations ARGS={B}`.",
    ]


def test_sum_of_budgets_has_a_limit() -> None:
    limit = durations.LIMIT_S * durations.PROCESSES
    assert durations.problems({A: Row(A, limit)}, {A: 0}) == []
    assert "All budgets are" in durations.problems({A: Row(A, limit + 1)}, {A: 0})[0]


def test_records_of_runs_add_up_by_file() -> None:
    total = durations.sum_up([{"files": {A: measured(3)}}, {"files": {A: measured(4)}}])
    assert total == {A: {"setup": 2.0, "call": 5.0, "teardown": 0.0}}


def test_written_table_is_read_again() -> None:
    rows = {A: Row(A, 30, 1.2, 20.5, 0.1, 2), B: Row(B, 5, 1, 3, 0, 1)}
    assert durations.read(durations.written(rows, "2 cores")) == rows


def test_repository_keeps_its_budgets() -> None:
    if not durations.TABLE.exists():
        pytest.fail("tests/durations.txt is missing: run `make durations`")
    assert durations.problems(durations.read(durations.TABLE.read_text()), durations.functions_of_files()) == []

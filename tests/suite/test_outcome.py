"""The last lines of a failed run, and what they are read from."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.suite.outcome import last_lines
from tests.suite.record import Recorder, records


def test_failed_tests_are_named_with_logs_and_a_command() -> None:
    failed = {"tests/graph/test_a.py::test_b[x y]": "build/tests/failed/a.log"}
    assert last_lines([{"failed": failed}, {"failed": {}}], "test-ci") == [
        "FAILED: 1 tests",
        "tests/graph/test_a.py::test_b[x y]  log: build/tests/failed/a.log",
        """alone: make only ARGS=''"'"'tests/graph/test_a.py::test_b[x y]'"'"''""",
    ]


def test_many_failed_tests_fit_into_ten_lines() -> None:
    failed = {f"tests/graph/test_{i % 3}.py::test_{i}": f"build/{i}.log" for i in range(50)}
    lines = last_lines([{"failed": failed}], "test-ci")
    assert len(lines) == 10
    assert lines[-2:] == [
        "and 43 more, with logs in build/tests/failed",
        "alone: make only ARGS='tests/graph/test_0.py tests/graph/test_1.py tests/graph/test_2.py'",
    ]


def test_failure_without_a_failed_test_names_the_stage() -> None:
    assert "`make check` failed" in last_lines([], "check")[0]


def test_recorder_keeps_seconds_and_the_log_of_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(tmp_path)
    for when, failed in (("setup", False), ("call", True)):
        recorder.pytest_runtest_logreport(
            SimpleNamespace(  # type: ignore[arg-type]
                nodeid="tests/a/test_b.py::test_c[x/y]",
                when=when,
                duration=1.5,
                failed=failed,
                longrepr=SimpleNamespace(reprcrash=SimpleNamespace(message="assert 1 == 2\n where 1 = f()")),
                longreprtext="assert 1 == 2",
                sections=[("Captured stdout", "printed")],
            )
        )
    assert capsys.readouterr().out == "\nFAILED tests/a/test_b.py::test_c[x/y]: assert 1 == 2\n"
    (record,) = records(tmp_path)
    assert record["files"] == {"tests/a/test_b.py": {"setup": 1.5, "call": 1.5, "teardown": 0.0}}
    (path,) = (tmp_path / "failed").iterdir()
    assert path.read_text() == "tests/a/test_b.py::test_c[x/y]\n\nassert 1 == 2\n\nCaptured stdout\nprinted\n"
    assert list(record["failed"]) == ["tests/a/test_b.py::test_c[x/y]"]

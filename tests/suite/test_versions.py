"""Versions that raylane is tested with: pairs and commands, counts of runs, and tables in the docs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.suite import version_runs, versions
from tests.suite.durations import count_of_tests
from tests.suite.versions import ROOT, Pair

from raylane._ray_names import CHECKED_ON

JUNIT = """<?xml version="1.0"?><testsuites><testsuite errors="0" failures="1" skipped="1" tests="3" time="12.6">
<testcase classname="tests.graph.test_run" name="test_a" />
<testcase classname="tests.graph.test_run" name="test_b[1]"><failure message="assert 0">x</failure></testcase>
<testcase classname="tests.graph.test_run" name="test_c"><skipped message="no GPU" /></testcase>
</testsuite></testsuites>"""
RUN = {"date": "2026-11-27", "commit": "0", "passed": 4000, "failed": 0, "skipped": 3, "seconds": 60, "failures": []}
FAILED = {
    **RUN,
    "date": "2026-11-28",
    "passed": 90,
    "failed": 2,
    "failures": ["tests/a.py::test_b", "tests/a.py::test_c"],
}
BUILD = {"python": "3.12.1", "torch": "2.13.0+cpu"}
ENTRIES: dict[str, dict[str, Any]] = {
    "ray-2.57.0-py3.11": {**BUILD, "python": "3.11.7", "fast": RUN, "on_ray": {**RUN, "passed": 170}},
    "ray-2.57.0-py3.12": {"missing": "no wheel"},
    "ray-2.58.1-py3.12": {**BUILD, "fast": RUN, "on_ray": FAILED},
    "ray-2.59.0-py3.12": {**BUILD, "fast": RUN},
}


def test_pairs_begin_with_newest_and_oldest_ray_on_python_3_12() -> None:
    everything = versions.pairs()
    assert len(set(everything)) == len(versions.RAYS) * len(versions.PYTHONS)
    assert [pair.name for pair in everything[:3]] == ["ray-2.60.0-py3.12", "ray-2.57.0-py3.12", "ray-2.58.1-py3.12"]
    assert versions.pairs(["2.58.1"], ["3.13"]) == [Pair("2.58.1", "3.13")]
    with pytest.raises(ValueError, match=r"PYTHONS must be among 3\.11, 3\.12, 3\.13, got 3\.10"):
        versions.pairs(["2.58.1"], ["3.10"])


def test_candidates_are_those_on_the_path_then_newest_of_pyenv() -> None:
    of_pyenv = ["3.12.1", "3.11.7", "3.12.10", "3.1.2", "miniforge-3.12"]
    assert versions.candidates("3.12", ["/usr/bin", "/opt/bin"], of_pyenv) == [
        "/usr/bin/python3.12",
        "/opt/bin/python3.12",
        "versions/3.12.10/bin/python3.12",
        "versions/3.12.1/bin/python3.12",
    ]


def test_requirements_leave_out_ray_torch_and_other_nixl() -> None:
    text = "# torch==1\nnixl-cu12==1.5\nnixl-cu13==1.5\nnixl==1.5\nray==2.60.0\ntorch==2.13.0+cpu\ntorchx==1\n"
    assert versions.requirements(text, "nixl-cu12") == ["nixl-cu12==1.5", "nixl==1.5", "torchx==1"]
    assert versions.pin(text, "torch") == "torch==2.13.0+cpu"


def test_outcome_counts_tests_and_names_failures() -> None:
    assert versions.outcome(JUNIT, 1) == {
        "passed": 1,
        "failed": 1,
        "skipped": 1,
        "seconds": 13,
        "failures": ["tests/graph/test_run.py::test_b[1]"],
    }


@pytest.mark.parametrize(("junit", "status"), [(None, 124), (JUNIT.replace("failure", "other"), 3)])
def test_outcome_without_failed_test_names_the_status(junit: str | None, status: int) -> None:
    counts = versions.outcome(junit, status)
    assert (counts["failed"], counts["failures"]) == (1, [f"pytest ended with status {status}"])


def test_record_keeps_the_other_stage_of_a_pair() -> None:
    pair = Pair("2.57.0", "3.12")
    first = versions.updated(ENTRIES, pair, {**BUILD, "fast": RUN})
    assert first[pair.name] == {**BUILD, "fast": RUN}
    assert versions.updated(first, pair, {**BUILD, "on_ray": FAILED})[pair.name] == {
        **BUILD,
        "fast": RUN,
        "on_ray": FAILED,
    }
    assert versions.updated(first, pair, {"missing": "no wheel"}) == ENTRIES


def test_tables_show_counts_failures_and_what_is_missing() -> None:
    assert versions.passed(ENTRIES).splitlines() == [
        "Tests passed on x86-64 Linux, fast+on Ray (2026-11-27 to 2026-11-28; CPython 3.11.7 (torch 2.13.0+cpu), "
        "3.12.1 (torch 2.13.0+cpu)):",
        "",
        "| CPython | Ray 2.57.0 | Ray 2.58.1 | Ray 2.59.0 | Ray 2.60.0 |",
        "| --- | --- | --- | --- | --- |",
        "| 3.11 | 4,000+170 | not run | not run | not run |",
        "| 3.12 | no wheel | 2 of 4,092 failed | 4,000+0 | not run |",
        "| 3.13 | not run | not run | not run | not run |",
    ]


def test_readme_has_one_row_for_pythons_with_the_same_rays() -> None:
    entries = {**ENTRIES, "ray-2.57.0-py3.13": {"fast": RUN, "on_ray": RUN}}
    assert versions.tested(entries).splitlines()[2:] == [
        "| CPython | Ray |",
        "| --- | --- |",
        "| 3.11, 3.13 | 2.57.0 |",
    ]


def test_rays_that_passed_have_a_whole_pair_and_no_failure() -> None:
    assert versions.rays_that_passed(ENTRIES) == ("2.57.0",)
    assert versions.rays_that_passed({**ENTRIES, "ray-2.57.0-py3.13": {"fast": FAILED}}) == ()


def test_last_lines_name_logs_and_the_command_to_repeat() -> None:
    failed = {
        Pair("2.58.1", "3.12"): ["tests/a.py::test_b[x]"],
        Pair("2.59.0", "3.12"): [f"tests/a.py::test_{number}" for number in range(6)],
        Pair("2.60.0", "3.12"): ["pytest ended with status 4"],
    }
    lines = versions.last_lines(failed, Path("build/versions"))
    assert lines[:3] == [
        "FAILED: 3 pairs",
        "ray-2.58.1-py3.12: tests/a.py::test_b[x]",
        "  logs: build/versions/ray-2.58.1-py3.12  again: "
        """make test-versions RAY="2.58.1" PYTHONS="3.12" ARGS=''"'"'tests/a.py::test_b[x]'"'"''""",
    ]
    assert lines[3].endswith("tests/a.py::test_4; and more")
    assert lines[4].endswith('PYTHONS="3.12" ARGS=tests/a.py')
    assert lines[6].endswith('PYTHONS="3.12"')


def test_files_on_ray_exist_and_have_tests() -> None:
    for name in versions.ON_RAY:
        files = [ROOT / name] if name.endswith(".py") else sorted((ROOT / name).glob("test_*.py"))
        assert sum(map(count_of_tests, files)), name


def test_tests_that_do_not_run_for_a_pair_exist() -> None:
    for test in versions.NOT_OF_A_PAIR:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text()


def test_build_of_torch_for_cuda_has_the_version_of_the_pins() -> None:
    cpu = versions.pin(version_runs.CONSTRAINTS, "torch")
    assert f"{cpu.partition('+')[0]}\n" in version_runs.CUDA_PINS.read_text()


@pytest.mark.parametrize("page", versions.PAGES)
def test_tables_of_pages_are_those_of_the_record(page: str) -> None:
    text = (ROOT / page).read_text()
    assert text.count("<!-- versions: ") == 1
    assert versions.with_tables(text, versions.record()) == text, "run `make test-versions`"


def test_checked_versions_are_those_of_the_record() -> None:
    assert versions.rays_that_passed(versions.record()) == CHECKED_ON

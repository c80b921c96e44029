"""Versions of Ray and CPython that raylane is tested with: the pairs, what runs for each, and the table in the docs.

All functions but `record` are pure. `tests/suite/version_runs.py` makes the environments, runs the tests, and writes
`tests/versions.json` and the tables; `make test-versions` calls it.
"""

from __future__ import annotations

import json
import shlex
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.runs import table, with_parts

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests" / "versions.json"
PAGES = ("README.md", "docs/reference/limits.md")
RAYS = ("2.57.0", "2.58.1", "2.59.0", "2.60.0")
PYTHONS = ("3.11", "3.12", "3.13")

ON_RAY = {
    "tests/core": "the module in C beside processes that die, and shared memory, on each CPython",
    "tests/transport/test_consumers.py": "every kind of reader: actors, tasks, drivers, threads, asyncio",
    "tests/transport/test_lifetime.py": "Ray's callback at the end of a ref, and borrowed refs",
    "tests/transport/test_reads.py": "reads into memory, device and dtype of the caller",
    "tests/transport/test_source_loss.py": "states of dead actors and owners, as Ray reports them",
    "tests/transport/test_user_defaults.py": "transfers under defaults of torch that a program has changed",
    "tests/transport/test_ray_plugin.py": "raylane as a transport of Ray's direct transport",
    "tests/transport/test_register.py": "transports written for Ray's direct transport",
    "tests/transport/test_tracing.py": "hooks of Ray's traces around calls",
    "tests/graph/test_run.py": "deployment into actors, executions, teardown",
    "tests/graph/test_values.py": "every kind of value along an edge, and Ray's pickler",
    "tests/graph/test_fail_fast.py": "errors of methods, and executions after them",
    "tests/graph/test_restarts.py": "actors that Ray restarts",
    "tests/graph/test_asyncio.py": "actors and drivers with event loops of Ray",
    "tests/graph/test_references.py": "counts of references inside values",
    "tests/graph/test_metrics.py": "metrics in Ray's own export",
    "tests/workers/test_group.py": "placement, environment and logs of the actors of a group",
    "tests/weights/test_weights.py": "named and detached actors, versions and readers",
    "tests/weights/test_attach.py": "torch modules and Hugging Face models as readers",
    "tests/training/test_ray_session.py": "connection to a Ray that already runs",
    "tests/cli/test_doctor.py": "`raylane doctor` between all places",
    "tests/rules/test_ray_names.py": "the check of private names at the first use",
    "tests/examples": "the first programs of the README and of the how-tos",
}
"""Test files and folders of which all tests that are not fast run for each pair, with what they prove about a version.

Files that prove the same about Ray, or only about training and networks, are left out: a pair takes six minutes.
"""
NOT_OF_A_PAIR = {
    "tests/suite/test_durations.py::test_repository_keeps_its_budgets": "seconds of the development environment",
    "tests/suite/test_versions.py::test_checked_versions_are_those_of_the_record": "the record that these runs write",
}
"""Fast tests that do not run for a pair, with what they are about."""
STAGES = {
    "fast": (
        *("-n", "auto", "--dist", "loadfile", "-m", "fast"),
        *(f"--deselect={test}" for test in NOT_OF_A_PAIR),
    ),
    "on_ray": (
        *("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"),
        *("-m", "not fast and not matrix and not gpu", *ON_RAY),
    ),
}
"""Arguments of pytest for each of the two runs of a pair."""
NIXL = {"cpu": "nixl-cu12", "cuda": "nixl-cu13"}
"""Build of NIXL for each build of torch; that for a CPU needs the libraries of no device."""
LIMIT_S = 3600
"""Seconds after which a run is ended, so that a run that hangs does not stop those of the other pairs."""


class Pair(NamedTuple):
    """A version of Ray with a version of CPython."""

    ray: str
    python: str

    @property
    def name(self) -> str:
        return f"ray-{self.ray}-py{self.python}"


def pairs(rays: Sequence[str] = RAYS, pythons: Sequence[str] = PYTHONS) -> list[Pair]:
    """Return all pairs: the CPython with most users first, and for each the newest Ray, the oldest, and the others.

    ValueError for a version that is not in the table.
    """
    for option, names, known in (("RAY", rays, RAYS), ("PYTHONS", pythons, PYTHONS)):
        if unknown := sorted(set(names) - set(known)):
            raise ValueError(f"{option} must be among {', '.join(known)}, got {', '.join(unknown)}")
    first_pythons = [*(["3.12"] if "3.12" in pythons else []), *(name for name in pythons if name != "3.12")]
    ends = [name for name in (RAYS[-1], RAYS[0]) if name in rays]
    return [
        Pair(ray, python) for python in first_pythons for ray in [*ends, *(name for name in rays if name not in ends)]
    ]


def candidates(python: str, search_path: Iterable[str], pyenv_versions: Iterable[str]) -> list[str]:
    """Return the programs that may be this CPython: those on the search path, then those of pyenv, the newest first."""
    numbered = sorted(
        (tuple(map(int, version.split("."))), version)
        for version in pyenv_versions
        if version.rpartition(".")[0] == python and version.replace(".", "").isdigit()
    )
    on_path = [f"{folder}/python{python}" for folder in search_path]
    return [*on_path, *(f"versions/{version}/bin/python{python}" for _, version in reversed(numbered))]


def requirements(constraints: str, nixl: str) -> list[str]:
    """Return what is installed beside Ray and torch, from the text of constraints.txt, with this build of NIXL."""
    pins = [line for line in constraints.splitlines() if "==" in line and not line.startswith("#")]
    left_out = {"ray", "torch", *NIXL.values()} - {nixl}
    return [pin for pin in pins if pin.partition("==")[0] not in left_out]


def pin(constraints: str, name: str) -> str:
    """Return the line of constraints.txt for a package."""
    return next(line for line in constraints.splitlines() if line.startswith(f"{name}=="))


def outcome(junit: str | None, status: int) -> dict[str, Any]:
    """Return the counts of a run from the text of pytest's JUnit file, None without one, and its exit status."""
    counts: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0, "failures": []}
    for suite in ElementTree.fromstring(junit).iter("testsuite") if junit else ():
        counts["seconds"] += round(float(suite.attrib["time"]))
        for case in suite.iter("testcase"):
            kinds = {child.tag for child in case}
            kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            counts[kind] += 1
            if kind == "failed":
                file = case.attrib.get("classname", "").replace(".", "/")
                counts["failures"].append(f"{file}.py::{case.attrib['name']}")
    if status and not counts["failed"]:
        counts["failed"] = 1
        counts["failures"].append(f"pytest ended with status {status}")
    return counts


def updated(entries: Mapping[str, Any], pair: Pair, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record with a new entry of a pair; a stage that did not run now keeps its last counts."""
    earlier = {} if "missing" in entry else entries.get(pair.name, {})
    kept = {key: value for key, value in earlier.items() if key != "missing"}
    return dict(sorted({**entries, pair.name: {**kept, **entry}}.items()))


def failures_of(entry: Mapping[str, Any]) -> list[str]:
    """Return the tests that failed in the stages of a pair's entry."""
    return [test for stage in STAGES for test in entry.get(stage, {}).get("failures", ())]


def has_passed(entry: Mapping[str, Any]) -> bool:
    """Return True if both runs of a pair passed."""
    return all(stage in entry for stage in STAGES) and not failures_of(entry)


def rays_that_passed(entries: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the versions of Ray with a pair whose two runs passed, and no pair with a failure, the oldest first."""
    rays = []
    for ray in RAYS:
        of_ray = [entries.get(Pair(ray, python).name, {}) for python in PYTHONS]
        if any(map(has_passed, of_ray)) and not any(map(failures_of, of_ray)):
            rays.append(ray)
    return tuple(rays)


def cell(entry: Mapping[str, Any]) -> str:
    """Return the text of a pair in the table: numbers of passed tests of both runs, or why there are none."""
    if "missing" in entry:
        return str(entry["missing"])
    runs = [entry[stage] for stage in STAGES if stage in entry]
    if failed := sum(run["failed"] for run in runs):
        return f"{failed} of {failed + sum(run['passed'] for run in runs):,} failed"
    numbers = [f"{entry[stage]['passed']:,}" if stage in entry else "0" for stage in STAGES]
    return "+".join(numbers) if runs else "not run"


def dates(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the day of all runs, or the first and the last one."""
    days = sorted(entry[stage]["date"] for entry in entries.values() for stage in STAGES if stage in entry)
    return " to ".join(dict.fromkeys([days[0], days[-1]])) if days else "never"


def builds(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the full versions of CPython, each with its build of torch."""
    of_all = {(entry["python"], entry["torch"]) for entry in entries.values() if "torch" in entry}
    numbered = sorted(of_all, key=lambda build: [int(number) for number in build[0].split(".")])
    return ", ".join(f"{python} (torch {torch})" for python, torch in numbered)


def passed(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the part of the page of limits: a row for each CPython, a column for each Ray."""
    heading = f"Tests passed on x86-64 Linux, fast+on Ray ({dates(entries)}; CPython {builds(entries)}):"
    rows = [[python, *(cell(entries.get(Pair(ray, python).name, {})) for ray in RAYS)] for python in PYTHONS]
    return "\n".join([heading, "", table(["CPython", *(f"Ray {ray}" for ray in RAYS)], rows)])


def tested(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the part of the README: the pairs that passed, a row for all CPythons with the same versions of Ray."""
    pythons: dict[str, list[str]] = {}
    for python in PYTHONS:
        rays = [ray for ray in RAYS if has_passed(entries.get(Pair(ray, python).name, {}))]
        pythons.setdefault(", ".join(rays), []).append(python)
    rows = [[", ".join(names), rays] for rays, names in pythons.items() if rays]
    return "\n".join([f"Tests pass on x86-64 ({dates(entries)}) with:", "", table(["CPython", "Ray"], rows)])


def with_tables(page: str, entries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text of a page with its tables of versions made anew."""
    return with_parts(page, "versions", {"passed": lambda: passed(entries), "tested": lambda: tested(entries)})


def repeat_command(pair: Pair, words: str = "") -> str:
    """Return the command that runs a pair again, or only the tests that `words` name, in its environment."""
    narrowed = f" ARGS={shlex.quote(words)}" if words else ""
    return f'make test-versions RAY="{pair.ray}" PYTHONS="{pair.python}"{narrowed}'


def last_lines(failed: Mapping[Pair, Sequence[str]], logs: Path) -> list[str]:
    """Return the lines after all runs: for each pair that failed, why, its logs and the command that repeats it.

    The command runs the tests that failed, or their files if there are many; the whole pair if no test failed.
    """
    lines = [f"FAILED: {len(failed)} pairs" if failed else "All pairs passed, or have no environment."]
    for pair, reasons in failed.items():
        shown = [*reasons[:5], *(["and more"] if len(reasons) > 5 else [])]
        tests = [shlex.quote(reason) for reason in reasons if "::" in reason]
        words = tests if len(tests) <= 5 else sorted({test.strip("'").partition("::")[0] for test in tests})
        lines.append(f"{pair.name}: {'; '.join(shown)}")
        lines.append(f"  logs: {logs / pair.name}  again: {repeat_command(pair, ' '.join(words))}")
    return lines


def record() -> dict[str, Any]:
    """Return the record of the repository: an entry for each pair that was run or that cannot be."""
    return dict(json.loads(RECORD.read_text())) if RECORD.exists() else {}

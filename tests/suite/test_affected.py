"""Choice of tests for a change: pure rules, and their agreement with the imports of the package and the tests."""

from __future__ import annotations

import functools

import pytest
from tests.suite import affected, imports

FILES = [f"tests/{folder}/test_of_{folder}.py" for folder in (*affected.TESTED, affected.TESTING, *affected.ALWAYS)]
RULES = {f"tests/{folder}/test_of_{folder}.py" for folder in affected.ALWAYS}
NO_HELPERS: dict[str, frozenset[str]] = {}


def folders(*changed: str, helpers: dict[str, frozenset[str]] = NO_HELPERS) -> set[str]:
    """Return the folders of tests that a change runs, besides the rules."""
    files = affected.affected(changed, FILES, helpers).files
    assert files >= RULES
    return {file.split("/")[1] for file in files - RULES}


def folders_on_ray(*changed: str) -> set[str]:
    return {file.split("/")[1] for file in affected.affected(changed, FILES, NO_HELPERS).on_ray}


TOP = {"benchmarks", "cli", "examples", "gpu", "release", "vllm"}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("src/raylane/cli/doctor.py", TOP),
        ("src/raylane/sft/data/rows.py", TOP | {"sft", "nemo"}),
        ("src/raylane/rl/trainer.py", TOP | {"rl", "nemo"}),
        ("src/raylane/training/run/step.py", TOP | {"sft", "rl", "nemo", "training"}),
        ("src/raylane/weights/layout/plan.py", TOP | {"weights"}),
        ("src/raylane/workers/group.py", TOP | {"sft", "rl", "nemo", "training", "weights", "workers", "testing"}),
        ("src/raylane/graph/nodes.py", TOP | {"weights", "workers", "graph", "testing"}),
        ("src/raylane/transport/api.py", {*affected.TESTED, "testing"} - {"core", "training", "sft", "rl", "nemo"}),
        ("tests/sft/tiny_run.py", {"sft"}),
        ("tests/sft/test_of_sft.py", {"sft"}),
        ("examples/sft.yaml", {"examples", "cli", "sft"}),
        ("benchmarks/studies/weights_delta.py", {"benchmarks"}),
        ("docs/index.md", {"examples"}),
        ("README.md", {"examples"}),
        ("tests/durations.txt", set()),
        ("tests/rules/test_of_rules.py", set()),
    ],
)
def test_change_runs_its_package_and_those_above(changed: str, expected: set[str]) -> None:
    assert folders(changed) == expected


def test_change_of_what_acts_on_ray_leaves_out_tests_without_ray() -> None:
    for package in ("transport", "graph", "weights"):
        assert folders_on_ray(f"src/raylane/{package}/module.py") == {"training", "sft", "rl", "nemo"}
    assert folders_on_ray("src/raylane/workers/group.py") == set()
    assert folders_on_ray("src/raylane/graph/api.py", "src/raylane/sft/data/rows.py") == {"training", "rl"}


@pytest.mark.parametrize(
    "changed",
    [
        ".ci/run",
        "Makefile",
        "constraints.txt",
        "pyproject.toml",
        "src/raylane/_ray.py",
        "src/raylane/core/memory/segment.py",
        "src/raylane/errors.py",
        "src/raylane/testing/leaks.py",
        "src/raylane/new_package/module.py",
        "tests/conftest.py",
        "tests/networks.py",
        "new_folder/file.txt",
    ],
)
def test_change_below_everything_runs_everything(changed: str) -> None:
    assert affected.affected(["docs/index.md", changed], FILES, NO_HELPERS).files == set(FILES)


def test_helpers_bring_the_folders_that_import_them() -> None:
    helpers = {"rl": frozenset({"sft"}), "vllm": frozenset({"rl"}), "sft": frozenset[str]()}
    assert folders("tests/sft/tiny_run.py", helpers=helpers) == {"sft", "rl", "vllm"}
    assert folders("src/raylane/sft/config/load.py", helpers=helpers) == TOP | {"sft", "rl", "nemo"}


def test_quarters_cover_all_files_in_four_landings() -> None:
    files = [f"tests/graph/test_{number}.py" for number in range(40)]
    proven_at, run = [7, 7, 7, 7], set()
    for commits in (9, 12, 15, 18):
        due = affected.quarter_due(proven_at)
        choice = affected.chosen(["docs/index.md"], proven_at, files, NO_HELPERS)
        assert not run & choice.files
        run |= choice.files
        proven_at[due] = commits
    assert run == set(files)


def test_quarter_of_an_unknown_commit_is_due_first() -> None:
    assert affected.quarter_due([9, 0, 3, 0]) == 1


def test_unknown_start_runs_everything() -> None:
    assert affected.chosen(None, [0, 0, 0, 0], FILES, NO_HELPERS).files == set(FILES)


def test_changed_test_file_runs_alone_beside_the_quarter() -> None:
    choice = affected.affected(["tests/rl/test_of_rl.py", "tests/rl/test_gone.py"], FILES, NO_HELPERS)
    assert choice.files == {*RULES, "tests/rl/test_of_rl.py"} | {file for file in FILES if "/rl/" in file}
    assert affected.affected(["tests/rl/test_of_rl.py"], FILES, NO_HELPERS).files == {*RULES, "tests/rl/test_of_rl.py"}


Imports = dict[str, set[str]]
"""Imported names of each file, by its path below the root."""


@functools.cache
def imports_of_files() -> Imports:
    paths = [*(affected.ROOT / "src" / "raylane").rglob("*.py"), *(affected.ROOT / "tests").glob("*/**/*.py")]
    return {path.relative_to(affected.ROOT).as_posix(): imports.imports_of(path) for path in sorted(paths)}


@functools.cache
def helper_folders() -> dict[str, frozenset[str]]:
    return imports.helper_folders()


def edges_without_tests(imports_by_file: Imports) -> list[str]:
    """Return each import whose target can change without the tests of the importing file, as a line."""
    helpers, wrong = helper_folders(), []
    for file, names in imports_by_file.items():
        words = file.split("/")
        folder = words[1] if words[0] == "tests" else words[2]
        if folder in affected.ALWAYS or (words[0] == "src" and folder not in affected.LAYERS):
            continue  # run by every change, or the root of the package, which everything depends on
        for used in sorted(imports.packages_of(names, affected.LAYERS) - {folder, "core"}):
            uppermost = affected.REACHES_ABOVE.get(file)
            runs = folder in affected.folders_above(used, helpers) or (
                uppermost and affected.may_import(uppermost, used)
            )
            if not runs:
                wrong.append(f"{file} imports {used}")
    return wrong


def test_files_that_reach_above_run_for_the_upper_package() -> None:
    files = [*affected.REACHES_ABOVE, "tests/weights/test_plan.py"]
    choice = affected.affected(["src/raylane/cli/doctor.py"], files, NO_HELPERS)
    assert choice.files == {file for file, uppermost in affected.REACHES_ABOVE.items() if uppermost == "cli"}


def test_files_that_a_package_does_not_run_exist() -> None:
    listed = {file for files in affected.NOT_FOR.values() for file in files}
    assert listed <= set(affected.files_with_tests())


def test_change_of_fine_tuning_leaves_out_what_training_computes() -> None:
    files = ["tests/sft/test_parallel.py", "tests/sft/test_trainer.py", "tests/benchmarks/test_weights.py"]
    for changed, expected in (
        ("src/raylane/sft/data/rows.py", files[1:2]),
        ("src/raylane/training/run/step.py", files[:2]),
        ("src/raylane/weights/layout/plan.py", []),
        ("benchmarks/goals.py", files[2:]),
    ):
        choice = affected.affected([changed], files, NO_HELPERS)
        assert choice.files == set(expected)
    assert affected.affected(
        ["src/raylane/sft/run/worker.py", "src/raylane/core/process/vm.py"], files, NO_HELPERS
    ).files == {*files}


def test_choice_agrees_with_all_imports() -> None:
    assert edges_without_tests(imports_of_files()) == []


@pytest.mark.parametrize(
    ("file", "name", "package"),
    [
        ("src/raylane/transport/api.py", "raylane.sft.run.trainer", "sft"),
        ("src/raylane/rl/trainer.py", "raylane.cli.main", "cli"),
        ("tests/graph/test_nodes.py", "raylane.weights.Publisher", "weights"),
    ],
)
def test_choice_disagrees_with_an_import_that_runs_upward(file: str, name: str, package: str) -> None:
    known = imports_of_files()
    assert edges_without_tests({**known, file: known[file] | {name}}) == [f"{file} imports {package}"]


def test_every_test_file_is_in_a_known_folder() -> None:
    known = {*affected.TESTED, affected.TESTING, *affected.ALWAYS}
    assert {file.split("/")[1] for file in affected.files_with_tests()} <= known

"""Choice of the test files that a change can break, and of a quarter of the others.

Imports between packages of `src/raylane` run one way (`tests/rules/test_imports.py`), so a change can break the tests
of its own package and of packages that may import it, and no others. `tests/proven.json` names the commits at which
all tests, and each quarter of the files, passed last.

All functions but `changed_files`, `commit_counts` and `main` are pure. `make test-ci` calls `main`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROVEN = ROOT / "tests" / "proven.json"

LAYERS = ("core", "transport", "graph", "workers", "weights", "training", "sft", "rl", "nemo", "cli")
"""Packages of `src/raylane`, in an order in which each may import what stands to its left."""
SIDE_BY_SIDE = frozenset({"sft", "rl"})
"""Packages that do not import each other, although one stands to the left of the other."""

TESTED = {
    **{package: package for package in LAYERS},
    "benchmarks": "cli",
    "examples": "cli",
    "release": "cli",
    "vllm": "cli",
    "gpu": "cli",
}
"""Uppermost package of `src/raylane` that each folder of tests, with its helpers, may import."""
REACHES_ABOVE = {
    "tests/core/traces/record.py": "graph",
    "tests/graph/test_operations.py": "workers",
    "tests/graph/test_references.py": "workers",
    "tests/sft/test_dynamic.py": "nemo",
    "tests/sft/test_export.py": "cli",
    "tests/sft/test_mixing.py": "nemo",
    "tests/sft/test_report.py": "cli",
    "tests/sft/test_seed_defects.py": "nemo",
    "tests/sft/test_starter.py": "nemo",
    "tests/transport/test_tls.py": "graph",
    "tests/transport/test_tracing.py": "cli",
    "tests/weights/test_readers.py": "cli",
    "tests/weights/test_weights.py": "cli",
}
"""Uppermost package of files that import a package above that of their folder; they run for it, too."""
_OF_TRAINING = frozenset(
    f"tests/sft/test_{name}.py"
    for name in (
        "defaults",
        "division",
        "expert_folders",
        "expert_parallel",
        "hf_export",
        "hf_reader",
        "layers",
        "layouts",
        "lora",
        "megatron",
        "memory",
        "memory_limit",
        "memory_table",
        "model_types",
        "muon",
        "networks",
        "no_waiting",
        "options_in_parallel",
        "options_on_workers",
        "parallel",
        "publish_weights",
        "type_layouts",
        "unshared",
        "warmup",
    )
)
"""Files whose claims are about `training`; `sft` only gives them configuration and rows, which its own tests check."""
_ON_RAY_FOR_TRAINING = frozenset(
    f"tests/sft/test_{name}.py" for name in ("options_on_workers", "storage_runs", "unshared")
)
"""Files on Ray whose claims are about optimizers and storage: `transport`, `graph` and `weights` carry their bytes."""
_BENCH = frozenset(f"tests/benchmarks/test_{name}.py" for name in ("graph", "rl", "sft", "transfer", "weights"))
"""Files with short runs of benchmarks, whose claims are about `benchmarks`: which cases there are, what they write."""
NOT_FOR: dict[str, frozenset[str]] = {
    **dict.fromkeys(("transport", "graph", "weights"), _BENCH | _ON_RAY_FOR_TRAINING),
    **dict.fromkeys(("workers", "training", "rl", "cli"), _BENCH),
    "sft": _BENCH | _OF_TRAINING,
}
"""Files that a change of a package does not run, although their folder runs; in every fourth landing they run anyway.

Their fast tests always run, and the types of all modules are always checked.
"""
TESTING = "testing"
"""Folder of the tests of `raylane.testing`. They may import up to `workers`."""
TRAINING = frozenset({"training", "sft", "rl", "nemo"})
"""Folders with tests that compute without Ray: in the test process, or in plain processes as ranks."""
ON_RAY = frozenset({"transport", "graph", "weights"})
"""Packages that the folders of `TRAINING` use in processes of Ray only: changes cannot break tests without Ray.

`tests/conftest.py` and `tests/ranks.py` keep such tests from starting one.
"""
ALWAYS = ("rules", "suite")
"""Folders of quick tests about the whole repository, which every change runs."""

EVERYTHING = (
    ".ci/",
    "Makefile",
    "constraints.txt",
    "hatch_build.py",
    "pyproject.toml",
    "src/raylane/__init__.py",
    "src/raylane/_ray",
    "src/raylane/core/",
    "src/raylane/errors.py",
    "src/raylane/py.typed",
    "src/raylane/testing/",
)
"""Beginnings of paths that all tests depend on. The leak checks of all tests use `raylane.testing`."""
DOCUMENTS = ("docs/", "mkdocs.yml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", ".gitignore")
"""Beginnings of paths that only the rules and the examples read."""
RECORDS = ("tests/proven.json", "tests/durations.txt", "tests/versions.json")
"""Files that only the rules read."""
QUARTERS = 4


@dataclass(frozen=True)
class Choice:
    """Test files to run, as paths below the root."""

    files: frozenset[str]
    """Files of which all tests run."""
    on_ray: frozenset[str]
    """Files of which the tests on Ray run."""
    reasons: tuple[str, ...]
    """A line for each changed file."""


def may_import(upper: str, lower: str) -> bool:
    """Return True if package `upper` of `src/raylane` may import package `lower`."""
    if {upper, lower} == SIDE_BY_SIDE:
        return False
    return LAYERS.index(lower) <= LAYERS.index(upper)


def folders_above(package: str, helpers: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Return the folders of tests that a change in a package of `src/raylane` can break.

    `helpers` names, for each folder of tests, the other folders whose helpers it imports: it can then break with them.
    """
    folders = {folder for folder, uppermost in TESTED.items() if may_import(uppermost, package)}
    if may_import("workers", package):
        folders.add(TESTING)
    return frozenset(folders | users_of(folders, helpers))


def users_of(folders: Iterable[str], helpers: Mapping[str, frozenset[str]]) -> set[str]:
    """Return the folders of tests that import helpers of these folders, also through others."""
    reached = set(folders)
    while more := {folder for folder, used in helpers.items() if used & reached} - reached:
        reached |= more
    return reached


def affected(changed: Iterable[str], files: Iterable[str], helpers: Mapping[str, frozenset[str]]) -> Choice:
    """Return the test files that a change of the files `changed` can break, out of all test files.

    All are paths below the root. A path that no rule knows stands for everything.
    """
    files = frozenset(files)
    whole, on_ray, reasons = set(_in_folders(files, ALWAYS)), set[str](), []
    for path in sorted(changed):
        parts, left_out, only_on_ray = path.split("/"), frozenset[str](), set[str]()
        if path.startswith(DOCUMENTS):
            reached = {"examples"}
        elif path in RECORDS:
            reached = set()
        elif path in files and parts[1] not in ALWAYS:
            whole.add(path)
            reasons.append(f"{path}: itself")
            continue
        elif path.startswith("examples/"):
            reached = {"examples", "cli", "sft"}
        elif path.startswith("benchmarks/"):
            reached = {"benchmarks"}
        elif parts[:2] == ["src", "raylane"] and not path.startswith(EVERYTHING) and parts[2] in LAYERS:
            reached = set(folders_above(parts[2], helpers))
            left_out = NOT_FOR.get(parts[2], left_out)
            if parts[2] in ON_RAY:
                only_on_ray = reached & TRAINING
                reached -= TRAINING
            whole |= {
                file for file, top in REACHES_ABOVE.items() if file in files and may_import(top, parts[2])
            } - left_out
        elif parts[0] == "tests" and len(parts) > 2 and (parts[1] in TESTED or parts[1] in (TESTING, *ALWAYS)):
            reached = users_of({parts[1]}, helpers)
        else:
            return Choice(files, frozenset(), (f"{path}: all tests depend on it",))
        whole |= _in_folders(files, reached) - left_out
        on_ray |= _in_folders(files, only_on_ray) - left_out
        reasons.append(f"{path}: {', '.join(sorted(reached | only_on_ray)) or 'the rules'}")
    return Choice(frozenset(whole), frozenset(on_ray - whole), tuple(reasons))


def _in_folders(files: Iterable[str], folders: AbstractSet[str] | Sequence[str]) -> set[str]:
    return {file for file in files if file.split("/")[1] in folders}


def quarter_of(file: str) -> int:
    """Return the quarter that a test file always belongs to, from 0 to 3."""
    return zlib.crc32(file.encode()) % QUARTERS


def quarter_due(proven_at: Sequence[int]) -> int:
    """Return the quarter that passed longest ago: the least number of commits, the lowest quarter among equal ones."""
    return min(range(QUARTERS), key=lambda quarter: (proven_at[quarter], quarter))


def chosen(
    changed: Iterable[str] | None,
    proven_at: Sequence[int],
    files: Iterable[str],
    helpers: Mapping[str, frozenset[str]],
) -> Choice:
    """Return the test files of a run of CI: those that a change can break, and of the others the quarter that is due.

    `changed` is None where it is not known since when: then all files. `proven_at` has, for each quarter, the number of
    commits up to the one at which it passed last, 0 where it is not known.
    """
    files = frozenset(files)
    if changed is None:
        return Choice(files, frozenset(), ("tests/proven.json names no commit before this one: all tests",))
    choice, due = affected(changed, files, helpers), quarter_due(proven_at)
    others = {file for file in files - choice.files if quarter_of(file) == due}
    reasons = (*choice.reasons, f"quarter {due} of the others: {len(others)} files")
    return Choice(choice.files | others, choice.on_ray - others, reasons)


def files_with_tests(root: Path = ROOT) -> list[str]:
    """Return all files with tests, as paths below the root."""
    return sorted(path.relative_to(root).as_posix() for path in (root / "tests").glob("*/**/test_*.py"))


def git(*words: str) -> str | None:
    """Return what a git command prints, None if it fails."""
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def changed_files(commit: str) -> list[str] | None:
    """Return the files changed since a commit, also those not committed; None if the commit is no ancestor."""
    if not commit_count(commit):
        return None
    listings = git("diff", "--name-only", "--no-renames", commit), git("ls-files", "--others", "--exclude-standard")
    return None if None in listings else sorted({line for text in listings for line in (text or "").splitlines()})


def commit_count(commit: str) -> int:
    """Return the number of commits up to an ancestor of HEAD, 0 for anything else."""
    if not commit or git("merge-base", "--is-ancestor", commit, "HEAD") is None:
        return 0
    return int(git("rev-list", "--count", commit) or 0)


def main(words: Sequence[str]) -> int:
    """Write the chosen files into a folder, as chosen.txt and on_ray.txt. With `passed all|ci`, record a success."""
    from tests.suite.imports import helper_folders

    try:
        record = json.loads(PROVEN.read_text())
    except FileNotFoundError:
        record = {"all": "", "quarters": [""] * QUARTERS}
    quarters = [commit_count(commit) for commit in record["quarters"]]
    if words[:1] == ["passed"]:
        if uncommitted := set(changed_files("HEAD") or ()) - set(RECORDS):
            print(f"tests/proven.json stays as it is, because these changes are in no commit: {sorted(uncommitted)}")
            return 0
        head = (git("rev-parse", "HEAD") or "").strip()
        if words[1:] == ["all"]:
            record = {"all": head, "quarters": [head] * QUARTERS}
        else:
            record["quarters"][quarter_due(quarters)] = head
        PROVEN.write_text(json.dumps(record, indent=1) + "\n")
        print(f"tests/proven.json names {head[:10]} now: commit it.")
        return 0
    files, (folder,) = files_with_tests(), words
    choice = chosen(changed_files(record["all"]), quarters, files, helper_folders())
    Path(folder, "chosen.txt").write_text("".join(f"{file}\n" for file in sorted(choice.files)))
    Path(folder, "on_ray.txt").write_text("".join(f"{file}\n" for file in sorted(choice.on_ray)))
    print(*choice.reasons, sep="\n")
    print(f"all tests of {len(choice.files)}, those on Ray of {len(choice.on_ray)} of {len(files)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

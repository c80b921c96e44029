"""Environments for pairs of Ray and CPython, and runs of the tests in them: `make test-versions`.

An environment of a pair has only Ray and raylane; a second one, which all pairs of a CPython share, has torch and the
other packages. Packages are installed without dependencies, from the pins of `constraints.txt`, so that no resolver
brings builds for CUDA. `tests/suite/versions.py` has all decisions.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.suite import versions
from tests.suite.affected import changed_files, git
from tests.suite.versions import ROOT, Pair

ENVIRONMENTS = ROOT / ".venvs"
LOGS = ROOT / "build" / "versions"
CONSTRAINTS = (ROOT / "constraints.txt").read_text()
CUDA_PINS = Path(__file__).with_name("torch_for_cuda.txt")
USABLE = """
import ensurepip, pathlib, platform, sysconfig, venv
assert pathlib.Path(sysconfig.get_paths()["include"], "Python.h").exists()
print(platform.python_version())
"""
"""Program that prints the version of a CPython which can make environments and compile the native module."""
INSTALLED = """
import json, platform, ray, torch
print(json.dumps({"python": platform.python_version(), "torch": torch.__version__, "ray": ray.__version__}))
"""


def log(words: str) -> None:
    """Print a line with the time of day, at once."""
    print(f"{datetime.datetime.now():%H:%M:%S} {words}", flush=True)


def output_of(*command: str | Path) -> str | None:
    """Return what a command prints, None if it fails or does not exist."""
    try:
        done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def find_python(python: str) -> str | None:
    """Return the program of a CPython, None if there is none with `venv` and headers."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    of_pyenv = [path.name for path in pyenv.glob("versions/*")]
    for name in versions.candidates(python, os.environ["PATH"].split(os.pathsep), of_pyenv):
        program = str(pyenv / name)  # absolute names stay as they are
        if (output_of(program, "-c", USABLE) or "").rpartition(".")[0] == python:
            return program
    return None


def install(environment: Path, *words: str | Path) -> None:
    """Install packages without their dependencies, and add the output to a log. RuntimeError if that fails."""
    path = LOGS / environment.name / "install.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [environment / "bin/python", "-m", "pip", "install", "--no-deps", *words]
    with path.open("a") as output:
        done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise RuntimeError(f"{environment.name} lacks {' '.join(map(str, words))[:80]}: see {path.relative_to(ROOT)}")


def install_torch(environment: Path) -> str:
    """Install the CPU build of torch, or where no index has it, the build for CUDA. Return "cpu" or "cuda"."""
    cpu, index = versions.pin(CONSTRAINTS, "torch"), os.environ["TORCH_CPU_INDEX"]
    for words in ([cpu], ["--extra-index-url", index, cpu]):
        with contextlib.suppress(RuntimeError):
            install(environment, *words)
            return "cpu"
    log(f"no index has {cpu} for {environment.name}: installing the build for CUDA, 4 GB")
    install(environment, "-r", CUDA_PINS)
    return "cuda"


def shared_environment(python: str, program: str) -> Path:
    """Make the environment with all packages but Ray and raylane, if it is not there as `constraints.txt` asks."""
    environment = ENVIRONMENTS / f"py{python}"
    ready = environment / ".ready"
    if not ready.exists() or ready.read_text() != CONSTRAINTS:
        log(f"making {environment.name} with {program}")
        subprocess.run([program, "-m", "venv", environment], check=True)
        nixl = versions.NIXL[install_torch(environment)]
        install(environment, *versions.requirements(CONSTRAINTS, nixl))
        install(environment, "trl==1.16.0")  # as `make setup` does
        ready.write_text(CONSTRAINTS)
    return environment


def environment_of(pair: Pair) -> Path | str:
    """Make the environment of a pair. Return its folder, or why the pair has none."""
    program = find_python(pair.python)
    if program is None:
        return f"no CPython {pair.python}"
    served = output_of(program, "-m", "pip", "index", "versions", "--only-binary", ":all:", "ray")
    if served is None:
        raise RuntimeError("pip could not ask the index for the versions of Ray")
    if pair.ray not in served.replace(",", " ").split():
        return "no wheel"
    shared, environment = shared_environment(pair.python, program), ENVIRONMENTS / pair.name
    if not (environment / "bin/python").exists():
        subprocess.run([program, "-m", "venv", environment], check=True)
    packages = f"lib/python{pair.python}/site-packages"
    (environment / packages / "shared.pth").write_text(f"import site; site.addsitedir({str(shared / packages)!r})\n")
    # The native module is compiled again, with the headers of this CPython.
    install(environment, f"ray=={pair.ray}")
    install(environment, "-e", ".")
    return environment


def run_tests(environment: Path, name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Run tests in an environment, with output and results in files of this name; return the counts."""
    folder = LOGS / environment.name
    folder.mkdir(parents=True, exist_ok=True)
    junit = folder / f"{name}.xml"
    junit.unlink(missing_ok=True)
    command = ["timeout", "--signal=INT", "--kill-after=60", str(versions.LIMIT_S), str(environment / "bin/python")]
    command += ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={junit}", *arguments]
    with (folder / f"{name}.log").open("w") as output:
        done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False)
    return versions.outcome(junit.read_text() if junit.exists() else None, done.returncode)


def counts_in_words(counts: Mapping[str, Any]) -> str:
    """Return the counts of a run as one line."""
    return ", ".join(f"{counts[key]} {key}" for key in ("passed", "failed", "skipped", "seconds"))


def run_pair(pair: Pair, stages: Sequence[str]) -> dict[str, Any]:
    """Make the environment of a pair, run its tests, and return its entry in the record."""
    environment = environment_of(pair)
    if isinstance(environment, str):
        log(f"{pair.name}: {environment}")
        return {"missing": environment}
    entry: dict[str, Any] = json.loads(output_of(environment / "bin/python", "-c", INSTALLED) or "{}")
    if entry.get("ray") != pair.ray:
        raise RuntimeError(f"{environment} must have Ray {pair.ray}, got {entry}: delete the folder")
    for stage in stages:
        commit = tested_commit()
        counts = run_tests(environment, stage, versions.STAGES[stage])
        entry[stage] = {"date": str(datetime.date.today()), "commit": commit, **counts}
        log(f"{pair.name} {stage}: {counts_in_words(counts)}")
    return entry


def failures_in(pair: Pair, words: Sequence[str]) -> list[str]:
    """Run pytest with these arguments in the environment of a pair, unrecorded. Return the tests that failed."""
    environment = environment_of(pair)
    if isinstance(environment, str):
        return [environment]
    counts = run_tests(environment, "narrowed", words)
    log(f"{pair.name}: {counts_in_words(counts)}")
    return list(counts["failures"])


def tested_commit() -> str:
    """Return the commit of the tree, with a mark if files differ from it that are not the record or its tables."""
    changed = set(changed_files("HEAD") or ()) - {*versions.PAGES, versions.RECORD.relative_to(ROOT).as_posix()}
    return (git("rev-parse", "--short=10", "HEAD") or "").strip() + (" and changes" if changed else "")


def keep(pair: Pair, entry: dict[str, Any]) -> None:
    """Add an entry to the record, and write the tables of the record into the pages."""
    entries = versions.updated(versions.record(), pair, entry)
    versions.RECORD.write_text(json.dumps(entries, indent=1) + "\n")
    write_tables()


def write_tables() -> None:
    """Write the tables of the record into the pages."""
    entries = versions.record()
    for page in versions.PAGES:
        path = ROOT / page
        path.write_text(versions.with_tables(path.read_text(), entries))


def main(words: Sequence[str]) -> int:
    """Run the tests of all chosen pairs; record and print the results. Return 1 if a pair failed."""
    parser = argparse.ArgumentParser(description="Run the tests with versions of Ray and CPython.")
    parser.add_argument("--ray", nargs="*", default=[])
    parser.add_argument("--pythons", nargs="*", default=[])
    parser.add_argument("--stages", nargs="*", default=[], choices=versions.STAGES)
    parser.add_argument("--only", nargs=argparse.REMAINDER, default=[], help="arguments of pytest; not recorded")
    options = parser.parse_args(words)
    stages = options.stages or list(versions.STAGES)
    failed: dict[Pair, list[str]] = {}
    for pair in versions.pairs(options.ray or versions.RAYS, options.pythons or versions.PYTHONS):
        try:
            if options.only:
                failures = failures_in(pair, options.only)
            else:
                entry = run_pair(pair, stages)
                keep(pair, entry)
                failures = versions.failures_of({stage: entry.get(stage, {}) for stage in stages})
        except (RuntimeError, subprocess.CalledProcessError) as error:
            failures = [str(error)]
        if failures:
            failed[pair] = failures
    print("\n".join(versions.last_lines(failed, LOGS.relative_to(ROOT))))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

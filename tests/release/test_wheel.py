"""The wheel in an environment that has never seen this folder: `examples/hello.py` and `raylane doctor` work there.

`make wheel` gives its wheel in RAYLANE_WHEEL: it is installed with all that it needs from the package index. Without
that variable the wheel is made here, from the source archive, and finds Ray and torch in the environment of the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


def run(*command: object, cwd: Path) -> str:
    """Run a command with an environment that names nothing of this folder, and return what it printed."""
    keep = ("PATH", "HOME", "CC", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_worker_niceness")
    env = {name: os.environ[name] for name in keep if name in os.environ}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, (command, done.stdout[-3000:], done.stderr[-3000:])
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("release")


@pytest.fixture(scope="module")
def wheel(folder: Path) -> Path:
    if given := os.environ.get("RAYLANE_WHEEL"):
        return Path(given).absolute()
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    run(sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", folder, cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        source.extractall(folder, filter="data")
    unpacked = folder / archive.name.removesuffix(".tar.gz")
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder, cwd=unpacked)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(folder: Path, wheel: Path) -> Path:
    """Return the folder of programs of an environment into which the wheel was installed."""
    home = folder / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", home, cwd=folder)
    pip = (sys.executable, "-m", "pip", "--python", home / "bin/python", "install", "--quiet")
    if "RAYLANE_WHEEL" in os.environ:
        run(*pip, "--constraint", ROOT / "constraints.txt", wheel, cwd=folder)
    else:
        run(*pip, "--no-deps", "--no-index", wheel, cwd=folder)
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
        # The editable install of raylane itself is not seen through this: it is a `.pth` file too.
        (packages / "of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


def test_one_wheel_serves_all_later_versions_of_python(wheel: Path) -> None:
    python, abi, platform = wheel.stem.split("-")[2:]
    assert (python, abi) == ("cp311", "abi3")
    assert platform.endswith("_" + os.uname().machine)
    with zipfile.ZipFile(wheel) as packed:
        native = [name for name in packed.namelist() if name.endswith(".so")]
        assert native == ["raylane/core/_native.abi3.so"]
        assert not [name for name in packed.namelist() if not name.startswith("raylane")]


def test_the_wheel_runs_the_first_example(environment: Path, folder: Path) -> None:
    example = folder / "hello.py"
    example.write_text((ROOT / "examples/hello.py").read_text())
    assert run(environment / "python", example, cwd=folder).endswith("1000000.0\n")


def test_doctor_of_the_wheel_runs_with_its_native_module(environment: Path, folder: Path) -> None:
    program = "import raylane.core.native, sys; print(sys.modules['raylane.core._native'].__file__)"
    used = run(environment / "python", "-c", program, cwd=folder)
    assert Path(used).is_relative_to(folder)
    assert "This machine" in run(environment / "raylane", "doctor", cwd=folder)

"""Build hook: compiles `raylane/core/_native.c` for wheels and for editable installs.

The module uses only CPython's stable ABI, so one build serves CPython 3.11 and every later version. Without a C
compiler or the headers of Python the build ends with a sentence that names the package to install.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LEAST_PYTHON = (3, 11)
SOURCE = Path("src/raylane/core/_native.c")
FLAGS = "-std=c11 -D_GNU_SOURCE -O2 -fPIC -shared -pthread -Wall -Wextra -Wno-missing-field-initializers"
# Methods take (self, ignored) or (self, args, count) where their table says (self, args), as CPython documents.
FLAGS += " -Wno-cast-function-type"


def compile_native(root: Path, *more: str, into: Path | None = None) -> Path:
    """Compile the module, with `more` flags, and return its file: next to its source, or in the folder `into`.

    OSError or CalledProcessError if that fails.
    """
    target = (into or root / SOURCE.parent) / "_native.abi3.so"
    partial = target.with_suffix(".partial")
    compiler = shlex.split(os.environ.get("CC", "cc"))
    include = f"-I{sysconfig.get_paths()['include']}"
    try:
        subprocess.run(
            [*compiler, *FLAGS.split(), *more, include, "-o", str(partial), str(root / SOURCE)],
            check=True,
            capture_output=True,
            text=True,
        )
        # A process that has the old file mapped keeps it; it must not be overwritten.
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def failure(error: OSError | subprocess.CalledProcessError) -> str:
    """Return one sentence that says why the module could not be compiled, and which package to install."""
    printed = getattr(error, "stderr", None) or ""
    if sys.version_info < LEAST_PYTHON:  # pip compares versions only after this build
        return f"raylane needs Python 3.11 or newer, and this is {platform.python_version()}."
    if isinstance(error, OSError):
        cause, packages = str(error), "a C compiler (Debian and Ubuntu: apt install gcc; Fedora: dnf install gcc)"
    elif "Python.h" in printed:
        cause = "the headers of Python are missing"
        packages = "them (Debian and Ubuntu: apt install python3-dev; Fedora: dnf install python3-devel)"
    else:
        cause = next((line for line in printed.splitlines() if "error" in line), f"exit status {error.returncode}")
        packages = "GCC 9 or Clang 10, or a later version, or use the wheel"
    return f"raylane: {SOURCE} could not be compiled: {cause.rstrip('.')}; install {packages}."


class NativeBuildHook(BuildHookInterface):
    """Adds the compiled module to wheels and editable installs where it can be compiled."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel is put together."""
        try:
            module = compile_native(Path(self.root))
        except (OSError, subprocess.CalledProcessError) as error:
            self.app.abort(failure(error))
        for older in set(module.parent.glob("_native.*.so")) - {module}:
            older.unlink()  # built for one version of CPython, which would prefer it
        tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{tag}"
        build_data["artifacts"].append(str(module.relative_to(self.root)))

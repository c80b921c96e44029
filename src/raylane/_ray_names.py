"""Private and undocumented names of Ray that raylane uses, and the check that the installed Ray has them.

Owns the only table of these names, `_ray_names.txt`, and the only list of the versions of Ray that raylane was run
with. `_ray` checks the table at its first use; `raylane doctor` shows the result of the same check.
`tests/rules/test_ray_names.py` compares the table with the code of `_ray_calls`, the only module that uses the names.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import ray

from raylane.errors import RaylaneError

CHECKED_ON = ("2.57.0", "2.58.1", "2.59.0", "2.60.0")
"""Versions of Ray that the tests passed with, the oldest first: those of the record of `make test-versions`."""


class Use(NamedTuple):
    """Names of one owner that serve one purpose."""

    names: str
    """The names, separated by spaces."""
    purpose: str
    """Purpose of the names in raylane, as a verb phrase."""
    needed_by: str
    """Parts of raylane that do not work without the names."""


_DAG = "ray.dag"


class MissingName(NamedTuple):
    """Name of the table that the installed Ray lacks."""

    name: str
    """Name with its owner, with dots."""
    use: Use


def parsed(text: str) -> dict[str, list[Use]]:
    """Return the uses of each owner in the text of the table."""
    table: dict[str, list[Use]] = {}
    owner = ""
    for line in text.splitlines():
        if line.startswith(" "):
            table[owner].append(Use(*line.strip().split(" | ")))
        elif line and not line.startswith("#"):
            owner = line
            table[owner] = []
    return table


@functools.cache
def private_names() -> dict[str, list[Use]]:
    """Return the table of `_ray_names.txt`, by owner."""
    return parsed(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"))


def find(owner: str) -> Any:
    """Return the object of Ray that `module` or `module:name` means; None if the installed Ray has none."""
    module, _, path = owner.partition(":")
    try:
        loaded = importlib.import_module(module)
        return operator.attrgetter(path)(loaded) if path else loaded
    except (ImportError, AttributeError):
        return None


def missing_names(table: Mapping[str, Sequence[Use]], *, import_dag: bool = False) -> list[MissingName]:
    """Return the names of a table that the installed Ray lacks. Takes less than a millisecond.

    Those of `ray.dag` are left out if nothing has imported it, because its import takes long, unless `import_dag` is
    true.
    """
    missing = []
    for owner, uses in table.items():
        if owner.startswith(_DAG) and not import_dag and _DAG not in sys.modules:
            continue
        in_code, target = owner.endswith("()"), find(owner.removesuffix("()"))
        missing += [
            MissingName(f"{owner.replace(':', '.')}.{name}", use)
            for use in uses
            for name in use.names.split()
            if target is None or not (name in _words_in_code(target) if in_code else hasattr(target, name))
        ]
    return missing


def _words_in_code(owner: Any) -> Iterator[str]:
    """Yield the names and strings in the code of a function, or of all functions of a class in their order."""
    for function in vars(owner).values() if isinstance(owner, type) else (owner,):
        code = _code_of(function)
        if isinstance(code, CodeType):
            yield from _words(code)


def _words(code: CodeType) -> Iterator[str]:
    yield from (code.co_name, *code.co_names, *code.co_varnames, *code.co_cellvars)
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):  # of a function or class inside
            yield from _words(constant)


def _code_of(function: Any) -> Any:
    """Return the code of a function, method or property without its decorators; None for any other object."""
    function = getattr(function, "fget", None) or getattr(function, "__func__", function)
    return getattr(inspect.unwrap(function), "__code__", None)


def message(version: str, missing: Sequence[MissingName], checked_on: Sequence[str] = CHECKED_ON) -> str:
    """Return the text of the error for a version of Ray without some names."""
    names = "\n".join(f"  {name}: needed by {use.needed_by}, to {use.purpose}" for name, use in missing)
    return (
        f"raylane cannot work with Ray {version}: this version lacks {len(missing)} of the private names that raylane "
        f"uses:\n{names}\nraylane was run with Ray {', '.join(checked_on)}. Install one of these versions "
        f"(pip install 'ray=={checked_on[-1]}'), or report this message to the authors of raylane"
    )


def require(*, import_dag: bool = False) -> None:
    """Raise a RaylaneError that names all missing names, if the installed Ray lacks any; see `missing_names`."""
    if missing := missing_names(private_names(), import_dag=import_dag):
        raise RaylaneError(
            message(ray.__version__, missing), ray_version=ray.__version__, missing=[name for name, _ in missing]
        )


def summary() -> str:
    """Return one line on the names that the installed Ray has, those of `ray.dag` included."""
    count = sum(len(use.names.split()) for uses in private_names().values() for use in uses)
    missing = [name for name, _ in missing_names(private_names(), import_dag=True)]
    present = f"Ray lacks {', '.join(missing)}" if missing else f"Ray has all {count}"
    return f"{present}; raylane was run with Ray {', '.join(CHECKED_ON)}"

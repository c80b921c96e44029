"""Imports of the tests and the package, read off their files."""

from __future__ import annotations

import ast
import functools
from collections.abc import Set as AbstractSet
from pathlib import Path

ROOT = Path(__file__).parents[2]


@functools.cache
def imports_of(path: Path) -> frozenset[str]:
    """Return every module that a file imports, as dotted names, in functions and under TYPE_CHECKING too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def packages_of(names: AbstractSet[str], packages: tuple[str, ...]) -> set[str]:
    """Return the packages of raylane among imported names."""
    return {name.split(".")[1] for name in names if name.startswith("raylane.")} & set(packages)


def helper_folders(root: Path = ROOT) -> dict[str, frozenset[str]]:
    """Return, for each folder of tests, the other folders of tests whose modules it imports."""
    folders = sorted(path.name for path in (root / "tests").iterdir() if path.is_dir())
    used: dict[str, frozenset[str]] = {}
    for folder in folders:
        names = {name for path in (root / "tests" / folder).rglob("*.py") for name in imports_of(path)}
        tests = {name.removeprefix("tests.").split(".")[0] for name in names}
        used[folder] = frozenset(
            other for other in folders if other != folder and other in tests and _is_ours(root, other, names)
        )
    return used


def _is_ours(root: Path, folder: str, names: set[str]) -> bool:
    """Return True if one of the names is a module in a folder of tests, and not a package of the same name."""
    modules = [name.removeprefix("tests.").split(".") for name in names]
    return any(
        words[0] == folder and len(words) > 1 and (root / "tests" / folder / f"{words[1]}.py").exists()
        for words in modules
    )

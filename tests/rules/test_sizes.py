"""Limits of size: files under 600 lines, functions under 80 (each exception has its reason), and lines of packages."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "tests", "examples", "benchmarks")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
PACKAGE = ROOT / "src" / "raylane"
BUDGETS = {
    "cli": 1211,
    "core": 1989,
    "graph": 7650,
    "modules": 693,
    "nemo": 982,
    "rl": 2975,
    "sft": 3107,
    "testing": 206,
    "training": 7668,
    "transport": 7790,
    "weights": 7053,
    "workers": 1741,
}
"""Lines of code of each package, and of the modules beside them, without docstrings, comments and blank lines.

A package grows only by a commit that changes its number here, and says what that buys. The first goal is 34,000 in all.
"""
SLACK = 20
"""Lines that a package may be below its number; beyond it the number goes down, so that no later change uses it."""


class Contents(NamedTuple):
    """Sizes and docstring of a file."""

    lines: int
    code: int
    """Number of lines without docstrings, comments and blank lines."""
    has_docstring: bool
    functions: list[tuple[str, int]]
    """Name and number of lines of each function, its docstring left out."""


@functools.cache
def contents(path: Path) -> Contents:
    text = path.read_text()
    tree, functions, no_code = ast.parse(text), [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            no_code.update(range(node.lineno, (node.end_lineno or 0) + 1))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
            functions.append((node.name, (body[-1].end_lineno or 0) - body[0].lineno + 1))
    code = sum(
        number not in no_code and bool(line.strip()) and not line.strip().startswith("#")
        for number, line in enumerate(text.splitlines(), 1)
    )
    return Contents(text.count("\n"), code, bool(ast.get_docstring(tree)), functions)


def lines_of_packages() -> dict[str, int]:
    """Return the lines of code of each package of raylane; those of single modules under "modules"."""
    lines: dict[str, int] = {}
    for path in PACKAGE.rglob("*.py"):
        name, *inside = path.relative_to(PACKAGE).parts
        name = name if inside else "modules"
        lines[name] = lines.get(name, 0) + contents(path).code
    return lines


def test_packages_keep_their_budgets() -> None:
    lines = lines_of_packages()
    assert lines.keys() == BUDGETS.keys()
    wrong = {name: (count, BUDGETS[name]) for name, count in lines.items() if not 0 <= BUDGETS[name] - count <= SLACK}
    assert not wrong, "a package has (lines of code, budget): change the budget, and say in the commit what it buys"


def test_files_and_functions_stay_small() -> None:
    large = []
    for path in FILES:
        file, name = contents(path), path.relative_to(ROOT)
        if file.lines > MAX_FILE_LINES and path.name not in LONG_FILES:
            large.append(f"{name} has {file.lines} lines")
        for function, length in file.functions:
            if length > MAX_FUNCTION_LINES and function not in LONG_FUNCTIONS:
                large.append(f"{name}: {function} has {length} lines")
    assert not large


def test_modules_have_docstrings() -> None:
    assert not [path for path in FILES if "src" in path.parts and not contents(path).has_docstring]


def test_names_of_tests_are_short_and_name_a_unit() -> None:
    riddle = re.compile(r"test_(what|who|whether|where|whatever|whoever|somebody|nobody|those|of)_")
    names = [
        name
        for path in FILES
        if path.name.startswith("test_")
        for name, _ in contents(path).functions
        if name.startswith("test_")
    ]
    assert not [name for name in names if len(name) > 60 or riddle.match(name)]

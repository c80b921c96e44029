"""Limits of size: files under 600 lines, functions under 80. Each exception has its reason."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").rglob("*.py")])
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}


class Contents(NamedTuple):
    """Sizes and docstring of a file."""

    lines: int
    has_docstring: bool
    functions: list[tuple[str, int]]
    """Name and number of lines of each function, its docstring left out."""


@functools.cache
def contents(path: Path) -> Contents:
    text = path.read_text()
    tree, functions = ast.parse(text), []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
            functions.append((node.name, (body[-1].end_lineno or 0) - body[0].lineno + 1))
    return Contents(text.count("\n"), bool(ast.get_docstring(tree)), functions)


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

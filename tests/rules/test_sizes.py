"""Limits of size: files under 600 lines, functions under 80. Each exception has its reason."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").rglob("*.py")])
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}


def test_files_and_functions_stay_small() -> None:
    large = []
    for path in FILES:
        text, name = path.read_text(), path.relative_to(ROOT)
        lines = text.count("\n")
        if lines > MAX_FILE_LINES and path.name not in LONG_FILES:
            large.append(f"{name} has {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
                length = (body[-1].end_lineno or 0) - body[0].lineno + 1
                if length > MAX_FUNCTION_LINES and node.name not in LONG_FUNCTIONS:
                    large.append(f"{name}: {node.name} has {length} lines")
    assert not large


def test_modules_have_docstrings() -> None:
    modules = [path for path in FILES if "src" in path.parts]
    assert not [path for path in modules if not ast.get_docstring(ast.parse(path.read_text()))]


def test_names_of_tests_are_short_and_name_a_unit() -> None:
    riddle = re.compile(r"test_(what|who|whether|where|whatever|whoever|somebody|nobody|those|of)_")
    names = [
        node.name
        for path in FILES
        if path.name.startswith("test_")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]
    assert not [name for name in names if len(name) > 60 or riddle.match(name)]

"""Stops on size: files under 600 lines, functions under 80. The lists of exceptions are short, each with its reason."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").rglob("*.py")])
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    lines = text.count("\n")
    assert lines <= MAX_FILE_LINES or path.name in LONG_FILES, f"{path.name} has {lines} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
            length = (body[-1].end_lineno or 0) - body[0].lineno + 1
            assert length <= MAX_FUNCTION_LINES or node.name in LONG_FUNCTIONS, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", [p for p in FILES if "src" in p.parts], ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_say_what_they_are(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path.name} has no docstring"

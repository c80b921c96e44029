"""Tests that documents name must exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_tests_that_are_named_exist() -> None:
    missing = [
        f"{page.name}: {file}::{name}"
        for page in sorted(ROOT.glob("docs/**/*.md"))
        for file, name in NAMED.findall(page.read_text())
        if not (ROOT / file).exists() or f"def {name}(" not in (ROOT / file).read_text()
    ]
    assert not missing


def test_every_row_of_the_graph_table_names_a_test() -> None:
    text = (ROOT / "docs/reference/graphs.md").read_text().partition("## Point by point")[2]
    rows = [line for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row.split("|")[1]) for row in rows] == list(range(1, 34))
    assert all(NAMED.search(row) for row in rows)


def test_one_call_names_functions_that_exist() -> None:
    rows = re.findall(
        r"\| \d+ \| \w+ \| `([\w/]+\.py)` \| `([\w.]+)` \|", (ROOT / "docs/design/one-call.md").read_text()
    )
    assert len(rows) >= 15
    missing = []
    for file, name in rows:
        tree = ast.parse((ROOT / "src/raylane" / file).read_text())
        scope: list[ast.stmt] = tree.body
        for part in name.split("."):
            found = [node for node in scope if getattr(node, "name", None) == part]
            if not found:
                missing.append(f"{file}: {name}")
                break
            scope = found[0].body  # type: ignore[attr-defined]
    assert not missing


def test_one_call_passes_at_most_eight_files() -> None:
    text = (ROOT / "docs/design/one-call.md").read_text()
    for section in text.split("\n## ")[1:]:
        assert len(set(re.findall(r"\| \d+ \| \w+ \| `([\w/]+\.py)`", section))) <= 8

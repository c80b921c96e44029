"""Tests that documents name must exist."""

from __future__ import annotations

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

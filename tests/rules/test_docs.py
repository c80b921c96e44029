"""Documents: tests that they name exist, code that they show is tested code, every page is in the navigation."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
CODE = re.compile(r"(?:<!-- (all|part) of (examples/\w+\.py) -->\n)?```python\n(.*?)```", re.DOTALL)
"""Block of Python in a page, after an optional comment with the example file that contains it."""
PROGRAMS_ONLY = ["README.md", "docs/index.md", "docs/tutorial/first-steps.md"]
"""Pages in which every block of Python comes from an example that a test runs."""


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


def stripped_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def contains_lines(text: str, part: str) -> bool:
    """Return True if the lines of `part` are consecutive lines of `text`, apart from indentation and empty lines."""
    lines, wanted = stripped_lines(text), stripped_lines(part)
    return any(lines[i : i + len(wanted)] == wanted for i in range(len(lines) - len(wanted) + 1))


def test_tests_that_are_named_exist() -> None:
    missing = [
        f"{page.name}: {file}::{name}"
        for page in pages()
        for file, name in NAMED.findall(page.read_text())
        if not (ROOT / file).exists() or f"def {name}(" not in (ROOT / file).read_text()
    ]
    assert not missing


def test_every_row_of_the_graph_table_names_a_test() -> None:
    text = (ROOT / "docs/design/claims-graphs.md").read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row.split("|")[1]) for row in rows] == list(range(1, 39))
    assert all(NAMED.search(row) for row in rows)


def test_every_row_of_the_transport_table_names_a_test() -> None:
    text = (ROOT / "docs/design/claims-transport.md").read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row.split("|")[1]) for row in rows] == list(range(1, 41))
    # What raylane does not have needs no test; everything else does.
    assert all(NAMED.search(row) for row in rows if not row.split("|")[3].strip().startswith("no"))


def test_every_row_of_the_weights_table_names_a_test() -> None:
    text = (ROOT / "docs/design/claims-weights.md").read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row.split("|")[1]) for row in rows] == list(range(1, 38))
    missing = ("no", "not yet", "written, never run")
    assert all(NAMED.search(row) for row in rows if not row.split("|")[3].strip().startswith(missing))


def test_every_row_of_the_security_table_names_a_test() -> None:
    text = (ROOT / "docs/design/claims-security.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]  # without the head of the table
    assert len(rows) >= 19
    assert all(NAMED.search(row) for row in rows)


def test_code_of_pages_equals_the_examples() -> None:
    different = []
    for page in pages():
        for how, file, code in CODE.findall(page.read_text()):
            source = (ROOT / file).read_text() if file else ""
            if (how == "all" and code != source) or (how == "part" and not contains_lines(source, code)):
                different.append(f"{page.name}: {file}: {code[:80]!r}")
    assert not different


def test_first_pages_show_tested_code_only() -> None:
    for page in PROGRAMS_ONLY:
        blocks = CODE.findall((ROOT / page).read_text())
        assert blocks
        assert [code for _, file, code in blocks if not file] == []


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"^\s+- .*?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(
        str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md") if page.name != "log.md"
    )

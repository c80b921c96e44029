"""Documents: tests and claims that they name exist, code that they show is tested, every page is in the navigation."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from tests.claims_page import PAGE, PRODUCTS, claims, claims_markdown

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


def test_every_product_has_claims() -> None:
    assert {claim.product for claim in claims()} == PRODUCTS.keys()
    misplaced = [claim.test for claim in claims() if not re.search(r"/test_\w+\.py::test_", claim.test)]
    assert not misplaced, "a claim stands on a test function"


def test_claims_are_single_short_sentences() -> None:
    texts = {claim.text for claim in claims()}
    wrong = [text for text in texts if len(text) > 90 or re.search(r"[.!?](\s|$)|[|\n]", text) or text != text.strip()]
    assert not wrong, "a claim is one sentence of at most 90 characters, without the full stop"


def test_claims_do_not_differ_by_typing_alone() -> None:
    letters: dict[str, set[tuple[str, str]]] = {}
    for product, text, _ in claims():
        letters.setdefault(re.sub(r"\W+", "", text).casefold(), set()).add((product, text))
    assert not [spellings for spellings in letters.values() if len(spellings) > 1]
    similar = {text: difflib.get_close_matches(text, letters, n=2, cutoff=0.95)[1:] for text in letters}
    assert not {text: others for text, others in similar.items() if others}


def test_claims_page_has_each_claim_once_with_its_tests() -> None:
    rows = [line.split(" | ") for line in claims_markdown().splitlines() if "::" in line]
    assert sorted(text.removeprefix("| ") for text, _ in rows) == sorted({claim.text for claim in claims()})
    assert sum(tests.count("::") for _, tests in rows) == len(claims())


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
    written = [str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md") if page.name != "log.md"]
    assert sorted(listed) == sorted([*written, PAGE])

"""Page design/claims.md of the documentation site: the claims about each product, and the tests that hold them.

A claim is a marker on a test: `@pytest.mark.claim("graphs", "a graph may have no input")`. Several tests hold one claim
if the same text stands on each. The markers are read from the sources, without importing them. mkdocs calls `on_files`
at each build (mkdocs.yml); the page lies in no folder.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

TESTS = Path(__file__).parent
PAGE = "design/claims.md"
PRODUCTS = {
    "transport": "Direct transport",
    "graphs": "Compiled graphs",
    "worker groups": "Worker groups",
    "weights": "Weights",
    "fine-tuning": "Fine-tuning",
    "GRPO": "GRPO",
    "security": "Security",
}
"""Heading of each product in the page, by its name in markers."""
HEAD = """# Claims and tests

What raylane claims, and the tests that hold each claim. The markers `claim` of the tests are the source of this page.
Tests in `tests/gpu` have run on one GPU, those in `tests/vllm` on CPUs ([limits](../reference/limits.md)).
"""


class Claim(NamedTuple):
    """A marker of a test."""

    product: str
    text: str
    test: str
    """Path of the test file in the repository, and name of the function: `tests/graph/test_run.py::test_x`."""


@functools.cache
def claims() -> tuple[Claim, ...]:
    """Return all markers, in the order of the files and of the lines in each file."""
    return tuple(claim for path in sorted(TESTS.rglob("*.py")) for claim in _claims_of(path))


def _claims_of(path: Path) -> list[Claim]:
    text = path.read_text()
    if "mark.claim(" not in text:
        return []
    entries = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.claim":
                    product, sentence = map(ast.literal_eval, decorator.args)
                    test = f"{path.relative_to(TESTS.parent)}::{node.name}"
                    entries.append((decorator.lineno, Claim(product, sentence, test)))
    return [claim for _, claim in sorted(entries)]


def claims_markdown() -> str:
    """Return the page."""
    tests: dict[tuple[str, str], list[str]] = {}
    for product, text, test in claims():
        tests.setdefault((product, text), []).append(f"`{test}`")
    lines = [HEAD]
    for product, heading in PRODUCTS.items():
        lines += [f"## {heading}\n", "| claim | tests |", "|---|---|"]
        lines += [f"| {text} | {', '.join(ids)} |" for (other, text), ids in tests.items() if other == product]
        lines.append("")
    return "\n".join(lines)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page to those of the site; mkdocs calls this."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGE, content=claims_markdown()))
    return files

"""Example data set that every Python installation can make: questions and answers from docstrings.

Source files are parsed, never imported, so none of their code runs. The same installation always gives the same files:
pairs are sorted by name, repeated answers are kept once, and the side of the split depends only on the answer. The
docstrings are under the licences of their packages (PSF, BSD and others). Called by `raylane data docstrings` and by
tests.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from raylane.errors import DataError
from raylane.training.storage import write_jsonl
from raylane.training.text.messages import is_held_out

# Installed with raylane and well documented. "stdlib" stands for the standard library.
DEFAULT_PACKAGES = ("stdlib", "numpy", "torch")
# Tests and bundled copies have few useful docstrings, and parsing them takes most of the time.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "testing", "_vendor", "site-packages", "dist-packages", "__pycache__", "idlelib", "lib2to3"}
    | {"turtledemo", "ensurepip", "_inductor", "_dynamo", "_testing", "onnx", "experimental", "ao", "distutils", "f2py"}
)
MIN_ANSWER, MAX_ANSWER = 20, 400  # characters
QUESTIONS = {
    "module": ("What is the Python module `{name}` for?", "Describe the module `{name}`."),
    "class": ("What is `{name}` in Python?", "Describe the class `{name}`."),
    "function": ("What does `{name}` do?", "Explain the Python function `{name}`."),
    "method": ("What does the method `{name}` do?", "Explain `{name}`."),
}


@dataclass(frozen=True, order=True)
class Pair:
    """One question and its answer; `name` is the dotted Python name that they are about."""

    name: str
    question: str
    answer: str

    def to_json(self) -> str:
        """Return the pair as one line of a JSONL file of conversations."""
        turns = [{"role": "user", "content": self.question}, {"role": "assistant", "content": self.answer}]
        return json.dumps({"messages": turns}, ensure_ascii=False)

    def digest(self) -> bytes:
        """Return a 16-byte hash of the answer."""
        return hashlib.blake2b(self.answer.encode(), digest_size=16).digest()


def source_files(package: str) -> list[tuple[str, Path]]:
    """Return (dotted module name, file) of each source file of an installed package or "stdlib", sorted by name.

    DataError if the package is not installed as source.
    """
    root = Path(sysconfig.get_path("stdlib"))
    if package != "stdlib":
        spec = PathFinder.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise DataError(f"package {package!r} is not installed as source; name others with --packages")
        root = Path(next(iter(spec.submodule_search_locations)))
    prefix = () if package == "stdlib" else (package,)
    named = []
    for path in _walk(root):
        parts = path.relative_to(root).with_suffix("").parts
        named.append((".".join([*prefix, *(parts[:-1] if parts[-1] == "__init__" else parts)]), path))
    return sorted(named)


def _walk(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if path.name not in SKIPPED_FOLDERS and path.name.isidentifier():
                yield from _walk(path)
        elif path.suffix == ".py" and path.stem.isidentifier():
            yield path


def pairs_of_source(source: str, module: str) -> Iterator[Pair]:
    """Yield the pairs of one module: its own docstring and those of its public classes, functions and methods."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in the strings of other packages
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # e.g. templates and files for other versions of Python
            return
    yield from _pairs_of_node(tree, module, "module")


def _pairs_of_node(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str, kind: str
) -> Iterator[Pair]:
    answer = summary(ast.get_docstring(node, clean=False) or "")
    if answer:
        forms = QUESTIONS[kind]
        form = forms[hashlib.blake2b(name.encode(), digest_size=1).digest()[0] % len(forms)]
        yield Pair(name, form.format(name=name), answer)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and not child.name.startswith("_"):
            inner = "class" if isinstance(child, ast.ClassDef) else "method" if kind == "class" else "function"
            yield from _pairs_of_node(child, f"{name}.{child.name}", inner)


def summary(docstring: str) -> str:
    """Return the first usable paragraph of a docstring as one line, or "" if there is none.

    Docstrings of NumPy's C functions begin with a signature, and some begin with a heading only: such paragraphs are
    skipped.
    """
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        text = " ".join(paragraph.split())
        if re.fullmatch(r"[\w.]+\(.*\)( ?->.*)?", text) or re.search(r"(---|===|\*\*\*|>>>|<\|)", text):
            continue
        usable = MIN_ANSWER <= len(text) <= MAX_ANSWER and text[0].isalpha() and " " in text
        return text if usable and not text.startswith(("Copyright", "License")) else ""
    return ""


def collect(packages: Iterable[str] = DEFAULT_PACKAGES) -> list[Pair]:
    """Return all pairs of the packages, sorted by name; a repeated answer is kept under the first name only."""
    pairs: dict[str, Pair] = {}
    for package in packages:
        for module, path in source_files(package):
            if any(part.startswith("_") for part in module.split(".")):
                continue
            for pair in pairs_of_source(path.read_text(encoding="utf-8", errors="replace"), module):
                pairs.setdefault(pair.answer, pair)
    return sorted(pairs.values())


def write_set(pairs: Iterable[Pair], folder: str | Path, validation_fraction: float = 0.05) -> tuple[int, int]:
    """Write train.jsonl and validation.jsonl into `folder` (created if needed); return the lines in each.

    DataError if the files cannot be written.
    """
    sides: dict[bool, list[str]] = {False: [], True: []}
    for pair in pairs:
        sides[is_held_out(int.from_bytes(pair.digest()[:8], "big"), validation_fraction)].append(pair.to_json())
    counts = write_jsonl(Path(folder), {"train": sides[False], "validation": sides[True]})
    return counts["train"], counts["validation"]

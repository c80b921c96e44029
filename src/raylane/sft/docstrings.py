"""An example data set that is on every machine with Python: questions and answers from docstrings.

Sources are read and parsed, never imported, so nothing of what they do happens. The same installation always gives
the same files: pairs are sorted by name, answers that repeat are kept once, and which side of the split a pair is on
depends on its answer alone. The docstrings are under the licences of their packages (PSF, BSD ...). Called by
`raylane data docstrings` and by tests.
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
from pathlib import Path

from raylane.errors import DataError
from raylane.sft.messages import is_held_out

__all__ = ["DEFAULT_PACKAGES", "Pair", "collect", "pairs_of_source", "source_files", "write_set"]

# Installed with raylane, and with docstrings on nearly everything. "stdlib" stands for the standard library.
DEFAULT_PACKAGES = ("stdlib", "numpy", "torch")
# Tests and bundled copies say little, and parsing them takes most of the time.
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
    """One question and its answer; `name` is the dotted name that both are about."""

    name: str
    question: str
    answer: str

    def to_json(self) -> str:
        """The pair as a line of a JSONL file of conversations."""
        turns = [{"role": "user", "content": self.question}, {"role": "assistant", "content": self.answer}]
        return json.dumps({"messages": turns}, ensure_ascii=False)

    def digest(self) -> bytes:
        """16 bytes that depend on the answer alone."""
        return hashlib.blake2b(self.answer.encode(), digest_size=16).digest()


def source_files(package: str) -> list[tuple[str, Path]]:
    """(dotted module name, file) of each source file of an installed package, or of "stdlib"; sorted by name.

    DataError when the package is not installed as source here.
    """
    root = Path(sysconfig.get_path("stdlib"))
    if package != "stdlib":
        homes = [Path(sysconfig.get_path(kind)) / package for kind in ("purelib", "platlib")]
        found = next((home for home in homes if home.is_dir()), None)
        if found is None:
            raise DataError(
                f"package {package!r} is not installed under {homes[0].parent}; name others with --packages"
            )
        root = found
    prefix = () if package == "stdlib" else (package,)
    return sorted((".".join([*prefix, *_module(path, root)]), path) for path in _walk(root))


def _walk(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if path.name not in SKIPPED_FOLDERS and path.name.isidentifier():
                yield from _walk(path)
        elif path.suffix == ".py" and path.stem.isidentifier():
            yield path


def _module(path: Path, root: Path) -> tuple[str, ...]:
    parts = path.relative_to(root).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def pairs_of_source(source: str, module: str) -> Iterator[Pair]:
    """The pairs in the text of one module: its own docstring and those of its public classes, functions and methods."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings are not our news
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # templates, and files for other versions of Python
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
    """The first paragraph of a docstring as one line, or "" when it makes no answer.

    NumPy's docstrings of C functions begin with a signature, and some with only a heading: those lines are passed over.
    """
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        text = " ".join(paragraph.split())
        if re.fullmatch(r"[\w.]+\(.*\)( ?->.*)?", text) or re.search(r"(---|===|\*\*\*|>>>|<\|)", text):
            continue
        usable = MIN_ANSWER <= len(text) <= MAX_ANSWER and text[0].isalpha() and " " in text
        return text if usable and not text.startswith(("Copyright", "License")) else ""
    return ""


def collect(packages: Iterable[str] = DEFAULT_PACKAGES) -> list[Pair]:
    """All pairs of the packages, sorted by name, each answer once (under the first name that has it)."""
    found: dict[str, Pair] = {}
    for package in packages:
        for module, path in source_files(package):
            if any(part.startswith("_") for part in module.split(".")):
                continue
            for pair in pairs_of_source(path.read_text(encoding="utf-8", errors="replace"), module):
                found.setdefault(pair.answer, pair)
    return sorted(found.values())


def write_set(pairs: Iterable[Pair], folder: str | Path, validation_fraction: float = 0.05) -> tuple[int, int]:
    """Write train.jsonl and validation.jsonl into `folder` (made if need be); returns how many lines each has.

    DataError when that cannot be done.
    """
    folder = Path(folder)
    sides: dict[bool, list[str]] = {False: [], True: []}
    for pair in pairs:
        sides[is_held_out(pair.digest(), validation_fraction)].append(pair.to_json())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, lines in (("train", sides[False]), ("validation", sides[True])):
            draft = folder / f"{name}.jsonl.draft"
            draft.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
            draft.replace(folder / f"{name}.jsonl")
    except OSError as error:
        raise DataError(f"cannot write to {folder}: {error}", path=str(folder)) from error
    return len(sides[False]), len(sides[True])

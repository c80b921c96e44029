"""The example data set: made from sources without importing them, always the same, and of usable size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raylane.errors import DataError
from raylane.sft.data.docstrings import collect, pairs_of_source, source_files, summary, write_set
from raylane.training.text.messages import Conversation, conversation_of, parse_line

SOURCE = '''
"""Tools for adding numbers and for nothing else."""
raise SystemExit("this module must not be imported")

class Adder:
    """Adds numbers, one after the other.

    More about it.
    """
    def add(self, x):
        """Add x to the sum and return what it is now."""
        def inner():
            """This one is nobody's business to know."""
    def _private(self):
        """This one is private and must not be asked about."""

async def total(xs):
    """total(xs) -> int

    Return the sum of all xs, waiting
    for each.
    """
'''


def conversations(path: Path) -> list[Conversation]:
    return [conversation_of(parse_line(line, path.name), path.name) for line in path.read_text().splitlines()]


def test_pairs_are_about_the_public_names_of_a_module() -> None:
    pairs = {pair.name: pair.answer for pair in pairs_of_source(SOURCE, "adding")}
    assert pairs == {
        "adding": "Tools for adding numbers and for nothing else.",
        "adding.Adder": "Adds numbers, one after the other.",
        "adding.Adder.add": "Add x to the sum and return what it is now.",
        "adding.total": "Return the sum of all xs, waiting for each.",
    }


def test_questions_name_what_they_are_about() -> None:
    assert all(f"`{pair.name}`" in pair.question for pair in pairs_of_source(SOURCE, "adding"))


def test_a_line_is_a_conversation(tmp_path: Path) -> None:
    pairs = list(pairs_of_source(SOURCE, "adding"))
    assert sum(write_set(pairs, tmp_path / "out", 0.5)) == 4
    files = [tmp_path / "out" / f"{name}.jsonl" for name in ("train", "validation")]
    lines = [line for file in files for line in file.read_text().splitlines()]
    assert len(lines) == 4
    assert {len(json.loads(line)["messages"]) for line in lines} == {2}


@pytest.mark.parametrize(
    ("docstring", "answer"),
    [
        ("Return the sum of the numbers.", "Return the sum of the numbers."),
        ("Return the sum\n    of the numbers.\n\n    More.", "Return the sum of the numbers."),
        ("add(x, y)\n\nReturn the sum of the numbers.", "Return the sum of the numbers."),
        ("add(x, y=(1, 2)) -> int\n\nReturn the sum of the numbers.", "Return the sum of the numbers."),
        ("Heading\n=======\n\nReturn the sum of the numbers.", "Return the sum of the numbers."),
        ("Short.", ""),
        ("x" * 500, ""),
        ("<|im_end|> is a token of ours that must not be here.", ""),
        ("Copyright 2020 by somebody or other.", ""),
        ("", ""),
    ],
)
def test_the_answer_is_the_first_paragraph(docstring: str, answer: str) -> None:
    assert summary(docstring) == answer


def test_source_that_does_not_parse_has_no_pairs() -> None:
    assert list(pairs_of_source("def f(:", "broken")) == []
    assert list(pairs_of_source("\x00", "broken")) == []


def test_a_package_that_is_not_here_is_named() -> None:
    with pytest.raises(DataError, match="package 'no_such_thing' is not installed"):
        source_files("no_such_thing")


def test_package_beside_the_installed_ones_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert source_files("elsewhere") == [("elsewhere", tmp_path / "elsewhere" / "__init__.py")]


@pytest.mark.slow
def test_standard_library_gives_a_stable_set_of_pairs(tmp_path: Path) -> None:
    pairs = collect(["stdlib"])
    assert len(pairs) > 3000
    assert pairs == sorted(pairs)
    assert len({pair.answer for pair in pairs}) == len(pairs)
    train, validation = write_set(pairs, tmp_path / "a")
    assert train + validation == len(pairs)
    assert 0.03 < validation / len(pairs) < 0.07
    write_set(reversed(list(reversed(pairs))), tmp_path / "b")
    for name in ("train.jsonl", "validation.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    sides = [
        {one.messages[1]["content"] for one in conversations(tmp_path / "a" / name)}
        for name in ("train.jsonl", "validation.jsonl")
    ]
    assert not sides[0] & sides[1]


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write to .*/file"):
        write_set([], tmp_path / "file")

"""What people are shown: marked spans and figures that agree with the data."""

from __future__ import annotations

from pathlib import Path

import pytest

from raylane.sft.data.audit import figures, mark_document, marks, printable, report, sample
from raylane.sft.data.mixing import open_rows
from raylane.sft.data.prepare import prepare
from sft.conversations import config, question, talk, tokenizer, turn, write_jsonl


def test_supervised_spans_stand_between_marks() -> None:
    conversation = talk(turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d"))
    encoded = tokenizer().encode(conversation)
    plain = mark_document(encoded.tokens, encoded.supervised, tokenizer(), marks(coloured=False))
    assert plain == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[[b<|im_end|>]]\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n[[d<|im_end|>]]\n"
    )
    coloured = mark_document(encoded.tokens, encoded.supervised, tokenizer(), marks(coloured=True))
    assert coloured == plain.replace("[[", "\x1b[32m").replace("]]", "\x1b[0m")


def test_a_report_says_what_was_counted(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [*(question(seed) for seed in range(12)), question(50, num_words=400)])
    run = config(tmp_path, data={"validation_fraction": 0.2})
    prepared = prepare(run)
    assert prepared.validation is not None
    sets = {
        "train": open_rows(prepared.train, run.policy, prepared.pad_id),
        "validation": open_rows(prepared.validation, run.policy, prepared.pad_id),
    }
    text = report(prepared, run, sets)
    counts = prepared.report["train"]
    for words in (
        f"{counts.conversations} read, the longest {counts.longest:,} tokens",
        f"{counts.supervised:,} tokens, {counts.supervised_percent:.1f}%",
        f"supervised: yes ({counts.turns} of {counts.turns} assistant turns)",
        f"1 truncated ({counts.cut_tokens:,} tokens lost)",
        f"{100 * sets['train'].efficiency:.1f}% full (first_fit_decreasing)",
        "0 conversations are also in the training data",
    ):
        assert words in text


def test_missing_end_tokens_are_loud(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [question(1)])
    run = config(tmp_path)
    prepared = prepare(run)
    counts = prepared.report["train"]
    counts.ended_turns = 0
    rows = open_rows(prepared.train, run.policy, prepared.pad_id)
    assert "supervised: NO (0 of 1" in figures("train", counts, rows, run)


def test_a_sample_shows_no_more_than_there_is(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [question(1), question(2)])
    run = config(tmp_path)
    prepared = prepare(run)
    rows = open_rows(prepared.train, run.policy, prepared.pad_id)
    text = sample(rows, tokenizer(), marks(coloured=False), range(len(rows.cache)))
    assert text.count("document ") == 2
    assert text.count("[[") == 2


@pytest.mark.claim("security", "hostile training data is named with file and line, without terminal escapes")
def test_control_characters_of_data_are_written_out() -> None:
    """Conversations must not be able to clear a terminal or set its title."""
    assert printable("a\x1b[2J\tb\x07\n\x9bc\r") == "a\\x1b[2J\tb\\x07\n\\x9bc\\r"
    conversation = talk(turn("user", "a\x1b]0;title\x07"), turn("assistant", "b\x1b[2J"))
    encoded = tokenizer().encode(conversation)
    assert "\x1b" not in mark_document(encoded.tokens, encoded.supervised, tokenizer(), marks(False))

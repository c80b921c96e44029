"""The silent errors that users of other trainers report, each by name: here refused, counted or impossible."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from raylane.errors import ConfigError, DataError
from raylane.sft.config.load import load_config
from raylane.sft.config.schema import SftRunConfig
from raylane.sft.data.chat import ChatTokenizer, chatml_template, runs, train_tokenizer
from raylane.sft.data.mixing import open_rows
from raylane.sft.data.order import batch_rows, steps_per_epoch, validation_batches
from raylane.sft.data.prepare import prepare
from raylane.sft.data.rows import RowSource, TokenCache
from raylane.training.config.load import dump
from raylane.training.labels import IGNORED
from sft.conversations import config, document, question, talk, tokenizer, turn, write_jsonl

PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}BODY{% else %}"
    "{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
)


def made(tmp_path: Path, lines: list[dict[str, Any]], template: str | None = None, **sections: Any) -> SftRunConfig:
    write_jsonl(tmp_path / "train.jsonl", lines)
    if template is not None:
        (tmp_path / "template.jinja").write_text(template)
        sections.setdefault("policy", {}).setdefault("tokenizer", {})["chat_template"] = str(
            tmp_path / "template.jinja"
        )
    return config(tmp_path, **sections)


QUESTIONS = [question(seed) for seed in range(8)]


# ------------------------------------------------------------------------------------------------------- the mask


def test_trap_template_without_generation_spans(tmp_path: Path) -> None:
    run = made(tmp_path, QUESTIONS, PLAIN.replace("BODY", "{{ m.content + '<|im_end|>' }}"))
    with pytest.raises(ConfigError, match=r"the chat template neither marks .* policy.tokenizer.chat_template=chatml"):
        prepare(run)


def test_trap_tokenizer_folder_without_generation_spans(tmp_path: Path) -> None:
    hf = train_tokenizer(["a b c"], 300)
    hf.chat_template = PLAIN.replace("BODY", "{{ m.content }}")
    hf.save_pretrained(str(tmp_path / "tok"))
    run = made(tmp_path, QUESTIONS, policy={"tokenizer": {"train_vocab_size": None, "name": str(tmp_path / "tok")}})
    with pytest.raises(ConfigError, match="generation"):
        prepare(run)


def test_trap_end_token_outside_the_span_never_stops(tmp_path: Path) -> None:
    body = "{% generation %}{{ m.content }}{% endgeneration %}{{ '<|im_end|>' }}"
    with pytest.raises(DataError, match=r"none of the 8 assistant turns .* end token supervised.*never learn to stop"):
        prepare(made(tmp_path, QUESTIONS, PLAIN.replace("BODY", body)))


def test_trap_end_token_is_not_the_one_that_generation_stops_at(tmp_path: Path) -> None:
    """Base models name another eos than the chat template writes; generation would run on."""
    hf = train_tokenizer(["a b c"], 300)
    hf.eos_token = "<|endoftext|>"
    hf.chat_template = chatml_template()
    hf.save_pretrained(str(tmp_path / "tok"))
    where = {"train_vocab_size": None, "name": str(tmp_path / "tok")}
    with pytest.raises(DataError, match="end token supervised"):
        prepare(made(tmp_path, QUESTIONS, policy={"tokenizer": where}))
    # The template that comes with raylane makes its end of turn the tokenizer's eos.
    prepared = prepare(made(tmp_path, QUESTIONS, policy={"tokenizer": {**where, "chat_template": "chatml"}}))
    assert ChatTokenizer.load(prepared.tokenizer_dir).hf.eos_token == "<|im_end|>"


def test_trap_some_turns_without_end_token_are_reported(tmp_path: Path) -> None:
    body = "{% generation %}{{ m.content }}{% if loop.last %}{{ '<|im_end|>' }}{% endif %}{% endgeneration %}"
    lines = [{"messages": [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]}]
    counts = prepare(made(tmp_path, lines * 3, PLAIN.replace("BODY", body))).report["train"]
    assert (counts.turns, counts.ended_turns) == (6, 3)


def test_trap_mask_covers_what_the_user_wrote(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% endfor %}"
    with pytest.raises(DataError, match=r"train\.jsonl:1: the loss would include what the assistant did not write"):
        prepare(made(tmp_path, QUESTIONS, template))


def test_trap_mask_misses_what_the_assistant_wrote(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% generation %}{{ '<|im_end|>' }}{% endgeneration %}{% endfor %}"
    with pytest.raises(DataError, match=r"train\.jsonl:1: the loss would not include what the assistant wrote"):
        prepare(made(tmp_path, QUESTIONS, template))


def test_trap_assistant_that_repeats_the_user() -> None:
    asked = "the quick brown fox jumps over the lazy dog"
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": asked}}}
    talks = [
        talk(
            turn("user", asked), turn("assistant", None, tool_calls=[call]), turn("tool", json.dumps({"query": asked}))
        ),
        talk(turn("user", json.dumps({"query": asked})), turn("assistant", "", tool_calls=[call])),
    ]
    for conversation in talks:
        encoded = tokenizer().encode(conversation)
        assert asked in tokenizer().decode(encoded.tokens[encoded.supervised])
        assert tokenizer().misplaced(conversation, encoded) is None


def test_trap_only_the_last_turn_is_supervised() -> None:
    conversation = talk(*(turn(role, f"{role} {n}") for n in range(3) for role in ("user", "assistant")))
    encoded = tokenizer().encode(conversation)
    said = [tokenizer().decode(encoded.tokens[start:end]) for start, end in runs(encoded.supervised)]
    assert said == [f"assistant {n}<|im_end|>" for n in range(3)]


def test_trap_sample_with_nothing_supervised(tmp_path: Path) -> None:
    lines = [question(1), {"messages": [turn("user", "anybody there?")]}, question(2)]
    with pytest.raises(DataError, match=r"train\.jsonl:2: nothing in this conversation is supervised \(roles: user\)"):
        prepare(made(tmp_path, lines))
    counts = prepare(made(tmp_path, lines, data={"allow_unsupervised": True})).report["train"]
    assert (counts.conversations, counts.documents, counts.unsupervised) == (3, 2, 1)


def test_trap_mask_is_dropped_on_the_way_to_the_model(tmp_path: Path) -> None:
    run = made(tmp_path, QUESTIONS)
    prepared = prepare(run)
    rows = open_rows(prepared.train, run.policy, prepared.pad_id)
    chat = ChatTokenizer.load(prepared.tokenizer_dir)
    labels = rows.rows(range(rows.num_rows))["labels"]
    said = chat.decode(labels[labels != IGNORED])
    assert "Question" not in said
    assert all(f"Answer {seed}:" in said for seed in range(8))
    assert said.count("<|im_end|>") == 8


def test_trap_off_by_one_shift(tmp_path: Path) -> None:
    """The label of a position is the next token, shifted once and only once."""
    run = made(tmp_path, QUESTIONS[:1] * 2, policy={"sequence_packing": {"enabled": False}})
    prepared = prepare(run)
    rows = open_rows(prepared.train, run.policy, prepared.pad_id)
    tokens, supervised = rows.cache.document(0)
    batch = rows.rows([0])
    for position in range(len(tokens)):
        label = batch["labels"][0, position]
        if position + 1 < len(tokens) and supervised[position + 1]:
            assert label == tokens[position + 1] == batch["input_ids"][0, position + 1]
        else:
            assert label == IGNORED
    first = int(np.flatnonzero(batch["labels"][0] != IGNORED)[0])
    assert not supervised[first]  # the last token of the prompt predicts the first of the answer
    assert supervised[first + 1]


# -------------------------------------------------------------------------------------------------------- packing


def packed(tmp_path: Path) -> tuple[RowSource, dict[str, np.ndarray]]:
    run = made(tmp_path, QUESTIONS)
    prepared = prepare(run)
    rows = open_rows(prepared.train, run.policy, prepared.pad_id)
    assert max(len(pack) for pack in rows.packs) >= 2
    return rows, rows.rows(range(rows.num_rows))


def test_trap_packed_documents_see_each_other(tmp_path: Path) -> None:
    """Positions restart and ids differ; there is no attention mask of ones to defeat both."""
    rows, batch = packed(tmp_path)
    assert set(batch) == {"input_ids", "labels", "position_ids", "document_ids"}
    for row, pack in enumerate(rows.packs):
        ids = batch["document_ids"][row]
        for number, length in enumerate(int(rows.cache.lengths[index]) for index in pack):
            positions = batch["position_ids"][row][ids == number]
            assert positions.tolist() == list(range(length))
        assert batch["position_ids"][row][ids == -1].tolist() == list(range(int((ids == -1).sum())))


def test_trap_document_predicts_the_next_document(tmp_path: Path) -> None:
    _, batch = packed(tmp_path)
    ids, labels = batch["document_ids"], batch["labels"]
    last_of_document = ids[:, :-1] != ids[:, 1:]
    assert last_of_document.any()
    assert (labels[:, :-1][last_of_document] == IGNORED).all()
    assert (labels[:, -1] == IGNORED).all()
    assert (labels[ids == -1] == IGNORED).all()


def test_trap_packing_loses_or_repeats_documents(tmp_path: Path) -> None:
    rows, batch = packed(tmp_path)
    unpacked = RowSource(rows.cache, [(index,) for index in range(len(rows.cache))], rows.row_tokens, rows.pad_id)
    alone = unpacked.rows(range(unpacked.num_rows))
    for key in ("input_ids", "labels"):
        both = [np.sort(one[key][one["document_ids"] >= 0]) for one in (batch, alone)]
        assert both[0].tolist() == both[1].tolist()


# ------------------------------------------------------------------------------------------------------ over-long


@pytest.mark.parametrize("policy", ["truncate", "drop", "split"])
def test_trap_overlong_samples_vanish_uncounted(tmp_path: Path, policy: str) -> None:
    lines = [question(1), question(2, num_words=400)]
    counts = prepare(made(tmp_path, lines, data={"overlong": policy})).report["train"]
    assert counts.conversations == 2
    assert (counts.truncated, counts.dropped, counts.split) == tuple(
        int(policy == name) for name in ("truncate", "drop", "split")
    )
    assert counts.documents == {"truncate": 2, "drop": 1}.get(policy, counts.documents)
    assert counts.longest > 128
    if policy == "truncate":
        assert counts.cut_tokens == counts.longest - 128
    if policy == "split":
        assert counts.documents > 2
        assert counts.supervised == prepare(
            made(tmp_path, lines, policy={"max_total_sequence_length": 4096})
        ).report["train"].supervised  # fmt: skip


def test_trap_overlong_samples_can_be_an_error(tmp_path: Path) -> None:
    run = made(tmp_path, [question(1), question(2, num_words=400)], data={"overlong": "error"})
    with pytest.raises(
        DataError, match=r"train\.jsonl:2: \d+ tokens are more than policy.max_total_sequence_length=128"
    ):
        prepare(run)


def test_trap_truncation_leaves_samples_without_loss(tmp_path: Path) -> None:
    long_question = {"messages": [turn("user", "word " * 300), turn("assistant", "short")]}
    counts = prepare(made(tmp_path, [question(1), long_question])).report["train"]
    assert (counts.truncated, counts.emptied, counts.documents) == (1, 1, 1)


# --------------------------------------------------------------------------------------------- order and resuming


def test_trap_resume_at_the_epoch_boundary_skips_an_epoch() -> None:
    per_epoch = steps_per_epoch(10, 3)
    after = [batch_rows(10, 3, 5, step).tolist() for step in range(per_epoch, 2 * per_epoch)]
    assert len(after) == per_epoch
    assert len({row for batch in after for row in batch}) == per_epoch * 3


def test_trap_resumed_epoch_is_shuffled_differently() -> None:
    uninterrupted = [batch_rows(10, 3, 5, step).tolist() for step in range(9)]
    assert [batch_rows(10, 3, 5, step).tolist() for step in range(4, 9)] == uninterrupted[4:]


def test_trap_order_changes_with_the_number_of_workers(tmp_path: Path) -> None:
    one, four = (
        made(tmp_path, QUESTIONS, cluster={"num_workers": n}, policy={"train_global_batch_size": 4}) for n in (1, 4)
    )
    assert prepare(one) == prepare(four)


def test_trap_validation_drops_the_last_batch() -> None:
    used = np.concatenate(validation_batches(7, 4))
    assert used[used >= 0].tolist() == list(range(7))


def test_trap_fewer_rows_than_a_batch_train_on_nothing() -> None:
    with pytest.raises(DataError, match="less than one global batch"):
        batch_rows(2, 8, 0, 0)


# -------------------------------------------------------------------------------------------------- configuration


def test_trap_yaml_typo_is_accepted_silently(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(document(tmp_path, policy={"max_grad_nrom": 0.5})))
    with pytest.raises(ConfigError, match=r"policy.max_grad_nrom.*did you mean 'policy.max_grad_norm'"):
        load_config(path)


def test_trap_environment_ends_up_in_the_saved_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    run = made(tmp_path, QUESTIONS)
    prepare(run)
    assert "hunter2" not in str(dump(run))


# ---------------------------------------------------------------------------------------------------------- cache


def test_trap_damaged_cache_is_read_as_data(tmp_path: Path) -> None:
    prepared = prepare(made(tmp_path, QUESTIONS))
    (path,) = prepared.train.glob("*.arrow")
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(DataError, match=r"cannot be read .* Delete it"):
        TokenCache(prepared.train)


def test_trap_stale_cache_after_the_data_changed(tmp_path: Path) -> None:
    old = prepare(made(tmp_path, QUESTIONS))
    new = prepare(made(tmp_path, [question(50), question(51)]))
    assert new.report["train"].conversations == 2
    assert old.train != new.train

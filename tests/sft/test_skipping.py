"""Steps whose loss is not finite: the rows that an error names, and how many may be skipped."""

from __future__ import annotations

import json

import pytest

from raylane.errors import StepNotFiniteError
from raylane.sft.data.mixing import open_training_rows
from raylane.sft.data.prepare import prepare
from raylane.sft.run.trainer import with_rows
from raylane.training.checkpoint import folders
from raylane.training.run.skipped_steps import SkippedSteps
from sft import tiny_run
from sft.test_trainer_loop import NoLog, RecordingPolicy, trainer_of

NAN = {"loss": float("nan"), "grad_norm": float("nan")}


def failure(step: int) -> StepNotFiniteError:
    return StepNotFiniteError(f"step {step} failed: loss nan", step=step, loss=float("nan"), grad_norm=1.0)


def test_skipping_counts_and_ends_beyond_the_limit():
    skipped = SkippedSteps(2, "sft.max_skipped_steps")
    assert skipped.add(4, NAN) == "step 4 is skipped: loss nan, gradient norm nan (1 in a row, 1 in all)"
    skipped.end_streak()
    skipped.add(7, NAN)
    assert skipped.add(8, NAN).endswith("(2 in a row, 3 in all)")
    with pytest.raises(
        StepNotFiniteError, match=r"step 9 failed: .* after 2 skipped steps in a row .*weights are those"
    ):
        skipped.add(9, NAN)


@pytest.mark.parametrize("packing", [True, False])
def test_error_of_a_step_names_the_lines_of_its_rows(folder, packing):
    config = tiny_run.config_of(folder, {"policy.sequence_packing.enabled": packing})
    rows = open_training_rows(prepare(config), config)
    error = with_rows(failure(3), config, rows)
    batch = tiny_run.global_batch(config, prepare(config), 2)
    documents = sum(int(of_row.max()) + 1 for of_row in batch["document_ids"])
    assert len(error.fields["data"]) == 8
    assert (f"and {documents - 8} more" in str(error)) is (documents > 8)
    lines = (folder / "train.jsonl").read_text().splitlines()
    tokens = {
        tuple(row[row_documents == n].tolist())
        for row, row_documents in zip(batch["input_ids"], batch["document_ids"], strict=True)
        for n in range(int(row_documents.max()) + 1)
    }
    for place in error.fields["data"]:
        path, _, number = place.rpartition(":")
        assert path == config.data.train_sources[0].path
        answer = json.loads(lines[int(number) - 1])["messages"]
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(prepare(config).tokenizer_dir)
        assert tuple(tokenizer.apply_chat_template(answer, tokenize=True, return_dict=True)["input_ids"]) in tokens


class NotFinite(RecordingPolicy):
    """Every step from the third on is not finite."""

    def result(self, future):
        metrics = super().result(future)
        return {**metrics, **NAN, "skipped": 1.0} if future >= 2 else metrics


def test_run_ends_after_too_many_skipped_steps(tmp_path, monkeypatch):
    notes = []
    monkeypatch.setattr(NoLog, "note", lambda _, step, text: notes.append(text))
    trainer, _ = trainer_of(tmp_path, 9, max_skipped_steps=3)
    trainer.policy = NotFinite()
    with pytest.raises(StepNotFiniteError, match=r"step 6 failed: .*sft\.max_skipped_steps=3"):
        trainer.fit()
    assert len(notes) == 3
    assert trainer.losses["train:loss"] == 1.0, "the last finite one"


def test_resume_on_another_layout_is_one_sentence():
    before = {"cluster": {"num_workers": 4}, "policy": {"dtensor_cfg": {"tensor_parallel_size": 2}}}
    after = {"cluster": {"num_workers": 2}, "policy": {"dtensor_cfg": {"tensor_parallel_size": 1}}}
    assert folders.layout_change(before, before) is None
    assert folders.layout_change(before, after) == (
        "resuming on another layout, so losses will differ by rounding: num_workers=4, tensor_parallel_size=2 in the "
        "checkpoint, num_workers=2, tensor_parallel_size=1 now"
    )
    assert not folders.differences(before, after)

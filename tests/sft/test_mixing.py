"""Files of training data with weights: which rows an epoch uses, and what is reported."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from raylane.errors import ConfigError, DataError
from raylane.nemo.translate import translate
from raylane.sft.data import audit
from raylane.sft.data.mixing import WeightedFiles, open_rows, open_training_rows, pack_by_file
from raylane.sft.data.prepare import prepare
from raylane.sft.data.prepared import PREPARED
from raylane.sft.run.planning import count_training_rows
from sft import tiny_run


@pytest.mark.claim("fine-tuning", "several data sets are mixed by weights")
def test_epoch_uses_rows_as_often_as_their_weight():
    mixture = WeightedFiles((3, 4), (2.0, 0.5))
    assert mixture.num_rows == 8
    first, second = (Counter(mixture.epoch_rows(7, epoch).tolist()) for epoch in (0, 1))
    for one in (first, second):
        assert [one[row] for row in range(3)] == [2, 2, 2]
        assert sorted(one.values()) == [1, 1, 2, 2, 2]
    assert {row for row in first + second if row >= 3} == {3, 4, 5, 6}, "two halves are the whole file"


def test_fractions_use_all_rows_equally_often_over_epochs():
    mixture = WeightedFiles((10,), (1.3,))
    used = Counter(row for epoch in range(10) for row in mixture.epoch_rows(1, epoch).tolist())
    assert set(used.values()) == {13}
    assert len({tuple(mixture.epoch_rows(1, epoch)) for epoch in range(3)}) == 3


def test_rows_of_an_epoch_depend_on_seed_and_epoch_alone():
    mixture = WeightedFiles((50, 60), (0.4, 1.0))
    wanted = mixture.epoch_rows(3, 5)
    mixture.epoch_rows(9, 0)
    mixture.epoch_rows(9, 1)
    assert np.array_equal(WeightedFiles((50, 60), (0.4, 1.0)).epoch_rows(3, 5), wanted)
    assert not np.array_equal(mixture.epoch_rows(4, 5), wanted)


def test_weight_that_uses_no_row_is_refused():
    with pytest.raises(DataError, match=r"data\.train\[1\] makes 10 rows, and weight=0\.01 uses none .* least 0\.05"):
        WeightedFiles((5, 10), (1.0, 0.01))


def test_packs_hold_documents_of_one_file():
    lengths = np.array([3, 3, 5, 2, 2, 2])
    packs, counts = pack_by_file(lengths, [3, 3], 6, "first_fit_decreasing")
    assert counts == (2, 1)
    assert packs == [(0, 1), (2,), (3, 4, 5)]


def two_files(folder: Path, *weights: float | None):
    for name, count, seed in (("one", 40, 1), ("two", 60, 2)):
        tiny_run.write_conversations(folder / f"{name}.jsonl", count, seed)
    tiny_run.write_conversations(folder / "validation.jsonl", 5, seed=3)
    train = [
        str(folder / f"{name}.jsonl") if weight is None else {"path": str(folder / f"{name}.jsonl"), "weight": weight}
        for name, weight in zip(("one", "two"), weights, strict=True)
    ]
    return tiny_run.config_of(folder, {"data.train": train})


def test_weights_of_one_change_nothing(tmp_path: Path):
    plain, weighted = two_files(tmp_path, None, None), two_files(tmp_path, 1, None)
    assert [source.path for source in plain.data.train_sources] == [
        source.path for source in weighted.data.train_sources
    ]
    prepared = prepare(weighted)
    assert prepare(plain) == prepared
    rows = open_training_rows(prepared, weighted)
    assert rows.packs == open_rows(prepared.train, plain.policy, prepared.pad_id).packs
    assert rows.mixture is None


def test_steps_draw_from_both_files_by_weight(tmp_path: Path):
    config = two_files(tmp_path, 2, 0.5)
    prepared = prepare(config)
    rows = open_training_rows(prepared, config)
    one, two = rows.mixture.rows
    steps = range(rows.num_rows // 4)
    drawn = np.concatenate([rows.step_rows(4, 3, step) for step in steps])
    used = Counter(drawn.tolist())
    assert max(used.values()) == 2
    assert sum(count for row, count in used.items() if row < one) >= 2 * one - 4
    assert sum(count for row, count in used.items() if row >= one) <= round(two / 2)
    batch = rows.rows(drawn[:4])
    assert (batch["document_ids"] >= 0).any()
    # A resumed run asks for single steps in another process; nothing else decides.
    again = open_training_rows(prepared, config)
    assert np.array_equal(again.step_rows(4, 3, steps[-1]), drawn[-4:])
    grouped = np.concatenate([rows.step_rows(4, 3, step, group_by_length=True) for step in steps])
    assert sorted(grouped.tolist()) == sorted(drawn.tolist())


def test_counts_of_each_file_are_reported(tmp_path: Path):
    config = two_files(tmp_path, 2, 0.5)
    prepared = prepare(config)
    assert [one.conversations for one in prepared.files] == [40, 60]
    assert sum(one.tokens for one in prepared.files) == prepared.report["train"].tokens
    text = audit.report(prepared, config, {"train": open_training_rows(prepared, config)})
    assert "one.jsonl: weight 2, 40 conversations, 40 documents" in text
    assert "two.jsonl: weight 0.5, 60 conversations, 60 documents" in text
    count = count_training_rows(prepared, config)
    assert count.documents == 110
    assert count.tokens == round(2 * prepared.files[0].tokens + 0.5 * prepared.files[1].tokens)


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"path": "a", "weight": 0}, "weight"),
        ({"weight": 2}, "path"),
        ({"path": "a", "wight": 2}, "wight"),
        (3, "data"),
    ],
)
def test_entry_that_is_no_file_is_refused(tmp_path: Path, entry, told: str):
    with pytest.raises(ConfigError, match=told):
        tiny_run.config_of(tmp_path, {"data.train": [entry]})


def test_weighted_files_pass_the_translation_of_nemo_rl():
    train = [{"path": "a.jsonl", "weight": 2}, "b.jsonl"]
    for given in (train, train[:1]):
        made = translate({"data": {"train": given}})
        assert (made.document, made.notes, made.problems) == ({"data": {"train": given}}, (), ())


def test_prepared_data_with_files_survives_json(tmp_path: Path):
    prepared = prepare(two_files(tmp_path, 2, 0.5))
    assert PREPARED.validate_json(PREPARED.dump_json(prepared)) == prepared

"""BatchDict on values alone: what comes back row for row, and errors that name key and sizes."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from raylane.workers.batch import BatchDict, plan_token_budget


def batch_of(rows: int, start: int = 0) -> BatchDict:
    ids = torch.arange(start, start + rows)
    return BatchDict({"ids": ids, "wide": ids[:, None].expand(rows, 3).clone(), "names": [f"n{i}" for i in ids]})


def same(a: BatchDict, b: BatchDict) -> bool:
    return set(a) == set(b) and all(
        torch.equal(a[key], b[key]) if isinstance(a[key], torch.Tensor) else a[key] == b[key] for key in a
    )


def test_shards_put_together_are_the_batch():
    batch = batch_of(12)
    assert same(BatchDict.from_batches(batch.shard(3)), batch)
    assert [shard.size for shard in batch.shard(3)] == [4, 4, 4]
    assert same(batch.chunk(1, 3), batch.shard(3)[1])


def test_shard_by_global_batch_divides_every_batch():
    shards = batch_of(12).shard(2, batch_size=4)
    assert shards[0]["ids"].tolist() == [0, 1, 4, 5, 8, 9]
    assert shards[1]["names"] == ["n2", "n3", "n6", "n7", "n10", "n11"]


def test_uneven_shards_only_when_allowed():
    assert [shard.size for shard in batch_of(7).shard(3, allow_uneven=True)] == [3, 2, 2]
    assert [shard.size for shard in batch_of(1).shard(3, allow_uneven=True)] == [1, 0, 0]
    with pytest.raises(ValueError, match="7 rows cannot be divided by 3 shards"):
        batch_of(7).shard(3)
    with pytest.raises(ValueError, match="12 rows cannot be divided by 5 rows per global batch"):
        batch_of(12).shard(2, batch_size=5)
    with pytest.raises(ValueError, match="contradict"):
        batch_of(12).shard(2, batch_size=4, allow_uneven=True)


def test_views_share_storage_and_copies_do_not():
    batch = batch_of(4)
    assert batch.slice(1, 3)["wide"].untyped_storage().data_ptr() == batch["wide"].untyped_storage().data_ptr()
    batch.select([0])["ids"][0] = 99
    assert batch["ids"][0] == 0


def test_select_repeats_rows_and_refuses_those_outside():
    assert batch_of(3).select([2, 2, 0])["names"] == ["n2", "n2", "n0"]
    with pytest.raises(ValueError, match=r"rows \[3, -1\] are not in a batch of 3 rows"):
        batch_of(3).select([0, 3, -1])


def test_from_batches_pads_each_key_with_its_own_value():
    short = BatchDict({"ids": torch.ones(1, 2, dtype=torch.long), "labels": torch.ones(1, 2, dtype=torch.long)})
    long = BatchDict({"ids": torch.ones(2, 4, dtype=torch.long), "labels": torch.ones(2, 4, dtype=torch.long)})
    joined = BatchDict.from_batches([short, long], pad_values={"labels": -100})
    assert joined["ids"][0].tolist() == [1, 1, 0, 0]
    assert joined["labels"][0].tolist() == [1, 1, -100, -100]
    assert joined.size == 3


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "at least one batch"),
        ([{"a": [1]}, {"b": [1]}], r"same keys: batch 1 has \['b'\], batch 0 has \['a'\]"),
        ([{"a": [1]}, {"a": torch.ones(1)}], "'a' is a tensor in some batches and a list in others"),
        ([{"a": torch.ones(1)}, {"a": torch.ones(1, dtype=torch.long)}], "'a' differs between batches"),
        ([{"a": [1], "b": [1, 2]}], r"same number of rows, got \{'a': 1, 'b': 2\}"),
    ],
)
def test_batches_that_do_not_fit_are_refused_by_key(batches, message):
    with pytest.raises(ValueError, match=message):
        BatchDict.from_batches(batches)
    with pytest.raises(ValueError, match="pad_values names"):
        BatchDict.from_batches([{"a": [1]}], pad_values={"z": 1})


def test_values_of_other_kinds_are_refused_by_key():
    with pytest.raises(TypeError, match="'a' is a tuple"):
        BatchDict({"a": (1, 2)})
    with pytest.raises(ValueError, match="'a' is a tensor without dimensions"):
        BatchDict({"a": torch.tensor(1)})
    with pytest.raises(ValueError, match=r"same number of rows, got \{'a': 2, 'b': 1\}"):
        BatchDict(a=torch.ones(2), b=["x"])


def test_pad_grows_to_a_number_of_rows():
    padded = batch_of(2).pad(4, fill={"wide": -1, "names": "pad"})
    assert padded["wide"][3].tolist() == [-1, -1, -1]
    assert padded["ids"].tolist() == [0, 1, 0, 0]
    assert padded["names"] == ["n0", "n1", "pad", "pad"]
    with pytest.raises(ValueError, match="cannot pad 2 rows to 1"):
        batch_of(2).pad(1)


def test_micro_batches_cover_the_batch_in_order():
    assert [part["ids"].tolist() for part in batch_of(6).micro_batches(2)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match="6 rows cannot be divided by 4 rows per micro-batch"):
        batch_of(6).micro_batches(4)


def test_token_budget_counts_padding_and_uses_every_row():
    lengths = [5, 9, 2, 7, 7, 1, 3]
    for budget in (9, 12, 20, 63):
        plan = plan_token_budget(lengths, budget)
        assert all(len(rows) * max(lengths[row] for row in rows) <= budget for rows in plan)
        assert sorted(row for rows in plan for row in rows) == list(range(7))
    assert plan_token_budget(lengths, 20) == plan_token_budget(list(lengths), 20)


def test_token_budget_rounds_lengths_and_group_count():
    assert plan_token_budget([3, 3], 8, round_to=8) == [(0,), (1,)]
    assert len(plan_token_budget([1] * 8, 100, at_least=3)) == 3
    with pytest.raises(ValueError, match="at least 3 micro-batches cannot be made of 2 rows"):
        plan_token_budget([1, 1], 10, at_least=3)
    with pytest.raises(ValueError, match=r"row 1 has 9 tokens \(12 rounded\); the budget is 10"):
        plan_token_budget([1, 9], 10, round_to=4)


def test_pickling_keeps_it_plain():
    batch = batch_of(3)
    copy = pickle.loads(pickle.dumps(batch))
    assert type(copy) is BatchDict
    assert same(copy, batch)
    assert same(batch.to("cpu"), batch)


def test_an_empty_batch_has_no_rows():
    assert BatchDict().size == 0
    assert batch_of(2).slice(1, 1).size == 0
    with pytest.raises(ValueError, match="slice 1:5 does not lie in a batch of 2 rows"):
        batch_of(2).slice(1, 5)


@pytest.mark.parametrize("rows", [torch.tensor([True, False]), [True, False], [0.5], torch.tensor([1.0])])
def test_select_refuses_masks_and_fractions(rows):
    """A mask would pass for rows 1 and 0."""
    with pytest.raises(TypeError, match="rows are integers, got"):
        BatchDict(x=torch.arange(2)).select(rows)


def test_select_takes_integers_of_every_kind():
    batch = BatchDict(x=torch.arange(3))
    for rows in ([2, 0], torch.tensor([2, 0]), np.array([2, 0]), (np.int32(2), 0)):
        assert batch.select(rows)["x"].tolist() == [2, 0]


def test_token_budget_of_sizes_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="round_to must be at least 1"):
        plan_token_budget([1], 10, round_to=0)
    with pytest.raises(ValueError, match="lengths cannot be negative, got -5"):
        plan_token_budget([3, -5], 10)

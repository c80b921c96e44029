"""Micro-batches by number of tokens: which rows go together, and the numbers of the static division."""

from __future__ import annotations

import pytest
import torch

from raylane.errors import ConfigError
from raylane.nemo.translate import translate
from raylane.sft.data.mixing import rows_of_step
from raylane.sft.data.prepare import prepare
from raylane.training.run.micro_batches import FixedRows, TokenBudget, cut_together, divide, division
from raylane.workers.batch import BatchDict
from sft import tiny_run

UNPACKED = {"policy.sequence_packing": {"enabled": False}}
DYNAMIC = {**UNPACKED, "policy.dynamic_batching": {"enabled": True, "train_mb_tokens": 96, "sequence_length_round": 4}}


def start(worker, folder, changes):
    config = tiny_run.config_of(folder, changes)
    prepared = prepare(config)
    worker.setup(config, prepared, 8)
    return tiny_run.global_batch(config, prepared)


def rows_of(lengths, row_tokens):
    ids = torch.zeros(len(lengths), row_tokens, dtype=torch.int64)
    documents = torch.full_like(ids, -1)
    for row, length in enumerate(lengths):
        ids[row, :length] = row + 1
        documents[row, :length] = 0
    return BatchDict(input_ids=ids, document_ids=documents, names=[f"row {row}" for row in range(len(lengths))])


def test_rows_of_similar_length_go_together(worker):
    parts = divide(rows_of([7, 2, 6, 3], 8), TokenBudget(12, 2))
    assert [tuple(part["input_ids"].shape) for part in parts] == [(1, 8), (2, 6), (1, 2)]
    assert [part["names"] for part in parts] == [["row 0"], ["row 2", "row 3"], ["row 1"]]
    assert parts[1]["input_ids"][1].tolist() == [4, 4, 4, 0, 0, 0]


def test_rows_are_never_longer_than_they_were(worker):
    (part,) = divide(rows_of([5, 6], 6), TokenBudget(16, 4))
    assert tuple(part["input_ids"].shape) == (2, 6)


def test_rows_of_padding_and_rows_without_documents_are_kept(worker):
    (part,) = divide(rows_of([0, 0], 6), TokenBudget(16, 1))
    assert tuple(part["input_ids"].shape) == (2, 1)
    whole = BatchDict(input_ids=torch.ones(2, 6, dtype=torch.int64))
    assert [tuple(part["input_ids"].shape) for part in divide(whole, TokenBudget(6, 1))] == [(1, 6), (1, 6)]


def test_fixed_number_of_rows_is_the_plain_division(worker):
    assert [part.size for part in divide(rows_of([1, 2, 3, 4], 8), FixedRows(2))] == [2, 2]


def test_fixed_number_of_rows_loses_common_padding():
    parts = divide(rows_of([1, 3, 7, 2, 0, 0], 10), FixedRows(2, 4))
    assert [tuple(part["input_ids"].shape) for part in parts] == [(2, 4), (2, 8), (2, 4)]
    assert parts[1]["document_ids"].tolist() == [[0] * 7 + [-1], [0] * 2 + [-1] * 6]
    assert [tuple(one["input_ids"].shape) for one in divide(rows_of([9, 1], 10), FixedRows(1, 4))] == [(1, 10), (1, 4)]


def test_rows_of_a_pipeline_have_few_lengths():
    lengths = {cut_together(rows_of([n, 1], 1000), FixedRows(1, 8))["input_ids"].shape[1] for n in range(1, 1001)}
    assert len(lengths) == 8
    assert max(lengths) == 1000
    assert cut_together(rows_of([1], 1000), FixedRows(1))["input_ids"].shape[1] == 1000, "packed rows stay whole"


def test_division_cuts_unpacked_rows_only(folder):
    divisible = {**UNPACKED, "policy.make_sequence_length_divisible_by": 32}
    assert division(tiny_run.config_of(folder, divisible).policy) == FixedRows(2, 32)
    assert division(tiny_run.config_of(folder).policy) == FixedRows(2)
    assert division(tiny_run.config_of(folder, UNPACKED).policy, 3) == FixedRows(3, 8)
    parallel = {"context_parallel_size": 3, "tensor_parallel_size": 2, "sequence_parallel": True}
    changes = {**UNPACKED, "policy.dtensor_cfg": parallel, "cluster.num_workers": 6}
    changes["policy.max_total_sequence_length"] = 96
    assert division(tiny_run.config_of(folder, changes).policy) == FixedRows(2, 24)


def test_cut_rows_have_the_gradients_of_whole_ones(worker, folder):
    batch = start(worker, folder, UNPACKED)
    cut = worker.gradients(batch, 2)
    del batch["document_ids"]  # rows without documents are not cut
    whole = worker.gradients(batch, 2)
    assert abs(cut[0] - whole[0]) < 1e-6
    for name, gradient in whole[1].items():
        assert float((cut[1][name] - gradient).abs().max()) < 1e-6, name
    shapes = []
    forward = worker.model.forward

    def noted(part, *args, **kwargs):
        shapes.append(tuple(part["input_ids"].shape))
        return forward(part, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.model, "forward", noted)
        worker.train_step(0)
        worker.evaluate()
    assert all(shape[1] < tiny_run.ROW_TOKENS for shape in shapes)


def test_other_losses_get_whole_rows(worker, folder):
    """The tensors of such a loss may have the length of the rows in any place."""
    batch = start(worker, folder, UNPACKED)
    shapes = []

    def noted(logits, part):
        shapes.append(tuple(logits.shape[:2]))
        return logits.sum() * 0.0

    worker.add_loss("noted", noted)
    worker.train_batch(batch, 0, "noted", 2, False)
    assert set(shapes) == {(2, tiny_run.ROW_TOKENS)}


@pytest.mark.claim("fine-tuning", "dynamic micro-batches by tokens equal the static division")
@pytest.mark.parametrize("sharding", [{}, {"policy.dtensor_cfg.shard_parameters": "always"}])
def test_gradients_and_losses_equal_the_static_division(worker, folder, sharding):
    batch = start(worker, folder, {**UNPACKED, **sharding})
    wanted = worker.gradients(batch, None)
    losses = [worker.train_step(number)["loss"] for number in range(6)]
    start(worker, folder, {**DYNAMIC, **sharding})
    parts = divide(batch, division(worker.config.policy))
    assert all(part["input_ids"].numel() <= 96 for part in parts)
    assert sum(part["input_ids"].numel() for part in parts) < batch["input_ids"].numel() / 2, "padding is cut off"
    tiny_run.assert_same(worker.gradients(batch, None), wanted)
    assert [worker.train_step(number)["loss"] for number in range(6)] == pytest.approx(losses, abs=1e-5)
    assert worker.evaluate()["loss"] < losses[0]
    assert worker.warm_up(2, 64)["loss"] > 0


def test_parallel_division_of_rows_is_kept(folder):
    parallel = {"context_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel": True}
    config = tiny_run.config_of(folder, {**DYNAMIC, "policy.dtensor_cfg": parallel, "cluster.num_workers": 4})
    assert division(config.policy) == TokenBudget(96, 8)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"policy.sequence_packing": {"enabled": True}}, r"sequence_packing\.enabled=true exclude each other"),
        ({"policy.dynamic_batching.train_mb_tokens": 63}, r"train_mb_tokens=63 has no room for a row of .*=64 tokens"),
        ({"policy.dynamic_batching.sequence_length_round": 100}, r"rounded up to 100 .*; use at least 100"),
        (
            {"policy.dtensor_cfg.pipeline_parallel_size": 2, "cluster.num_workers": 2},
            "dynamic_batching.enabled=true does not work in a pipeline",
        ),
        ({"policy.train_global_batch_size": 9, "cluster.num_workers": 2}, "no multiple of"),
    ],
)
def test_settings_that_do_not_fit_are_refused(folder, changes, told):
    with pytest.raises(ConfigError, match=told):
        tiny_run.config_of(folder, {**DYNAMIC, **changes})


def test_micro_batch_size_does_not_limit_the_batch(folder):
    config = tiny_run.config_of(folder, {**DYNAMIC, "policy.train_global_batch_size": 9})
    assert config.policy.micro_batch_divisor == 1


def test_keys_of_nemo_rl_are_those_of_raylane():
    section = {"enabled": True, "train_mb_tokens": 4096, "sequence_length_round": 64}
    made = translate({"policy": {"dynamic_batching": {**section, "logprob_mb_tokens": 4096}}})
    assert made.document == {"policy": {"dynamic_batching": section}}
    assert not made.problems


@pytest.mark.parametrize("changes", [{}, {"data.group_by_length": True}], ids=["dealt", "grouped"])
def test_unpacked_rows_have_little_padding(worker, folder, changes):
    config = tiny_run.config_of(folder, {**UNPACKED, **changes})
    prepared = prepare(config)
    worker.setup(config, prepared, 8)
    source, shares = worker.train_rows, []
    for rows in (source.step_rows, lambda size, seed, step: rows_of_step(source, config, step)):
        batches = [BatchDict.from_arrays(source.rows(rows(8, 3, step))) for step in range(6)]
        parts = [part["document_ids"] for batch in batches for part in divide(batch, FixedRows(2, 1))]
        shares.append(sum(int((part < 0).sum()) for part in parts) / sum(part.numel() for part in parts))
    assert shares[1] < 0.6 * shares[0]
    losses = [worker.train_step(number)["loss"] for number in range(6)]
    assert losses == pytest.approx(tiny_run.reference_losses(config, prepared, 6), abs=1e-5)


def test_grouping_by_length_of_packed_rows_is_refused(folder):
    with pytest.raises(ConfigError, match=r"data\.group_by_length=true needs rows of different lengths"):
        tiny_run.config_of(folder, {"data.group_by_length": True})

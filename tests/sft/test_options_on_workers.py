"""Training options on several workers of a real Ray: each gives the numbers of one worker."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from raylane.training.model.optim import learning_rate, make_optimizer, set_learning_rate
from sft import tiny_run
from sft.worker_run import WorkerRun

LORA = {"policy.dtensor_cfg.lora_cfg": {"enabled": True, "dim": 3, "alpha": 6}, "policy.optimizer.kwargs.lr": 5e-2}
SHARDED = {"policy.dtensor_cfg.shard_parameters": "always"}
ONE_BY_ONE = {**SHARDED, "policy.dtensor_cfg.reduce_every_micro_batch": True, "policy.train_micro_batch_size": 1}
HSDP = {**SHARDED, "policy.dtensor_cfg.dp_replicate_size": 2}


@pytest.fixture(scope="module")
def two(ray_session, folder):
    run = WorkerRun(folder, 2)
    yield run
    assert run.policy.shutdown()


@pytest.fixture(scope="module")
def four(ray_session, folder):
    run = WorkerRun(folder, 4)
    yield run
    assert run.policy.shutdown()


def test_adapters_train_the_same_on_every_layout(two, tmp_path):
    """The whole model on each worker, shards, and gradients reduced after every micro-batch; and resumed elsewhere."""
    two.start(LORA)
    gradients = two.gradients()
    wanted = two.losses(range(4))
    saved = two.policy.save({})
    two.policy.save_hf(tmp_path / "whole")
    rest = two.losses(range(4, 8))
    assert rest[-1] < wanted[0] - 0.1
    for changes in (SHARDED, ONE_BY_ONE):
        two.start({**LORA, **changes})
        tiny_run.assert_same(two.gradients(two.config.policy.train_micro_batch_size), gradients)
        assert two.losses(range(4)) == pytest.approx(wanted, abs=1e-4)
        two.policy.save_hf(tmp_path / f"sharded-{len(changes)}")
        assert two.policy.load(saved.path) == 4
        assert two.losses(range(4, 8)) == pytest.approx(rest, abs=1e-4)
    for file in ("model-00001-of-00001.safetensors", "adapter/adapter_model.safetensors"):
        whole = load_file(tmp_path / "whole" / file)
        for other in (SHARDED, ONE_BY_ONE):
            sharded = load_file(tmp_path / f"sharded-{len(other)}" / file)
            assert sorted(sharded) == sorted(whole)
            for name, tensor in whole.items():
                torch.testing.assert_close(sharded[name], tensor, atol=1e-3, rtol=0)


@pytest.mark.slow
def test_adapters_on_replicas_of_shards_equal_whole_models(two, four):
    two.start(LORA)
    wanted = two.gradients()
    for changes in (HSDP, SHARDED):
        four.start({**LORA, **changes})
        tiny_run.assert_same(four.gradients(), wanted)


MUON = {
    "policy.optimizer.name": "muon",
    "policy.optimizer.groups": [{"pattern": "embed", "lr_scale": 0.3}, {"pattern": "q_proj", "weight_decay": 0.5}],
}


def one_process_losses(run, steps):
    """Return the losses of a plain model that one process trains with the optimizer of the run."""
    model = tiny_run.reference_model(run.config, run.prepared)
    holder = torch.nn.Module()
    holder.causal_lm = model
    settings, policy = run.config.policy.optimizer, run.config.policy
    optimizer, losses = make_optimizer(holder, settings), []
    for step in range(steps):
        set_learning_rate(optimizer, learning_rate(step, settings.kwargs.lr, policy.scheduler, 8))
        loss, _ = tiny_run.reference_gradients(model, run.batch(step))
        torch.nn.utils.clip_grad_norm_(model.parameters(), policy.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses


def test_muon_equals_one_process_and_resumes_elsewhere(two):
    two.start(MUON)
    wanted = one_process_losses(two, 8)
    assert wanted[-1] < wanted[0] - 0.5
    assert two.losses(range(4)) == pytest.approx(wanted[:4], abs=1e-5)
    saved = two.policy.save({})
    assert two.losses(range(4, 8)) == pytest.approx(wanted[4:], abs=1e-5)
    two.start({**MUON, **SHARDED})
    assert two.losses(range(8)) == pytest.approx(wanted, abs=1e-5)
    assert two.policy.load(saved.path) == 4
    resumed = two.losses(range(4, 8))
    assert resumed == pytest.approx(wanted[4:], abs=1e-5)
    assert two.policy.load(saved.path) == 4
    two.policy.call("warm_up", 2, 32)
    assert two.losses(range(4, 8)) == resumed, "a warm-up step leaves no trace"


@pytest.mark.slow
def test_muon_on_replicas_of_shards_equals_one_process(four):
    four.start({**MUON, **HSDP})
    assert four.losses(range(6)) == pytest.approx(one_process_losses(four, 6), abs=1e-5)


def test_weighted_files_give_the_same_rows_to_every_layout(two, folder):
    """The workers' own rows, the rows that the driver reads, and those after a resume in the second epoch."""
    train = [
        {"path": str(folder / "train.jsonl"), "weight": 0.4},
        {"path": str(folder / "validation.jsonl"), "weight": 2},
    ]
    two.start({"data.train": train, "sft.max_num_epochs": 3})
    wanted = two.losses(range(8))
    saved = two.policy.save({})
    two.start({"data.train": train, **SHARDED})
    assert [two.policy.train(two.batch(step))["loss"] for step in range(8)] == pytest.approx(wanted, abs=1e-5)
    assert two.policy.load(saved.path) == 8
    assert (two.batch(8)["input_ids"] != two.batch(0)["input_ids"]).any()


def test_token_budget_gives_the_numbers_of_fixed_micro_batches(two):
    """Workers with short rows run as many micro-batches as those with long ones, or their collectives would wait."""
    unpacked = {"policy.sequence_packing": {"enabled": False}}
    budget = {"enabled": True, "train_mb_tokens": 64, "sequence_length_round": 4}
    two.start(unpacked)
    gradients, wanted = two.gradients(), two.losses(range(6))
    for changes in ({}, SHARDED, ONE_BY_ONE):
        two.start({**unpacked, **changes, "policy.dynamic_batching": budget})
        tiny_run.assert_same(two.gradients(None), gradients)
        assert two.losses(range(6)) == pytest.approx(wanted, abs=1e-5)
    two.start({**unpacked, "policy.dynamic_batching": budget, "policy.train_global_batch_size": 8})
    assert two.policy.train(two.batch())["loss"] == pytest.approx(wanted[0], abs=1e-5)

"""Experts that stay on their workers: steps, options and files are those of FSDP2 and of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from raylane.errors import ConfigError
from raylane.sft.data.prepare import prepare
from sft import tiny_run
from sft.layouts import CP, EP, FSDP, PP, REPLICAS, TP
from sft.model_types import EXPERTS, folder_changes, new_folder

D = "policy.dtensor_cfg."
EXPERT_PARALLEL = {"cluster.num_workers": 2, D + EP: 2}
SHARDED = {"cluster.num_workers": 2, D + "shard_parameters": FSDP["shard_parameters"]}
# AdamW divides each gradient by its own size: with a small eps rounding errors would decide about whole steps.
TRAINING = {"policy.optimizer.kwargs": {"lr": 1e-3, "eps": 1e-4}, "policy.max_grad_norm": 0.05}
STEPS = 3


def trained(worker: Any, folder: Path, changes: dict[str, Any], out: Path) -> list[float]:
    """Run steps, save the state and a Hugging Face folder; return the losses. Runs on every rank."""
    config = tiny_run.config_of(folder, {**changes, **TRAINING})
    worker.setup(config, prepare(config), 8)
    losses = [worker.train_step(number)["loss"] for number in range(STEPS)]
    worker.save_state(str(out / "state"), STEPS)
    worker.save_hf(str(out / "hf"))
    return losses


def gradients_of(worker: Any, folder: Path, changes: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients of step 0; runs on every rank."""
    config = tiny_run.config_of(folder, changes)
    worker.setup(config, prepare(config), 8)
    return worker.gradients(worker.own_rows(0), 2)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: values for file in folder.glob("*.safetensors") for name, values in load_file(file).items()}


@pytest.mark.claim("fine-tuning", "training with experts divided over workers equals one process (CPUs only)")
def test_training_with_divided_experts_equals_one_process(ranks, worker, folder, tmp_path):
    new_folder(tmp_path / "start", "mixtral", EXPERTS["mixtral"])
    start = folder_changes(folder, tmp_path / "start")
    losses = trained(worker, folder, start, tmp_path / "alone")
    for of_rank in ranks.run(trained, folder, {**start, **EXPERT_PARALLEL}, tmp_path / "divided"):
        assert of_rank == pytest.approx(losses, abs=1e-5, rel=0)
    expected, exported = tensors(tmp_path / "alone/hf"), tensors(tmp_path / "divided/hf")
    assert set(exported) == set(expected) == set(tensors(tmp_path / "start"))
    assert max(float((exported[name] - values).abs().max()) for name, values in expected.items()) < 1e-5
    # The state of divided experts loads on one worker.
    assert worker.load_state(str(tmp_path / "divided/state")) == STEPS
    worker.save_hf(str(tmp_path / "loaded"))
    assert all(torch.equal(values, exported[name]) for name, values in tensors(tmp_path / "loaded").items())


OPTIONS = {
    "checkpointing": {D + "activation_checkpointing": "full"},
    "adapters": {D + "lora_cfg": {"enabled": True, "dim": 4}},
    "bfloat16": {"policy.precision": "bfloat16"},
    "router loss": {"policy.hf_config_overrides": {"output_router_logits": True, "router_aux_loss_coef": 0.5}},
    "every micro-batch": {D + "reduce_every_micro_batch": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_options_with_divided_experts_equal_fsdp2(ranks, folder, tmp_path, option):
    new_folder(tmp_path, "qwen3_moe", EXPERTS["qwen3_moe"])
    changes = {**folder_changes(folder, tmp_path), **OPTIONS[option]}
    (loss, gradients), _ = ranks.run(gradients_of, folder, {**changes, **EXPERT_PARALLEL})
    (expected_loss, expected), _ = ranks.run(gradients_of, folder, {**changes, **SHARDED})
    # In bfloat16 sums in another order are rounded to other numbers.
    tolerance = 3e-2 if option == "bfloat16" else 1e-5
    assert abs(loss - expected_loss) < tolerance
    assert set(gradients) == set(expected)
    for name, gradient in expected.items():
        assert float((gradients[name] - gradient).norm()) < tolerance * max(1.0, float(gradient.norm())), name


@pytest.mark.slow
def test_worker_whose_experts_nobody_chooses_has_zero_gradients(ranks, folder, tmp_path):
    plain = new_folder(tmp_path, "gpt_oss", EXPERTS["gpt_oss"])
    for layer in plain.model.layers:
        layer.mlp.router.bias.data.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
    plain.save_pretrained(tmp_path)
    plain.set_attn_implementation("eager")
    changes = {**folder_changes(folder, tmp_path), **EXPERT_PARALLEL}
    config = tiny_run.config_of(folder, changes)
    batch = tiny_run.global_batch(config, prepare(config))
    (result, _) = ranks.run(gradients_of, folder, changes)
    tiny_run.assert_same(result, tiny_run.reference_gradients(plain.train(), batch))
    assert not result[1]["model.layers.0.mlp.experts.down_proj"][2:].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cluster.num_workers": 4}, r"must be 1 or the number of workers that share the weights.*num_workers=4"),
        (
            {"cluster.num_workers": 4, D + TP: 2, D + EP: 4},
            "does not work with .*tensor_parallel_size above",
        ),
        ({D + CP: 2}, "does not work with policy.dtensor_cfg.context_parallel_size above 1"),
        ({D + PP: 2}, "does not work with policy.dtensor_cfg.pipeline_parallel_size above 1"),
        ({D + REPLICAS: 2}, r"must be 1 or .*num_workers=2 / dp_replicate_size=2"),
        ({D + "shard_parameters": "never"}, "needs FSDP2, but policy.dtensor_cfg.shard_parameters=never"),
        ({D + "compile_layers": True}, "does not work with policy.dtensor_cfg.compile_layers=true"),
        (
            {"policy.hf_config_overrides.model_type": "olmoe"},
            r"'olmoe' cannot be divided by .*expert_parallel_size; ",
        ),
        ({"policy.hf_config_overrides.num_local_experts": 5}, r"num_local_experts=5 does not divide by .*size=2"),
    ],
)
def test_settings_that_do_not_divide_experts_are_refused(folder, changes, message):
    start = {**EXPERT_PARALLEL, "policy.hf_config_overrides.model_type": "mixtral"}
    with pytest.raises(ConfigError, match=message):
        tiny_run.config_of(folder, {**start, **changes})

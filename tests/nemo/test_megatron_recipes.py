"""Megatron recipes and LoRA recipes of NeMo-RL: the same model, optimizer and learning rates in raylane."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.nemo.upstream_file import NEMO_FILE

from raylane.nemo.dialect import NEMO_RL
from raylane.nemo.import_config import import_config
from raylane.nemo.translate import translate
from raylane.sft.config.load import build_config, load_config
from raylane.training.model.optim import learning_rate

OPTIMIZER = {
    "optimizer": "adam",
    "lr": 2e-5,
    "min_lr": 2e-6,
    "weight_decay": 0.05,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "adam_eps": 1e-6,
    "clip_grad": 0.7,
    "bf16": True,
    "use_distributed_optimizer": True,
}
SCHEDULE = {
    "start_weight_decay": 0.05,
    "end_weight_decay": 0.05,
    "weight_decay_incr_style": "constant",
    "lr_decay_style": "cosine",
    "lr_decay_iters": 40,
    "lr_warmup_iters": 8,
    "lr_warmup_init": 2e-7,
}
MEGATRON = {
    "enabled": True,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "apply_rope_fusion": True,
    "peft": {"enabled": False, "dim": 8},
    "env_vars": {"A": "1"},
    "optimizer": OPTIMIZER,
    "scheduler": SCHEDULE,
}


def recipe(tmp_path: Path, changes: dict[str, Any]) -> Path:
    """Write a recipe on top of NeMo-RL's file, with local data and a local model."""
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "base.yaml").write_text(NEMO_FILE)
    data = {name: {"dataset_name": "ResponseDataset", "data_path": f"{name}.jsonl"} for name in ("train", "validation")}
    policy = {"model_name": str(tmp_path / "model"), "tokenizer": {"chat_template": "llama3"}, **changes}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"defaults": "base.yaml", "data": data, "policy": policy}))
    return tmp_path / "recipe.yaml"


def megatron_recipe(tmp_path: Path, **changes: Any) -> Path:
    section = {**MEGATRON, **changes}
    return recipe(tmp_path, {"optimizer": None, "dtensor_cfg": {"enabled": False}, "megatron_cfg": section})


def test_megatron_recipe_is_imported_completely(tmp_path: Path) -> None:
    made = import_config(megatron_recipe(tmp_path))
    assert (made.to_do, made.refused) == ((), ())
    (tmp_path / "ours.yaml").write_text(made.yaml("theirs"))
    config = load_config(tmp_path / "ours.yaml")
    assert config == load_config(tmp_path / "recipe.yaml", (), NEMO_RL)
    policy = config.policy
    assert policy.megatron_cfg.enabled
    assert policy.dtensor_cfg.tensor_parallel_size == 2
    assert (policy.max_grad_norm, policy.optimizer.weight_decay_on) == (0.7, "matrices")
    kwargs = policy.optimizer.kwargs
    assert (kwargs.lr, kwargs.weight_decay, kwargs.eps, list(kwargs.betas)) == (2e-5, 0.05, 1e-6, [0.8, 0.95])
    assert config.cluster.env_vars == {"A": "1"}


def test_learning_rates_are_those_of_megatron(tmp_path: Path) -> None:
    """Against Megatron-core's formula: the warm-up ends at step 8, the decay at step 40, the end of the run."""
    config = load_config(megatron_recipe(tmp_path), (), NEMO_RL)
    for step in range(40):
        if step <= 8:
            wanted = 2e-7 + (2e-5 - 2e-7) * step / 8
        else:
            wanted = 2e-6 + 0.5 * (math.cos(math.pi * (step - 8) / 32) + 1) * (2e-5 - 2e-6)
        assert learning_rate(step, 2e-5, config.policy.scheduler, 40) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"scheduler": {**SCHEDULE, "lr_decay_style": "WSD"}}, "lr_decay_style=WSD cannot be expressed"),
        ({"scheduler": {**SCHEDULE, "lr_decay_iters": 1000}}, r"lr_decay_iters=1000 is not the end of the run"),
        ({"scheduler": {**SCHEDULE, "lr_warmup_init": 1.0}}, "the rate would fall"),
        (
            {"scheduler": {**SCHEDULE, "end_weight_decay": 0.1, "weight_decay_incr_style": "linear"}},
            "weight decay that changes",
        ),
        # Megatron-core asserts that the two are equal, if the style is constant.
        ({"scheduler": {**SCHEDULE, "end_weight_decay": 0.1}}, r"start_weight_decay=0.05, end_weight_decay=0.1"),
        ({"scheduler": {**SCHEDULE, "end_weight_decay": None, "start_weight_decay": 0}}, "end_weight_decay=0.05"),
        ({"optimizer": {**OPTIMIZER, "optimizer": "sgd"}}, "only adam"),
        ({"optimizer": {**OPTIMIZER, "decoupled_weight_decay": False}}, r"Adam with L2.* set it to true"),
        ({"optimizer": {**OPTIMIZER, "decoupled_lr": 1e-4}}, "decoupled_lr=0.0001: embedding and head have the same"),
        ({"optimizer": {**OPTIMIZER, "exp_avg_dtype": "torch.bfloat16"}}, "exp_avg_dtype=torch.bfloat16: .*float32"),
        ({"optimizer": {**OPTIMIZER, "brand_new": 3}}, "brand_new=3: this key is not known"),
        ({"optimizer": {**OPTIMIZER, "fp16": True}}, "fp16=true"),
        ({"optimizer": {**OPTIMIZER, "optimizer_cpu_offload": True}}, "optimizer_cpu_offload=true"),
        (
            {"peft": {"enabled": True, "target_modules": ["mixer"]}},
            "set policy.dtensor_cfg.lora_cfg and policy.megatron_cfg.enabled=false",
        ),
        ({"fp8_cfg": {"enabled": True}}, "fp8 is not supported"),
    ],
)
def test_megatron_settings_without_an_equal_are_to_do(tmp_path: Path, section: dict[str, Any], told: str) -> None:
    made = import_config(megatron_recipe(tmp_path, **section))
    assert any(re.search(told, one) for one in made.to_do), made.to_do


@pytest.mark.parametrize(
    ("section", "asked", "kept"),
    [
        ({"sequence_parallel": True}, "sequence_parallel=true", {"sequence_parallel": True}),
        (
            {"peft": {"enabled": True, "dim": 4, "target_modules": ["linear_qkv", "linear_fc2"]}},
            "lora_cfg.enabled=true",
            {"lora_cfg": {"enabled": True, "dim": 4, "target_modules": ["q_proj", "k_proj", "v_proj", "down_proj"]}},
        ),
    ],
)
def test_sizes_beyond_the_backend_take_raylanes_layers(
    tmp_path: Path, section: dict[str, Any], asked: str, kept: dict[str, Any]
) -> None:
    made = import_config(megatron_recipe(tmp_path, tensor_model_parallel_size=1, **section))
    reasons = {note.key: note.reason for note in made.notes}
    assert reasons["policy.megatron_cfg"] == f"raylane's own layers train instead, for {asked}"
    policy = made.document["policy"]
    assert "megatron_cfg" not in policy
    for key, value in kept.items():
        actual = policy["dtensor_cfg"][key]
        assert actual | value == actual if isinstance(value, dict) else actual == value


@pytest.mark.parametrize("style", ["constant", "linear"])
def test_weight_decay_of_the_schedule_replaces_the_other(tmp_path: Path, style: str) -> None:
    decays = {"start_weight_decay": 0.1, "end_weight_decay": 0.1, "weight_decay_incr_style": style}
    changes = {"optimizer": {**OPTIMIZER, "weight_decay": 0.01}, "scheduler": {**SCHEDULE, **decays}}
    config = load_config(megatron_recipe(tmp_path, **changes), (), NEMO_RL)
    assert config.policy.optimizer.kwargs.weight_decay == 0.1


def test_optimizer_keys_without_effect_are_left_out(tmp_path: Path) -> None:
    others = {
        "decoupled_weight_decay": True,
        "fp16": False,
        "params_dtype": "bfloat16",
        "sgd_momentum": 0.9,
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": "float32",
        "optimizer_cpu_offload": False,
        "optimizer_offload_fraction": 0.0,
        "overlap_cpu_optimizer_d2h_h2d": False,
    }
    made = import_config(megatron_recipe(tmp_path, optimizer={**OPTIMIZER, **others}))
    assert (made.to_do, made.refused) == ((), ())


def test_unknown_megatron_key_is_reported(tmp_path: Path) -> None:
    made = import_config(megatron_recipe(tmp_path, brand_new=3))
    assert [problem.key for problem in made.refused] == ["policy.megatron_cfg.brand_new"]


def test_own_section_and_own_sizes_stay_as_they_are() -> None:
    document = {"policy": {"megatron_cfg": {"enabled": True}, "dtensor_cfg": {"tensor_parallel_size": 2}}}
    made = translate(document)
    assert made.document == document
    assert not made.notes
    off = {"policy": {"megatron_cfg": {"enabled": False, "tensor_model_parallel_size": 8}}}
    assert translate(off).document == {"policy": {}}


# ------------------------------------------------------------------------------------------------------------ LoRA

LORA = {"enabled": True, "dim": 4, "alpha": 8, "dropout": 0.1, "use_triton": False, "lora_dtype": "None"}


def lora_of(tmp_path: Path, section: dict[str, Any]) -> Any:
    made = import_config(recipe(tmp_path, {"dtensor_cfg": {"lora_cfg": {**LORA, **section}}}))
    assert (made.to_do, made.refused) == ((), ())
    return build_config(made.document).policy.dtensor_cfg.lora_cfg


def test_lora_recipe_is_imported_completely(tmp_path: Path) -> None:
    lora = lora_of(tmp_path, {"lora_A_init": "uniform", "dropout_position": "pre"})
    assert (lora.enabled, lora.dim, lora.alpha, lora.dropout) == (True, 4, 8, 0.1)
    assert (lora.lora_A_init, lora.dropout_position, lora.target_modules) == ("kaiming", "pre", ())


def test_lora_recipe_keeps_the_defaults_of_nemo_rl(tmp_path: Path) -> None:
    lora = lora_of(tmp_path, {"match_all_linear": False})
    assert (lora.lora_A_init, lora.dropout_position, lora.target_modules) == ("xavier", "post", ("*_proj",))
    named = lora_of(tmp_path, {"match_all_linear": False, "target_modules": ["q_proj"]})
    assert named.target_modules == ("q_proj",)
    less = lora_of(tmp_path, {"match_all_linear": False, "exclude_modules": ["*.mlp.*"]})
    assert (less.match_all_linear, less.exclude_modules) == (True, ("*.mlp.*",))


def test_lora_recipe_with_two_choices_of_layers_is_to_do(tmp_path: Path) -> None:
    section = {**LORA, "match_all_linear": True, "target_modules": ["q_proj"]}
    made = import_config(recipe(tmp_path, {"dtensor_cfg": {"lora_cfg": section}}))
    assert any("match_all_linear=true is set too" in one for one in made.to_do)

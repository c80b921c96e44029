"""Files of NeMo-RL: what asks for nothing is left out, other spellings are understood, and all else is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raylane.errors import ConfigError
from raylane.sft.config import RunConfig, load_config
from raylane.sft.nemo_rl import interpolate, translate
from raylane.sft.overrides import FROM_NEMO_RL, refuse_unknown

PASTED = """
sft: {max_num_epochs: 1, max_num_steps: 60, val_period: 10, val_batches: 8, val_global_batch_size: 32,
      val_micro_batch_size: 1, val_at_start: true, val_at_end: false, seed: 42}
checkpointing: {enabled: true, checkpoint_dir: results/sft, metric_name: "val:val_loss", higher_is_better: false,
                keep_top_k: 3, save_period: 10, checkpoint_must_save_by: null}
policy:
  model_name: null
  hf_config_overrides: {model_type: llama}
  tokenizer: {train_vocab_size: 400, chat_template_kwargs: null,
              chat_template: "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"}
  train_global_batch_size: 32
  train_micro_batch_size: 2
  max_total_sequence_length: 1024
  precision: bfloat16
  offload_optimizer_for_logprob: false
  dtensor_cfg: {enabled: true, _v2: true, env_vars: {}, cpu_offload: false, sequence_parallel: false,
                activation_checkpointing: false, tensor_parallel_size: 1, context_parallel_size: 1,
                custom_parallel_plan: null, lora_cfg: {enabled: false, dim: 8}}
  dynamic_batching: {enabled: false}
  sequence_packing:
    enabled: true
    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}
    algorithm: modified_first_fit_decreasing
    sequence_length_round: 64
  make_sequence_length_divisible_by: ${policy.dtensor_cfg.tensor_parallel_size}
  max_grad_norm: 1.0
  optimizer:
    name: torch.optim.AdamW
    kwargs: {lr: 5.0e-6, weight_decay: 0.1, betas: [0.9, 0.98], eps: 1e-5, foreach: false, fused: false}
  megatron_cfg: {enabled: false, tensor_model_parallel_size: 2}
data:
  max_input_seq_length: ${policy.max_total_sequence_length}
  add_generation_prompt: false
  shuffle: true
  num_workers: 1
  train: {dataset_name: openai_format, data_path: train.jsonl, chat_key: conversation, tool_key: null}
  validation: {dataset_name: openai_format, data_path: held_out.jsonl}
logger: {log_dir: logs, wandb_enabled: false, tensorboard_enabled: false, mlflow_enabled: false,
         swanlab_enabled: false, monitor_gpus: false, num_val_samples_to_print: 0,
         wandb: {project: sft-dev, name: "sft-${policy.train_global_batch_size}"},
         gpu_monitoring: {collection_interval: 10, flush_interval: 10}}
cluster: {gpus_per_node: 1, num_nodes: 1}
"""


def test_load_of_a_pasted_file_understands_it(tmp_path: Path, caplog) -> None:
    caplog.set_level("INFO", "raylane")
    (tmp_path / "run.yaml").write_text(PASTED)
    config = load_config(tmp_path / "run.yaml", ["policy.train_micro_batch_size=4"])
    assert config.policy.optimizer.name == "adamw"
    assert config.policy.sequence_packing.algorithm == "first_fit_decreasing"
    assert config.checkpointing.metric_name == "val:loss"
    assert (config.data.train, config.data.validation) == (("train.jsonl",), "held_out.jsonl")
    assert config.data.messages_key == "conversation"
    assert config.logger.wandb.name == "sft-32"
    assert "are ignored: policy.dtensor_cfg.enabled, policy.dtensor_cfg._v2" in caplog.text


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"policy": {"dtensor_cfg": {"tensor_parallel_size": 2}}}, "tensor parallelism is not supported yet"),
        ({"policy": {"dtensor_cfg": {"enabled": False}}}, "it is always on"),
        ({"policy": {"megatron_cfg": {"enabled": True}}}, "no Megatron backend"),
        ({"policy": {"sequence_packing": {"train_mb_tokens": 5000}}}, "policy.train_micro_batch_size tokens"),
        ({"policy": {"tokenizer": {"chat_template_kwargs": {"a": 1}}}}, "write them into the template"),
        ({"logger": {"mlflow_enabled": True}}, "MLflow is not supported"),
        ({"policy": {"dtensor_cfg": {"env_vars": {"A": "b"}}}}, "use cluster.env_vars"),
    ],
)
def test_keys_that_ask_for_something_are_still_refused(section: dict[str, Any], told: str) -> None:
    document, left_out = translate(section)
    assert not left_out
    with pytest.raises(ConfigError, match=told):
        refuse_unknown(document, RunConfig, "run.yaml")


def test_data_section_with_other_keys_is_not_half_understood() -> None:
    for extra in ({"dataset_name": "squad"}, {"system_prompt": "Be kind."}):
        document = {"data": {"train": {"data_path": "a.jsonl", **extra}}}
        assert translate(document)[0] == document


def test_interpolation_keeps_types_and_nests() -> None:
    document = {"a": {"b": 3, "c": [1, "${a.b}"]}, "d": "${a.b}", "e": "x${a.b}-${d}", "f": "${mul:${a.b},2}"}
    more = {"g": "${l}", "l": [1, {"m": 2}], "h": "${div:7,2}", "i": "${div:6,2}", "j": r"\${a}", "k": "${mul:0.5,4}"}
    made = interpolate({**document, **more}, "run.yaml")
    assert made == {
        "a": {"b": 3, "c": [1, 3]}, "d": 3, "e": "x3-3", "f": 6, "g": [1, {"m": 2}], "l": [1, {"m": 2}],
        "h": 3.5, "i": 3, "j": "${a}", "k": 2.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("${no.such}", r"no\.such is not set"),
        ("${a}", "refers to itself in a circle"),
        ("x${a}", "refers to itself in a circle"),
        ("${section}", "contains further expressions"),
        ("${oc.env:HOME}", "there is no resolver 'oc.env'"),
        ("${mul:a,2}", "cannot compute"),
        ("${div:1,0}", "cannot compute"),
        ("${div:1,2,3}", "cannot compute"),
        ("x${section}", "cannot be part of a text"),
    ],
)
def test_interpolation_that_fails_is_named(value: str, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"run\.yaml: .*({told})"):
        interpolate({"a": value, "section": {"b": "${section}"}}, "run.yaml")


def test_every_key_without_effect_is_unknown_to_the_schema() -> None:
    from raylane.sft.nemo_rl import _WITHOUT_EFFECT
    from raylane.sft.overrides import _paths

    assert not set(_WITHOUT_EFFECT) & set(_paths(RunConfig))
    assert not set(FROM_NEMO_RL) & set(_paths(RunConfig))

"""Table of the NeMo-RL keys that raylane's schema does not have, with the treatment of each one.

Facts about NeMo-RL are from examples/configs/sft.yaml, nemo_rl/models/policy/__init__.py, nemo_rl/utils/checkpoint.py
and nemo_rl/data of NVIDIA-NeMo/RL, March 2025 to August 2026. Data and predicates only; `translate` applies the table,
and `dialect` takes its error messages from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["OTHERWISE", "RENAMES", "RULES", "Rule", "is_nemo_key", "refusal", "rules_markdown"]


def _off(value: Any) -> bool:
    """Return True for null, false, 0 and empty values."""
    return not value


def _on(value: Any) -> bool:
    return value is True


def _one(value: Any) -> bool:
    return value is None or value == 1


def _float32(value: Any) -> bool:
    """Return True for no data type (NeMo-RL's files write None, which YAML reads as text) and for float32."""
    return not value or str(value).rpartition(".")[2] in ("None", "float32")


def _anything(value: Any) -> bool:
    return True


def _disabled(value: Any) -> bool:
    """Return True for an empty section and for one with `enabled: false`, whatever its other keys are."""
    return not value or (isinstance(value, Mapping) and value.get("enabled") is False)


def _force_hf_only(value: Any) -> bool:
    return not value or (isinstance(value, Mapping) and set(value) <= {"force_hf"})


@dataclass(frozen=True)
class Rule:
    """Treatment of one NeMo-RL key: left out if its value is harmless, otherwise refused."""

    key: str
    harmless: Callable[[Any], bool]
    """Returns True if the value requests nothing beyond what raylane does anyway."""
    why_left_out: str
    why_refused: str = ""
    """Reason for refusing any other value, and the remedy; empty if every value is harmless."""
    changes_training: bool = False
    """True if a run without the refused value would train another model."""


_RL = "only reinforcement learning uses it"
_ONE_WAY = "it is off"
_GRPO = "raylane does supervised fine-tuning only"

RULES: tuple[Rule, ...] = (
    # Whole configurations of other algorithms.
    Rule("grpo", _off, _RL, _GRPO, changes_training=True),
    Rule("dpo", _off, _RL, _GRPO, changes_training=True),
    Rule("rm", _off, _RL, _GRPO, changes_training=True),
    Rule("distillation", _off, _RL, _GRPO, changes_training=True),
    # Sections that the SFT script of NeMo-RL does not read.
    Rule("loss_fn", _anything, _RL),
    Rule("env", _anything, _RL),
    Rule(
        "sft.only_unmask_final",
        _off,
        "every assistant message is supervised",
        "set weight: 0 on all assistant messages but the last one in the data",
        changes_training=True,
    ),
    # ------------------------------------------------------------------------------------------------------ policy
    # Generation and log-probabilities, which a shared base file may configure.
    Rule("policy.generation", _anything, _RL),
    Rule("policy.generation_batch_size", _anything, _RL),
    Rule("policy.logprob_batch_size", _anything, _RL),
    Rule("policy.logprob_chunk_size", _anything, _RL),
    Rule("policy.offload_optimizer_for_logprob", _anything, _RL),
    Rule("policy.refit_buffer_size_gb", _anything, _RL),
    # Features for other kinds of models; off in a plain language model.
    Rule("policy.router_replay", _disabled, _RL, "it is not supported", changes_training=True),
    Rule("policy.reward_model_cfg", _disabled, _RL, _GRPO, changes_training=True),
    Rule("policy.draft", _disabled, "no draft model", "draft models are not supported", changes_training=True),
    Rule("policy.is_vlm", _off, "a text model", "only text models can be trained", changes_training=True),
    Rule(
        "policy.dequantize_base_checkpoint",
        _off,
        "the checkpoint is not quantized",
        "quantized checkpoints cannot be read; convert the model first",
        changes_training=True,
    ),
    *(
        Rule(f"policy.{name}", _off, "no quantization", "quantization is not supported", changes_training=True)
        for name in (
            "quant_cfg",
            "quant_calib_data",
            "quant_calib_size",
            "quant_batch_size",
            "quant_sequence_length",
            "disable_modelopt_layer_spec",
        )
    ),
    *(
        Rule(
            key, _off, "none is named", "Megatron checkpoints cannot be read; convert the model", changes_training=True
        )
        for key in ("policy.pretrained_checkpoint", "checkpointing.pretrained_checkpoint")
    ),
    # Parallelism: a value of 1 or false is what raylane does. Other values change the speed, not the model.
    Rule("policy.dtensor_cfg.enabled", _on, "FSDP2 is always on", "it is always on; remove it"),
    Rule("policy.dtensor_cfg._v2", _anything, "there is one FSDP2 backend"),
    Rule(
        "policy.dtensor_cfg.expert_parallel_size", _one, _ONE_WAY, "expert parallelism is not supported yet; remove it"
    ),
    Rule("policy.dtensor_cfg.moe_parallelizer", _off, _ONE_WAY, "expert parallelism is not supported yet; remove it"),
    Rule("policy.dtensor_cfg.custom_parallel_plan", _off, _ONE_WAY, "FSDP2 wraps each layer; remove it"),
    Rule("policy.dtensor_cfg.lora_cfg.use_triton", _anything, "the numbers are the same"),
    Rule("policy.dtensor_cfg.lora_cfg.lora_dtype", _float32, "adapters are float32", "adapters are float32; remove it"),
    Rule(
        "policy.dtensor_cfg.automodel_kwargs",
        _force_hf_only,
        "models are loaded by transformers",
        "models are loaded by transformers, not by Automodel; remove it",
    ),
    Rule("policy.dtensor_cfg.clear_cache_every_n_steps", _anything, "the memory cache is not cleared"),
    # Megatron-core (policy.megatron_cfg.enabled). If it is off, `translate` leaves out the whole section.
    *(
        Rule(f"policy.megatron_cfg.{name}", _one, _ONE_WAY, "only dense models can be trained; remove it")
        for name in ("expert_model_parallel_size", "expert_tensor_parallel_size")
    ),
    *(
        Rule(f"policy.megatron_cfg.{name}", _off, _ONE_WAY, "raylane has no pipeline of Megatron; remove it")
        for name in (
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
            "virtual_pipeline_model_parallel_size",
        )
    ),
    Rule(
        "policy.megatron_cfg.peft",
        _disabled,
        "no adapters",
        "adapters are trained with raylane's own layers; set policy.dtensor_cfg.lora_cfg and "
        "policy.megatron_cfg.enabled=false",
        changes_training=True,
    ),
    Rule("policy.megatron_cfg.fp8_cfg", _disabled, "no fp8", "fp8 is not supported; remove it", changes_training=True),
    *(
        Rule(f"policy.megatron_cfg.{name}", _anything, "dense models have no experts")
        for name in (
            "freeze_moe_router",
            "moe_aux_loss_coeff",
            "moe_enable_deepep",
            "moe_per_layer_logging",
            "moe_permute_fusion",
            "moe_router_bias_update_rate",
            "moe_router_dtype",
            "moe_router_load_balancing_type",
            "moe_shared_expert_overlap",
            "moe_token_dispatcher_type",
        )
    ),
    *(
        Rule(f"policy.megatron_cfg.{name}", _anything, "it changes the speed, not the numbers")
        for name in (
            "apply_rope_fusion",
            "bias_activation_fusion",
            "defer_fp32_logits",
            "distributed_data_parallel_config",
            "empty_unused_memory_level",
            "force_overwrite_initial_ckpt",
            "pipeline_dtype",
        )
    ),
    Rule("policy.megatron_cfg.converter_type", _anything, "the model type of the folder decides"),
    Rule("policy.megatron_cfg.train_iters", _anything, "sft.max_num_steps decides"),
    Rule("policy.dynamic_batching.logprob_mb_tokens", _anything, _RL),
    Rule("policy.sequence_packing.microbatch_order", _anything, "the order of the rows is fixed by sft.seed"),
    Rule("policy.sequence_packing.logprob_mb_tokens", _anything, _RL),
    # fastokens is a faster tokenizer with the same result.
    Rule("policy.tokenizer.use_fastokens", _anything, "the tokens are the same"),
    *(
        Rule(f"policy.tokenizer.{name}", _off, "text only", "only text models can be trained", changes_training=True)
        for name in ("audio", "video", "use_processor")
    ),
    # -------------------------------------------------------------------------------------------------------- data
    Rule("data.num_workers", _anything, "data is tokenised once into a cache"),
    Rule("data.seed", _anything, "the order of the data depends on sft.seed"),
    # NeMo-RL adds these tokens where the template did not (llm_message_utils.get_formatted_message_log).
    Rule("data.add_bos", _anything, "the chat template decides"),
    Rule("data.add_eos", _anything, "the chat template decides; a run without supervised end tokens is refused"),
    Rule("data.add_generation_prompt", _anything, "{% generation %} in the chat template marks what is supervised"),
    Rule("data.use_multiple_dataloader", _off, _RL, "it is not supported; remove it"),
    Rule("data.num_prompts_per_dataloader", _anything, _RL),
    Rule("data.custom_dataloader", _off, _RL, "it is not supported; remove it", changes_training=True),
    Rule(
        "data.add_system_prompt",
        _off,
        "no system prompt is added",
        "put the system prompt into the data, as a message with role system",
        changes_training=True,
    ),
    # ----------------------------------------------------------------------------------------------- checkpointing
    # A time limit that is ignored would lose work, so it is refused.
    Rule(
        "checkpointing.checkpoint_must_save_by",
        _off,
        "no time limit is set",
        "send SIGTERM when time is up: the run saves and ends",
    ),
    Rule("checkpointing.ft_save_period", _off, "no second period is set", "use checkpointing.save_period"),
    Rule("checkpointing.model_save_format", _anything, "weights are saved as safetensors"),
    Rule("checkpointing.model_cache_dir", _anything, "nothing is downloaded"),
    Rule("checkpointing.model_repo_id", _anything, "nothing is downloaded"),
    *(
        Rule(
            f"checkpointing.{name}",
            _off,
            "policy.dtensor_cfg.lora_cfg decides",
            "set policy.dtensor_cfg.lora_cfg instead",
            changes_training=True,
        )
        for name in ("is_peft", "peft_config")
    ),
    # ------------------------------------------------------------------------------------------- logger and cluster
    Rule("logger.mlflow_enabled", _off, "MLflow is off", "MLflow is not supported; metrics.jsonl is always written"),
    Rule("logger.mlflow", _anything, "MLflow is not supported"),
    Rule("logger.swanlab_enabled", _off, "SwanLab is off", "SwanLab is not supported; metrics.jsonl is always written"),
    Rule("logger.swanlab", _anything, "SwanLab is not supported"),
    Rule("logger.tensorboard", _anything, "TensorBoard files are in logger.log_dir/tensorboard"),
    # Watching a run less closely does not change it, so these are ignored even if they request something.
    Rule("logger.monitor_gpus", _anything, "GPUs are not monitored"),
    Rule("logger.gpu_monitoring", _anything, "GPUs are not monitored"),
    Rule("logger.num_val_samples_to_print", _anything, "one sample answer is printed at the end"),
    Rule(
        "cluster.segment_size",
        _off,
        "workers are placed without regard to NVLink domains",
        "placement by NVLink domain is not supported; remove it",
    ),
    # Ports of the rendezvous; raylane lets the operating system choose free ones.
    Rule("cluster.master_port_range_low", _anything, "the operating system chooses ports"),
    Rule("cluster.master_port_range_high", _anything, "the operating system chooses ports"),
)
"""Keys that are left out or refused. A rule for a section covers all keys below it."""

RENAMES = {
    "checkpointing.save_consolidated": "checkpointing.save_hf",
    "checkpointing.ft_keep_latest_k": "checkpointing.keep_latest_k",
    "policy.dtensor_cfg.env_vars": "cluster.env_vars",
    "policy.megatron_cfg.tensor_model_parallel_size": "policy.dtensor_cfg.tensor_parallel_size",
    "policy.megatron_cfg.pipeline_model_parallel_size": "policy.dtensor_cfg.pipeline_parallel_size",
    "policy.megatron_cfg.context_parallel_size": "policy.dtensor_cfg.context_parallel_size",
    "policy.megatron_cfg.sequence_parallel": "policy.dtensor_cfg.sequence_parallel",
    "policy.megatron_cfg.activation_checkpointing": "policy.dtensor_cfg.activation_checkpointing",
    "policy.megatron_cfg.env_vars": "cluster.env_vars",
    # Names of 2025.
    "sft.num_steps": "sft.max_num_steps",
    "policy.learning_rate": "policy.optimizer.kwargs.lr",
    "policy.activation_checkpointing_enabled": "policy.dtensor_cfg.activation_checkpointing",
    "policy.fsdp_offload_enabled": "policy.dtensor_cfg.cpu_offload",
}
"""NeMo-RL key -> raylane key with the same values."""

OTHERWISE = {
    "policy.sequence_packing.train_mb_tokens": "a micro-batch has policy.max_total_sequence_length x "
    "policy.train_micro_batch_size tokens; set those, and remove it",
    "policy.sequence_packing.sequence_length_round": "rows have policy.max_total_sequence_length tokens, which must be "
    "a multiple of it",
    "data.max_input_seq_length": "use policy.max_total_sequence_length",
    "policy.ray_compiled_graph": "use policy.compiled_graph",
    "policy.megatron_cfg.optimizer": "use policy.optimizer and policy.max_grad_norm",
    "policy.megatron_cfg.scheduler": "use policy.scheduler",
    "policy.dtensor_cfg.defer_fsdp_grad_sync": "use policy.dtensor_cfg.reduce_every_micro_batch",
    "data.default": "set the keys in data itself",
    "data.dataset_name": "set data.train to the path of a JSONL file",
    "data.train_data_path": "use data.train",
    "data.val_data_path": "use data.validation",
    "data.chat_key": "use data.messages_key",
    "data.prompt_file": "put the prompt into the data",
    "data.system_prompt_file": "put the system prompt into the data, as a message with role system",
    "data.system_prompt": "put the system prompt into the data, as a message with role system",
    "data.system_key": "put the system prompt into the data, as a message with role system",
    "data.tool_key": "the tools of a conversation must be under the key tools",
    "data.use_preserving_dataset": "every line keeps its own keys; remove it",
    "data.split": "a file is read as a whole; remove it",
}
"""Keys that `translate` reads together with other keys -> reason for refusing what it could not translate."""

_SECTIONS = ("data.train.", "data.validation.", "policy.megatron_cfg.")
"""Beginnings of keys in sections that NeMo-RL has, and raylane has as single values or with other keys."""


_WORDS: dict[Callable[[Any], bool], str] = {
    _off: "off or empty",
    _on: "`true`",
    _one: "`1`",
    _anything: "any",
    _float32: "empty or float32",
    _disabled: "empty or `enabled: false`",
    _force_hf_only: "empty or only `force_hf`",
}


def rules_markdown() -> str:
    """Return the table of rules and renamed keys for the documentation."""
    lines = ["| key of NeMo-RL | value | treatment |", "|---|---|---|"]
    lines += [f"| `{old}` | any | the same as `{new}` |" for old, new in RENAMES.items()]
    for rule in RULES:
        lines.append(f"| `{rule.key}` | {_WORDS[rule.harmless]} | left out: {rule.why_left_out} |")
        if rule.why_refused:
            lines.append(f"| | other | refused: {rule.why_refused} |")
    return "\n".join(lines)


def is_nemo_key(path: str) -> bool:
    """Return True if NeMo-RL has this dotted key and raylane may have it under another name or not at all."""
    known = (*(rule.key for rule in RULES), *RENAMES, *OTHERWISE)
    return path.startswith(_SECTIONS) or any(path == key or path.startswith(f"{key}.") for key in known)


def refusal(path: str) -> str | None:
    """Return the reason why raylane's schema has no key `path`, None if NeMo-RL has no such key either."""
    # A rule that never refuses still needs words: `build_config` takes only raylane's own keys.
    reasons = {rule.key: rule.why_refused or f"{rule.why_left_out}; remove it" for rule in RULES}
    reasons |= OTHERWISE | {old: f"use {new}" for old, new in RENAMES.items()}
    while path:  # a key below a section has the section's reason
        if path in reasons:
            return reasons[path]
        path = path.rpartition(".")[0]
    return None

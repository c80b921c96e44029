"""Limits of the Megatron-core backend (`policy.megatron_cfg`), checked before any process starts.

No torch and no Megatron is imported here. Called by `layout` and `policy`, and again in each worker by `build`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from raylane.errors import ConfigError
from raylane.training.config.policy import PolicyConfig

MEGATRON_MODELS = ("llama", "qwen2", "qwen3")
"""Model types whose weights the backend converts."""

_OTHERWISE = "set policy.megatron_cfg.enabled=false: raylane's own layers (policy.dtensor_cfg) can do it"


def check_installed(policy: PolicyConfig) -> None:
    """Raise ConfigError if the configuration asks for Megatron-core and the package is not installed."""
    if policy.megatron_cfg.enabled and not _is_installed():
        raise ConfigError(
            "policy.megatron_cfg.enabled=true needs the package megatron-core, which is not installed; run pip install "
            "'raylane[megatron]', or set enabled to false",
            key="policy.megatron_cfg.enabled",
        )


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:  # not even the package around it
        return False


def megatron_problems(policy: PolicyConfig) -> Iterator[str]:
    """Yield the settings that Megatron-core does not take, or that were never run with it."""
    if not policy.megatron_cfg.enabled:
        return
    settings = policy.dtensor_cfg
    # Facts about megatron-core 0.16.1 without Transformer Engine.
    reasons = {
        f"pipeline_parallel_size={settings.pipeline_parallel_size}": (
            settings.pipeline_parallel_size > 1,
            "megatron.core.pipeline_parallel.schedules allocates on CUDA devices only",
        ),
        f"context_parallel_size={settings.context_parallel_size}": (
            settings.context_parallel_size > 1,
            "Megatron-core needs the attention of Transformer Engine for it, which runs on CUDA devices only",
        ),
        "sequence_parallel=true": (
            settings.sequence_parallel,
            "the norms of Megatron-core need Transformer Engine or Apex for it, which run on CUDA devices only",
        ),
        f"activation_checkpointing={settings.activation_checkpointing}": (
            bool(settings.activation_checkpointing),
            "megatron.core.tensor_parallel.checkpoint needs the random state of a CUDA device",
        ),
        f"dp_replicate_size={settings.dp_replicate_size}": (
            settings.dp_replicate_size > 1,
            "every data-parallel worker holds all weights of its tensor-parallel part",
        ),
        "lora_cfg.enabled=true": (settings.lora_cfg.enabled, "adapters are added to raylane's own layers"),
        "shard_parameters=always": (settings.shard_parameters == "always", "FSDP2 does not know its layers"),
        "cpu_offload=true": (settings.cpu_offload, "FSDP2 does the offloading"),
        "compile_layers=true": (settings.compile_layers, "only raylane's own layers are compiled"),
        "reduce_every_micro_batch=true": (settings.reduce_every_micro_batch, "gradients are summed once per step"),
    }
    for setting, (is_asked, reason) in reasons.items():
        # A value that the backend would ignore is refused as well: the run would not be what was asked for.
        if is_asked:
            yield f"policy.dtensor_cfg.{setting} does not work with policy.megatron_cfg.enabled=true: {reason}; " + (
                f"change it, or {_OTHERWISE}"
            )
    yield from check_shape(policy.hf_config_overrides)


def check_shape(shape: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the backend cannot convert of a model; `shape` has keys of a Hugging Face configuration, or some."""
    model_type = shape.get("model_type")
    if model_type not in (None, *MEGATRON_MODELS):
        yield (
            f"a model of type {model_type!r} cannot be converted for policy.megatron_cfg.enabled=true; use one of "
            f"{', '.join(MEGATRON_MODELS)}, or {_OTHERWISE}"
        )
    expected: dict[str, tuple[Any, ...]] = {
        "hidden_act": (None, "silu"),
        "mlp_bias": (None, False),
        "attention_bias": (None, False),
        "attention_dropout": (None, 0, 0.0),
        "use_sliding_window": (None, False),
        "attn_implementation": (None, "raylane"),
    }
    for key, values in expected.items():
        if shape.get(key) not in values:
            yield (
                f"the model's {key}={shape.get(key)!r} does not work with policy.megatron_cfg.enabled=true, which "
                f"needs {values[-1]!r}; change it, or {_OTHERWISE}"
            )
    rope = shape.get("rope_parameters") or shape.get("rope_scaling") or {}
    kind = rope.get("rope_type", "default") if isinstance(rope, Mapping) else "default"
    if kind not in ("default", "linear", "llama3"):
        yield (
            f"the model's rope_type={kind!r} does not work with policy.megatron_cfg.enabled=true, which needs "
            f"default, linear or llama3; {_OTHERWISE}"
        )

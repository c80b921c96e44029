"""Hugging Face configuration of the model of a run, and its size, without creating weights.

Called by `planning` (memory estimates) and by the code that builds a model. Imports transformers when first needed.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raylane.errors import ConfigError
from raylane.training.config.keys import suggest
from raylane.training.config.policy import LoraConfig, PolicyConfig

# Keys that are not attributes of a configuration object. transformers 5 keeps rope_theta in rope_parameters, and
# ignores the keyword if config.json has rope_parameters.
NOT_ATTRIBUTES = ("model_type", "rope_theta")

# raylane's own attention (`attention`), and those of transformers 5 for which it derives masks from restarting
# positions, which separate packed documents.
ATTENTION = ("raylane", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model that planning needs, in elements; `num_parameters` counts tied weights once."""

    model_type: str
    num_parameters: int
    num_root: int  # parameters outside the layers: embedding, last norm and head
    num_layer: int  # parameters of the largest layer
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int | None
    num_trained: int | None = None  # parameters that are trained; None for all of them
    has_head_norms: bool = False  # queries and keys are normalised (qwen3, gemma3)


def model_config(policy: PolicyConfig, vocab_size: int, pad_id: int | None = None, end_id: int | None = None) -> Any:
    """Return a new transformers configuration of `policy`, with its overrides applied.

    `vocab_size`, `pad_id` and `end_id` (of the tokenizer) shape a model with random weights; a model folder keeps its
    own values, but must have room for every token. Raises ConfigError: folder or model type missing, an override
    unknown to this model, or a vocabulary too small for the tokenizer.
    """
    attention_implementation(policy)
    overrides = copy.deepcopy(policy.hf_config_overrides)
    overrides.pop("attn_implementation", None)
    # transformers would accept these, but they would change nothing.
    for key in ("dtype", "torch_dtype"):
        if key in overrides:
            raise ConfigError(
                f"policy.hf_config_overrides.{key} has no effect here; set policy.precision instead", key=key
            )
    if policy.model_name is None:
        config = _from_scratch(overrides, vocab_size, pad_id, end_id)
    else:
        config = _from_folder(policy.model_name, overrides)
    if config.vocab_size < vocab_size:
        raise ConfigError(
            f"the model has vocab_size={config.vocab_size}, but the tokenizer has {vocab_size} tokens; use the model's "
            "own tokenizer, or remove vocab_size from policy.hf_config_overrides"
        )
    dropout, size = getattr(config, "attention_dropout", None), policy.dtensor_cfg.tensor_parallel_size
    if dropout and size > 1:
        # These workers have one random state, and each draws a mask for its own heads: the masks would be equal.
        raise ConfigError(
            f"the model has attention_dropout={dropout}, whose masks would repeat on the workers of policy.dtensor_cfg."
            f"tensor_parallel_size={size}. Set policy.hf_config_overrides.attention_dropout=0, or "
            "tensor_parallel_size=1",
            key="attention_dropout",
        )
    _check_rope(policy, config)
    _check_router_loss(policy, config)
    return config


def _check_router_loss(policy: PolicyConfig, config: Any) -> None:
    """Raise ConfigError if the loss of routers is asked for, and no worker has all layers and whole rows."""
    settings = policy.dtensor_cfg
    sizes = {key: getattr(settings, key) for key in ("context_parallel_size", "pipeline_parallel_size")}
    divided = [f"policy.dtensor_cfg.{key}={size}" for key, size in sizes.items() if size > 1]
    if divided and getattr(config, "output_router_logits", False):
        raise ConfigError(
            f"the model has output_router_logits=true, and the loss of its routers needs all layers and whole rows in "
            f"each worker, but {divided[0]}. Set policy.hf_config_overrides.output_router_logits=false, or the size to "
            "1",
            key="output_router_logits",
        )


def _check_rope(policy: PolicyConfig, config: Any) -> None:
    """Raise ConfigError if rotary frequencies depend on what else is in a micro-batch, or was in earlier ones.

    transformers (5.23, modeling_rope_utils.dynamic_rope_update) chooses the frequencies of a whole micro-batch by its
    largest position: `longrope` (Phi-3) takes others beyond the length of pre-training, `dynamic` keeps those of the
    longest row so far.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    # One entry for all layers, or one for each type of layer (Gemma 3).
    entries = [entry for entry in (parameters, *parameters.values()) if isinstance(entry, dict)]
    rows = policy.max_total_sequence_length
    for entry in entries:
        kind = entry.get("rope_type")
        if kind not in ("longrope", "dynamic"):
            continue
        limit = entry.get("original_max_position_embeddings") or config.max_position_embeddings
        if rows <= limit:
            continue
        alone = (
            policy.train_micro_batch_size == 1
            and not policy.sequence_packing.enabled
            and not policy.dynamic_batching.enabled
            and policy.dtensor_cfg.context_parallel_size == policy.dtensor_cfg.pipeline_parallel_size == 1
        )
        if kind == "longrope" and alone:
            continue
        instead = (
            ", or policy.sequence_packing.enabled=false with policy.train_micro_batch_size=1, without context "
            "or pipeline parallelism"
        )
        raise ConfigError(
            f"the model's rope_type={kind} uses other frequencies for rows of more than {limit} tokens, and documents "
            f"in the same micro-batch would change each other: policy.max_total_sequence_length={rows}. Set it to at "
            f"most {limit}{instead if kind == 'longrope' else ''}",
            key="policy.max_total_sequence_length",
        )


def attention_implementation(policy: PolicyConfig) -> str:
    """Return `policy.hf_config_overrides.attn_implementation`, default raylane; ConfigError if it is unknown."""
    chosen = policy.hf_config_overrides.get("attn_implementation") or "raylane"
    if chosen not in ATTENTION:
        raise ConfigError(
            f"policy.hf_config_overrides.attn_implementation must be one of {', '.join(ATTENTION)}, got {chosen!r}",
            key="attn_implementation",
        )
    return str(chosen)


def _from_scratch(overrides: dict[str, Any], vocab_size: int, pad_id: int | None, end_id: int | None) -> Any:
    """Return the configuration of a model with random weights."""
    from transformers import AutoConfig

    model_type = overrides.pop("model_type")
    try:
        default = AutoConfig.for_model(model_type)
    except ValueError as error:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        hint = suggest(str(model_type), CONFIG_MAPPING_NAMES)
        raise ConfigError(f"policy.hf_config_overrides.model_type={model_type!r} is unknown; {hint}") from error
    overrides = _checked(overrides, default)
    tokens = {"vocab_size": vocab_size, "pad_token_id": pad_id, "eos_token_id": end_id, "bos_token_id": None}
    try:
        config = AutoConfig.for_model(model_type, **{**tokens, **overrides})
    except Exception as error:  # transformers and huggingface_hub raise several classes of their own
        raise ConfigError(f"policy.hf_config_overrides cannot be used for a {model_type} model: {error}") from error
    return _applied(config, overrides)


def _from_folder(folder: str, overrides: dict[str, Any]) -> Any:
    """Return the configuration of a model folder with overrides applied."""
    if not Path(folder).is_dir():
        raise ConfigError(
            f"policy.model_name={folder!r} is no folder; set it to a local Hugging Face folder (config.json, "
            "safetensors), or to null to start from random weights"
        )
    try:
        overrides = _checked(overrides, _read_config(folder, {}))
        return _applied(_read_config(folder, overrides), overrides)
    except ConfigError:
        raise
    except Exception as error:  # damaged files make transformers raise almost any exception
        raise ConfigError(
            f"transformers cannot read the model configuration in {folder}: {error}. Copy or download the folder again"
        ) from error


def _read_config(folder: str, overrides: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **overrides)


def _checked(overrides: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return the overrides in the form that `config` accepts; ConfigError for a key that it does not have.

    transformers silently keeps any keyword, so a misspelt key would change nothing.
    """
    known = {*config.to_dict(), *getattr(config, "attribute_map", {}), *NOT_ATTRIBUTES}
    for key in overrides:
        if key not in known:
            hint = suggest(key, [name for name in known if not name.startswith("_")])
            raise ConfigError(
                f"policy.hf_config_overrides.{key}: {type(config).__name__} has no such key; {hint}", key=key
            )
    taken = {key: value for key, value in overrides.items() if key != "model_type"}
    if overrides.get("model_type", config.model_type) != config.model_type:
        raise ConfigError(
            f"policy.hf_config_overrides.model_type={overrides['model_type']!r}, but the model in policy.model_name is "
            f"{config.model_type!r}; remove the override"
        )
    if "rope_theta" in taken:
        rope = {"rope_type": "default", **(config.rope_parameters or {}), **taken.get("rope_parameters", {})}
        taken["rope_parameters"] = {**rope, "rope_theta": float(taken.pop("rope_theta"))}
    return taken


def _applied(config: Any, overrides: dict[str, Any]) -> Any:
    """Return `config` after checking that every override took effect."""
    for key, value in overrides.items():
        if value is None:  # null means the default of the model
            continue
        actual = getattr(config, key, None)
        same = value in (actual, str(actual).removeprefix("torch.")) or (
            isinstance(value, dict) and {**(actual or {}), **value} == actual
        )
        if key not in NOT_ATTRIBUTES and not same:
            raise ConfigError(
                f"policy.hf_config_overrides.{key}={value!r} has no effect: {type(config).__name__} sets {actual!r}. "
                "Remove it"
            )
    return config


def model_shape(config: Any, lora: LoraConfig | None = None) -> ModelShape:
    """Return the sizes of the model of a transformers configuration, counted on the meta device without memory.

    `lora` adds adapters to it, which are then the only parameters that are trained.

    ConfigError if transformers cannot build a causal language model from it, or if the architecture cannot be trained
    with raylane.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM

        from raylane.training.model.lora import adapt  # imports torch, as this function does

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        if lora is not None:
            adapt(model, lora)
        layers = [sum(p.numel() for p in layer.parameters()) for layer in model.get_decoder().layers]
        heads = config.num_attention_heads
        num_parameters = sum(p.numel() for p in model.parameters())
        return ModelShape(
            model_type=config.model_type,
            num_parameters=num_parameters,
            num_root=num_parameters - sum(layers),
            num_layer=max(layers),
            num_layers=len(layers),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocab_size=config.vocab_size,
            max_positions=getattr(config, "max_position_embeddings", None),
            num_trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
            has_head_norms=any(name.endswith("q_norm.weight") for name, _ in model.named_parameters()),
        )
    except ConfigError:  # of the adapters
        raise
    except Exception as error:  # impossible sizes, or attributes that other architectures do not have
        raise ConfigError(
            f"a {config.model_type} model of this configuration cannot be trained: {type(error).__name__}: {error}. "
            "Use llama, qwen2 or qwen3, and check the sizes in policy.hf_config_overrides"
        ) from error

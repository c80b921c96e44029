"""The Hugging Face configuration of the model of a run, and its size, without making any weights.

Called by `planning` (memory estimates), and wherever a model is built. Imports transformers when first needed.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raylane.errors import ConfigError
from raylane.sft.overrides import suggest

if TYPE_CHECKING:
    from raylane.sft.config import PolicyConfig

__all__ = ["ModelShape", "attention_implementation", "model_config", "model_shape"]

# Not attributes of a configuration object: how attention is computed, and the base of the rotary positions, which
# transformers 5 keeps in rope_parameters (and overlooks as a keyword where config.json has rope_parameters).
BESIDES = ("model_type", "rope_theta")

# Kernels whose masks transformers 5 makes from restarting positions, which is how packed documents are kept apart.
ATTENTION = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")

# Keys that a run decides elsewhere: an override of them would be accepted by transformers and change nothing.
_DECIDED_ELSEWHERE = {"dtype": "policy.precision", "torch_dtype": "policy.precision"}


@dataclass(frozen=True)
class ModelShape:
    """What planning needs to know of a model. Sizes are in elements; `num_parameters` counts tied ones once."""

    model_type: str
    num_parameters: int
    largest_unit: int  # parameters of the largest part that is gathered at once: a layer, or the embedding and head
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int | None


def model_config(policy: PolicyConfig, vocab_size: int, pad_id: int | None = None, end_id: int | None = None) -> Any:
    """The transformers configuration object of `policy`, overrides applied; a new one on every call.

    `vocab_size`, `pad_id` and `end_id` (of the tokenizer) shape a model from random weights; a model folder keeps its
    own, but must have room for every token. Raises ConfigError: no such folder or model type, an override that this
    model does not know, or a vocabulary too small for the tokenizer.
    """
    attention_implementation(policy)
    overrides = copy.deepcopy(policy.hf_config_overrides)
    overrides.pop("attn_implementation", None)
    for key in overrides:
        if key in _DECIDED_ELSEWHERE:
            raise ConfigError(
                f"policy.hf_config_overrides.{key} has no effect here; set {_DECIDED_ELSEWHERE[key]} instead", key=key
            )
    if policy.model_name is None:
        config = _from_scratch(overrides, vocab_size, pad_id, end_id)
    else:
        config = _from_folder(policy.model_name, overrides)
    if config.vocab_size < vocab_size:
        raise ConfigError(
            f"the model has vocab_size={config.vocab_size}, but the tokenizer has {vocab_size} tokens; use the model's "
            "own tokenizer, or leave vocab_size out of policy.hf_config_overrides"
        )
    return config


def attention_implementation(policy: PolicyConfig) -> str:
    """Return `policy.hf_config_overrides.attn_implementation`, sdpa if it is not set; ConfigError if it is unknown."""
    chosen = policy.hf_config_overrides.get("attn_implementation") or "sdpa"
    if chosen not in ATTENTION:
        raise ConfigError(
            f"policy.hf_config_overrides.attn_implementation must be one of {', '.join(ATTENTION)}, got {chosen!r}",
            key="attn_implementation",
        )
    return str(chosen)


def _from_scratch(overrides: dict[str, Any], vocab_size: int, pad_id: int | None, end_id: int | None) -> Any:
    from transformers import AutoConfig

    model_type = overrides.pop("model_type")
    known = AutoConfig.for_model  # raises ValueError with every model type there is
    try:
        default = known(model_type)
    except ValueError as error:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        hint = suggest(str(model_type), CONFIG_MAPPING_NAMES)
        raise ConfigError(f"policy.hf_config_overrides.model_type={model_type!r} is unknown; {hint}") from error
    overrides = _checked(overrides, default)
    given = {"vocab_size": vocab_size, "pad_token_id": pad_id, "eos_token_id": end_id, "bos_token_id": None}
    try:
        made = known(model_type, **{**given, **overrides})
    except Exception as error:  # transformers and huggingface_hub have classes of their own for this
        raise ConfigError(f"policy.hf_config_overrides cannot be used for a {model_type} model: {error}") from error
    return _applied(made, overrides)


def _from_folder(folder: str, overrides: dict[str, Any]) -> Any:
    if not Path(folder).is_dir():
        raise ConfigError(
            f"policy.model_name={folder!r} is no folder; give a local Hugging Face folder (config.json, safetensors), "
            "or null to start from random weights"
        )
    try:
        config = _read_config(folder, {})
        overrides = _checked(overrides, config)
        if not overrides:
            return config
        return _applied(_read_config(folder, overrides), overrides)
    except ConfigError:
        raise
    except Exception as error:  # damaged files make transformers raise nearly anything
        raise ConfigError(f"transformers cannot read the model configuration in {folder}: {error}") from error


def _read_config(folder: str, overrides: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **overrides)


def _checked(overrides: dict[str, Any], config: Any) -> dict[str, Any]:
    """The overrides as `config` will take them; transformers keeps any keyword without a word, so a typing error would
    silently change nothing."""
    known = {*config.to_dict(), *getattr(config, "attribute_map", {}), *BESIDES}
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
    """`config`, once it is certain that every override took effect."""
    for key, value in overrides.items():
        if value is None:  # null leaves the choice to the model
            continue
        actual = getattr(config, key, None)
        same = value in (actual, str(actual).removeprefix("torch.")) or (
            isinstance(value, dict) and {**(actual or {}), **value} == actual
        )
        if key not in BESIDES and not same:
            raise ConfigError(
                f"policy.hf_config_overrides.{key}={value!r} has no effect: {type(config).__name__} makes it {actual!r}"
            )
    return config


def model_shape(config: Any) -> ModelShape:
    """Sizes of the model that a transformers configuration describes, counted on the meta device: no memory is used.

    ConfigError when transformers cannot build a causal language model from it, or it is built otherwise than those
    that can be trained here.
    """
    try:
        return _measured(config)
    except Exception as error:  # from sizes that make no model, or from attributes that other architectures lack
        raise ConfigError(
            f"a {config.model_type} model of this configuration cannot be trained here: {type(error).__name__}: "
            f"{error}. llama, qwen2 and qwen3 can be; check the sizes in policy.hf_config_overrides"
        ) from error


def _measured(config: Any) -> ModelShape:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    embedding = {
        id(p): p.numel()
        for m in (model.get_input_embeddings(), model.get_output_embeddings())
        if m is not None
        for p in m.parameters()
    }
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.get_decoder().layers]
    heads = config.num_attention_heads
    return ModelShape(
        model_type=config.model_type,
        num_parameters=sum(p.numel() for p in model.parameters()),
        largest_unit=max(sum(embedding.values()), *layers),
        num_layers=len(layers),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        max_positions=getattr(config, "max_position_embeddings", None),
    )

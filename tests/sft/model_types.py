"""Small configurations of transformers' model types, which tests build, save, load, divide and compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sft import tiny_run

SIZES = tiny_run.SIZES
WINDOW = {"sliding_window": 8}
LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": tiny_run.ROW_TOKENS,
    },
    "original_max_position_embeddings": tiny_run.ROW_TOKENS,
}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}

EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "logits_scaling": 4.0,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.25,
    },
    "gpt_oss": {**WINDOW, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **_ROUTED,
        "num_key_value_heads": 4,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "glm4_moe": {**_ROUTED, "n_group": 1, "topk_group": 1, "use_qk_norm": True},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "num_dense_layers": 1,
    },
}
"""Types with experts, and the keys beside `SIZES` of a small model."""

SPECIAL: dict[str, dict[str, Any]] = {
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {**WINDOW, "logit_scale": 0.25, "layer_types": ["sliding_attention", "full_attention"]},
    "stablelm": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "nemotron": {"head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
}
"""Types whose logits are scaled after the head, or whose layers do not keep packed documents apart by themselves."""

TYPES: dict[str, dict[str, Any]] = {
    **EXPERTS,
    **SPECIAL,
    "granite_swa": {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": LONGROPE,
    "gemma": {"head_dim": 8},
    "gemma2": {**WINDOW, "head_dim": 8, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 1},
    "gemma3_text": {**WINDOW, "head_dim": 8},
    "mistral": WINDOW,
    "qwen2": {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {**WINDOW, "use_sliding_window": True, "max_window_layers": 1, "head_dim": 8},
    "llama": {},
}
"""All types of raylane's table."""


def new_folder(folder: Path, model_type: str, sizes: dict[str, Any], seed: int = 0) -> Any:
    """Write a folder as transformers writes it, with random weights; return the model, float32."""
    tokens = {"vocab_size": 320, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    config = AutoConfig.for_model(model_type, **{**SIZES, **tokens, **sizes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            # Zero in a new model, as if it was not read.
            buffer.copy_(torch.linspace(-0.02, 0.02, buffer.numel()))
    model.save_pretrained(folder)
    return model


def folder_changes(folder: Path, model_folder: Path) -> dict[str, Any]:
    """Return the changes of `tiny_run.config_of` for a run that starts from a model folder."""
    tokenizer = {"name": str(tiny_run.prepared_in(folder).tokenizer_dir), "chat_template": "chatml"}
    return {"policy.model_name": str(model_folder), "policy.hf_config_overrides": {}, "policy.tokenizer": tokenizer}

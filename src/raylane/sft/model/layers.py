"""Decoder layers: choice of the activations kept for the backward pass, and compilation. Called by `build`."""

from __future__ import annotations

import importlib.util
import os
import shutil
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from raylane.errors import ConfigError
from raylane.sft.config.policy import Checkpointing
from raylane.sft.model import attention

# Results that "selective" keeps: they cost the most to compute again, and memory proportional to the row length only.
# Batched products (bmm) are not kept, because eager attention makes its T x T scores with them.
_KEPT = (
    "mm",
    "addmm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


def decoder_layers(causal_lm: Any) -> Any:
    """Return the decoder layers of a model; ConfigError for a class that has them elsewhere (Llama 4, GPT-2)."""
    layers = getattr(causal_lm.get_decoder(), "layers", None)
    if layers is None:
        raise ConfigError(
            f"{type(causal_lm).__name__} keeps its decoder layers where raylane does not look, so they can be "
            "neither sharded nor compiled. Use an architecture that can be trained: llama, qwen2, qwen3, gemma, mistral"
        )
    return layers


def apply_checkpointing(causal_lm: Any, choice: Checkpointing | Literal[False]) -> None:
    """Make the layers compute activations again in the backward pass, as `choice` says; False keeps all of them."""
    if choice is False:
        return
    kwargs: dict[str, Any] = {"use_reentrant": False}
    if choice == "selective":
        operations = [getattr(torch.ops.aten, name).default for name in _KEPT]
        if importlib.util.find_spec("torch.nn.attention.varlen") is not None:  # raylane's attention on GPUs
            importlib.import_module("torch.nn.attention.varlen")
            operations.append(torch.ops.torch_attn._varlen_attn.default)
        kwargs["context_fn"] = partial(create_selective_checkpoint_contexts, operations)
    # transformers 5.x renamed the method, and the old name warns if both exist.
    enable = getattr(causal_lm, "activation_checkpointing_enable", None) or causal_lm.gradient_checkpointing_enable
    enable(kwargs)
    if choice == "every_other_layer":
        for number, layer in enumerate(decoder_layers(causal_lm)):
            layer.gradient_checkpointing = number % 2 == 0


def compile_layers(causal_lm: Any, device: torch.device) -> None:
    """Compile the forward pass of each decoder layer with torch's inductor. Call it after sharding.

    Compilation itself happens in the first passes. ConfigError if no compiler is installed.
    """
    from transformers import AttentionInterface

    missing = None
    compilers = [name for name in (os.environ.get("CXX"), "g++", "clang++") if name]
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        missing = "the package triton"
    elif not any(shutil.which(name) for name in compilers):
        missing = f"a C++ compiler ({' or '.join(compilers)})"
    if missing is not None:
        raise ConfigError(
            f"policy.dtensor_cfg.compile_layers=true needs {missing} on every worker. Install it, or set "
            "compile_layers to false",
            key="policy.dtensor_cfg.compile_layers",
        )
    # The plan of a micro-batch consists of numbers, for each of which the compiler would make new code.
    AttentionInterface.register(attention.NAME, torch.compiler.disable(attention.attend))  # type: ignore[no-untyped-call]
    for layer in decoder_layers(causal_lm):
        # The bound method alone: FSDP2's hooks, which run around it, cannot be compiled, and names stay the same.
        layer.forward = torch.compile(layer.forward)

"""Weights of a Megatron-core model beside those of the Hugging Face model: where each one goes, and its gradient back.

Pure functions of tensors, without Megatron. Every tensor here is the part of one tensor-parallel worker: Megatron-core
and `tensor_parallel` divide the same dimensions of the same matrices, so nothing is sent to convert them.

    linear_qkv     one group after the other: its query heads, its key head, its value head
    linear_fc1     gate_proj above up_proj
    embedding      rows of the vocabulary, filled up with zeros so that all workers have as many

Called by `megatron`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

How = Literal["whole", "filled", "stacked", "grouped"]


@dataclass(frozen=True)
class Weight:
    """One parameter of Megatron's model and the parameters of the Hugging Face model that it is made of."""

    target: nn.Parameter
    sources: tuple[nn.Parameter, ...]
    how: How
    head_dim: int
    is_partial: bool = False
    """True if each tensor-parallel worker has the gradient of its own heads only, and the sum is the gradient."""


def pairs(target: Mapping[str, nn.Parameter], source: Mapping[str, nn.Parameter], head_dim: int) -> Iterator[Weight]:
    """Yield all weights; `target` and `source` are the named parameters of the two models."""
    layers = sorted({int(name.split(".")[2]) for name in source if name.startswith("model.layers.")})
    whole = {"decoder.final_layernorm.weight": "model.norm.weight"}
    filled = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "lm_head.weight",
    }
    joined: dict[str, tuple[How, list[str]]] = {}
    for i in layers:
        mine, theirs = f"decoder.layers.{i}.", f"model.layers.{i}."
        whole |= {
            f"{mine}input_layernorm.weight": f"{theirs}input_layernorm.weight",
            f"{mine}pre_mlp_layernorm.weight": f"{theirs}post_attention_layernorm.weight",
            f"{mine}self_attention.linear_proj.weight": f"{theirs}self_attn.o_proj.weight",
            f"{mine}self_attention.q_layernorm.weight": f"{theirs}self_attn.q_norm.weight",
            f"{mine}self_attention.k_layernorm.weight": f"{theirs}self_attn.k_norm.weight",
            f"{mine}mlp.linear_fc2.weight": f"{theirs}mlp.down_proj.weight",
        }
        for kind in ("weight", "bias"):
            names = [f"{theirs}self_attn.{letter}_proj.{kind}" for letter in "qkv"]
            joined[f"{mine}self_attention.linear_qkv.{kind}"] = ("grouped", names)
        joined[f"{mine}mlp.linear_fc1.weight"] = (
            "stacked",
            [f"{theirs}mlp.{half}_proj.weight" for half in ("gate", "up")],
        )
    joined |= {name: ("whole", [other]) for name, other in whole.items()}
    joined |= {name: ("filled", [other]) for name, other in filled.items()}
    # Absent names (biases, norms of heads, a tied head) are names that Megatron's model does not have either.
    used = set()
    for name, parameter in target.items():
        how, names = joined[name]
        used |= set(names)
        is_partial = name.endswith(("q_layernorm.weight", "k_layernorm.weight"))
        yield Weight(parameter, tuple(source[source_name] for source_name in names), how, head_dim, is_partial)
    # A weight without a place would silently keep its first value.
    assert used == set(source), f"no place in Megatron's model for {sorted(set(source) - used)}"


def pack(how: How, parts: list[Tensor], head_dim: int, target: Tensor) -> None:
    """Copy parts of Hugging Face weights into the weight of Megatron's model that they form."""
    if how == "whole":
        target.copy_(parts[0])
    elif how == "filled":
        target[: len(parts[0])].copy_(parts[0])
        target[len(parts[0]) :].zero_()
    elif how == "stacked":
        target.view(2, -1, *target.shape[1:]).copy_(torch.stack(parts))
    else:
        for into, part in zip(_groups(target, parts, head_dim), parts, strict=True):
            into.copy_(part.view_as(into))


def unpack(how: How, gradient: Tensor, shapes: list[torch.Size], head_dim: int) -> list[Tensor]:
    """Return the parts of a gradient of Megatron's model that belong to the Hugging Face weights; the inverse."""
    if how == "whole":
        return [gradient]
    if how == "filled":
        return [gradient[: shapes[0][0]]]
    if how == "stacked":
        return list(gradient.chunk(2))
    # Only the numbers of rows are needed.
    empty = [gradient.new_empty(shape, device="meta") for shape in shapes]
    return [part.reshape(shape) for part, shape in zip(_groups(gradient, empty, head_dim), shapes, strict=True)]


def _groups(joined: Tensor, parts: list[Any], head_dim: int) -> list[Tensor]:
    """Return views [groups, rows, ...] of the query, key and value rows of a joined weight or bias."""
    # The keys have one head in each group.
    groups = len(parts[1]) // head_dim
    by_group = joined.view(groups, -1, *joined.shape[1:])
    return list(torch.split(by_group, [len(part) // groups for part in parts], dim=1))

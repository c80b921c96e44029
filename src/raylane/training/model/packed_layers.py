"""Completion of transformers' layers that would otherwise not keep packed documents apart.

    nemotron, stablelm    the layer gets the plan of the micro-batch, and does not pass it on to its attention
    lfm2, lfm2_moe        short convolutions see the tokens before, of whichever document: computed document by document

Called by `build`, before layers are divided. B = rows, T = tokens in a row, H = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from raylane.training.model.attention import PackedRows

_DROPPING = ("nemotron", "stablelm")
_CONVOLUTIONS = ("lfm2", "lfm2_moe")


def complete_layers(model_type: str, layers: Callable[[], Iterable[Any]]) -> None:
    """Change the decoder layers of a model of this type in place; most types need nothing, nor have such layers."""
    for layer in layers() if model_type in (*_DROPPING, *_CONVOLUTIONS) else ():
        if model_type in _DROPPING:
            _pass_plan_on(layer)
        if model_type in _CONVOLUTIONS and hasattr(layer, "conv"):
            layer.conv.forward = partial(_by_document, layer.conv.forward)


def _pass_plan_on(layer: Any) -> None:
    """Make a layer give the plan of each micro-batch to its attention."""
    plan: dict[str, PackedRows] = {}

    def take(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Keep the plan that the layer gets, also when it computes its activations again."""
        plan.clear()
        if "packed_rows" in kwargs:
            plan["packed_rows"] = kwargs["packed_rows"]

    def give(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, **plan}

    layer.register_forward_pre_hook(take, with_kwargs=True)
    layer.self_attn.register_forward_pre_hook(give, with_kwargs=True)


def _by_document(
    forward: Callable[..., Tensor], hidden_states: Tensor, packed_rows: PackedRows | None = None, **others: Any
) -> Tensor:
    """Return the output [B, T, H] of a convolution over hidden states [B, T, H], for each document by itself."""
    if packed_rows is None:
        return forward(hidden_states=hidden_states, **others)
    if packed_rows.alike:
        rows = [(hidden_states, packed_rows.lengths[0])]
    else:
        rows = list(zip(torch.split(hidden_states, 1), packed_rows.lengths, strict=True))
    return torch.cat(
        [
            torch.cat(
                [forward(hidden_states=document, **others) for document in torch.split(row, lengths, dim=1)], dim=1
            )
            for row, lengths in rows
        ]
    )

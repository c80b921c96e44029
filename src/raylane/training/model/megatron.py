"""A model that computes with the layers of Megatron-core (`policy.megatron_cfg`), on weights as in Hugging Face files.

The parameters that are trained, saved and exported are those of the Hugging Face model, in float32 and divided by
`tensor_parallel`. Megatron's GPTModel has a copy of them in the computing precision, which is filled before each
forward pass; each gradient goes back to the parameter that it belongs to:

    Hugging Face parameters (float32)   -> copies in Megatron's order (float32 or bfloat16)   -> loss
    gradients (float32)                 <- gradients                                          <- backward

So optimizer, checkpoints, exports and clipping are those of every other layout, and checkpoints load with or without
Megatron. Attention is `attention.attend`, because Megatron-core's own separates packed documents only with Transformer
Engine, which needs CUDA. Written for megatron-core 0.16. Made by `build`. B = rows, T = tokens in a row, H, V as in
`loss`, D = size of a head.

`pairs`, `pack` and `unpack` convert weights and gradients; they are functions of tensors, each the part of one
tensor-parallel worker: Megatron-core and `tensor_parallel` divide the same dimensions of the same matrices, so nothing
is sent to convert them.

    linear_qkv     one group after the other: its query heads, its key head, its value head
    linear_fc1     gate_proj above up_proj
    embedding      rows of the vocabulary, filled up with zeros so that all workers have as many
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from raylane.errors import ConfigError
from raylane.training.config.megatron_limits import check_installed, check_shape
from raylane.training.config.policy import PolicyConfig
from raylane.training.model import attention
from raylane.training.model.supervised import SupervisedModel
from raylane.training.parallel.mesh import WorkerMesh
from raylane.training.parallel.sharded import own_part


class MegatronModel(SupervisedModel):
    """Causal language model whose parameters are those of `causal_lm`, and whose layers are Megatron-core's."""

    def __init__(self, causal_lm: Any, mesh: WorkerMesh, policy: PolicyConfig, device: torch.device) -> None:
        """Take a model with its weights. Collective: makes Megatron's process groups."""
        super().__init__(causal_lm, mesh)
        self.has_reference = False
        check_installed(policy)
        if problems := list(check_shape(causal_lm.config.to_dict())):
            raise ConfigError("; ".join(problems), problems=problems)
        if mesh.tp is not None:
            # The undivided parameters become DTensors too: an optimizer takes only one kind in a group.
            for module in causal_lm.modules():
                for name, parameter in list(module.named_parameters(recurse=False)):
                    if not isinstance(parameter, DTensor):
                        same = DTensor.from_local(parameter.detach(), mesh.tp, [Replicate()], run_check=False)
                        module.register_parameter(name, nn.Parameter(same))
        dtype = torch.bfloat16 if policy.precision == "bfloat16" else torch.float32
        engine = _gpt_model(causal_lm.config, mesh, dtype).to(device, dtype)
        # In a tuple, or it would be a submodule, whose parameters would be trained and saved too.
        self._engine = (engine,)
        self._weights = list(
            pairs(dict(engine.named_parameters()), dict(causal_lm.named_parameters()), _head_dim(causal_lm.config))
        )
        for weight in self._weights:
            weight.target.register_post_accumulate_grad_hook(partial(_return_gradient, weight))  # type: ignore[no-untyped-call]
        self.gradient_sum = partial(_sum_gradients, self._weights, mesh)
        self._own_words = own_part(causal_lm.get_output_embeddings().weight).shape[0]

    def _hidden(self, inputs: dict[str, Any]) -> Tensor:
        """Return the output of the last norm, [B, T, H]."""
        engine = self._engine[0]
        # Each time, because loading a checkpoint or undoing a step changes the parameters without a notice.
        self._fill()
        rotary = self.causal_lm.base_model.rotary_emb.inv_freq
        angles = inputs["position_ids"][:, :, None].float() * rotary.float()
        # [T, B, 1, D], as Megatron's tensors [T, B, heads, D].
        angles = torch.cat([angles, angles], dim=-1).transpose(0, 1)[:, :, None]
        hidden: Tensor = engine.decoder(
            hidden_states=engine.embedding(inputs["input_ids"], None),
            # Megatron hands the mask unseen to the attention.
            attention_mask=inputs["packed_rows"],
            rotary_pos_emb=angles,
        )
        return hidden.transpose(0, 1)

    def _logits(self, inputs: dict[str, Any]) -> Tensor:
        return self._apply_head(self._hidden(inputs))

    def _apply_head(self, hidden: Tensor) -> Tensor:
        """Return the logits of this worker's part of the vocabulary."""
        engine = self._engine[0]
        shared = engine.shared_embedding_or_output_weight() if engine.share_embeddings_and_output_weights else None
        logits: Tensor = engine.output_layer(hidden, weight=shared)[0]
        return logits[..., : self._own_words]

    def _fill(self) -> None:
        """Copy the parameters into Megatron's model."""
        with torch.no_grad():
            for weight in self._weights:
                parts = [own_part(source) for source in weight.sources]
                pack(weight.how, parts, weight.head_dim, weight.target)


class _Attention(nn.Module):
    """Attention in the form that Megatron's SelfAttention calls; it has the heads of this worker."""

    def __init__(self, softmax_scale: float | None = None, **_: Any) -> None:
        """Take what Megatron's layers pass; the rest repeats the settings of `_gpt_model`, which has no others."""
        super().__init__()
        self._scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: attention.PackedRows,
        attn_mask_type: Any = None,
        **others: Any,
    ) -> Tensor:
        """Return the attention output [T, B, heads * D] of queries, keys and values [T, B, heads, D].

        ConfigError for any other argument that is not None (a bias, for example).
        """
        if attn_mask_type is not None and attn_mask_type.name != "causal":
            others["attn_mask_type"] = attn_mask_type
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        out = attention.attend(self, query, key, value, None, self._scale, packed_rows=rows, **others)[0]
        return out.transpose(0, 1).flatten(2)


def _return_gradient(weight: Weight, target: Tensor) -> None:
    """Move a gradient of Megatron's model to the parameters that its weight was made of."""
    gradient, target.grad = target.grad, None
    assert gradient is not None, "torch calls this hook after it has set the gradient"
    # float32 before the sum over micro-batches: sums in bfloat16 would lose small gradients.
    gradient = gradient.float()
    # Of parts: both models are divided in the same way.
    shapes = [own_part(source.detach()).shape for source in weight.sources]
    for source, part in zip(weight.sources, unpack(weight.how, gradient, shapes, weight.head_dim), strict=True):
        if source.grad is not None:
            own_part(source.grad).add_(part)
        elif isinstance(source, DTensor):
            source.grad = DTensor.from_local(
                part.contiguous(),
                source.device_mesh,
                source.placements,
                run_check=False,
                shape=source.shape,
                stride=source.stride(),
            )
        else:
            source.grad = part.contiguous()


def _sum_gradients(weights: list[Weight], mesh: WorkerMesh, parameters: Iterable[nn.Parameter]) -> None:
    """Replace each gradient by its sum over the workers that read different rows. Collective.

    As `GradientSum` does it for other models.
    """
    # `own_part` shares memory with the gradient, so a sum that is written into it stays there.
    parts = [own_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    partial_sources = [parameter for weight in weights if weight.is_partial for parameter in weight.sources]
    if mesh.tp is not None:
        _sum([own_part(source.grad) for source in partial_sources if source.grad is not None], mesh.tp.get_group())
    # The tensor-parallel sum first: the one over the readers includes these gradients.
    if mesh.dims.readers > 1:
        _sum(parts, mesh.fsdp.get_group())


def _sum(tensors: list[Tensor], group: Any) -> None:
    """Replace tensors by their sums over a group, in one message."""
    if not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, summed in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(summed.view_as(tensor))


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _gpt_model(config: Any, mesh: WorkerMesh, dtype: torch.dtype) -> Any:
    """Return Megatron's model with the sizes of a Hugging Face configuration, with undefined weights. Collective."""
    with warnings.catch_warnings():
        # One warning for each optional package: Transformer Engine, Apex and others.
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.transformer_config import TransformerConfig

        if parallel_state.model_parallel_is_initialized():  # an earlier setup of this worker
            parallel_state.destroy_model_parallel()
        # Tensor-parallel workers have consecutive ranks, as in `mesh.ParallelDims`.
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=mesh.dims.tp, create_gloo_process_groups=False
        )
        normalises_heads = config.model_type == "qwen3"
        spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=normalises_heads)
        spec.submodules.self_attention.submodules.core_attention = _Attention
        settings = TransformerConfig(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            ffn_hidden_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_query_groups=config.num_key_value_heads,
            kv_channels=_head_dim(config),
            layernorm_epsilon=config.rms_norm_eps,
            normalization="RMSNorm",
            qk_layernorm=normalises_heads,
            gated_linear_unit=True,
            activation_func=nn.functional.silu,
            add_bias_linear=False,
            add_qkv_bias=config.model_type == "qwen2",
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=mesh.dims.tp,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            # Without it weights are made on a CUDA device, with random numbers of one. All are filled before use.
            use_cpu_initialization=True,
            perform_initialization=False,
            # Fused kernels are compiled for CUDA.
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            apply_rope_fusion=False,
            gradient_accumulation_fusion=False,
        )
        return GPTModel(
            settings,
            spec,
            # All workers have as many words.
            vocab_size=-(-config.vocab_size // mesh.dims.tp) * mesh.dims.tp,
            max_sequence_length=config.max_position_embeddings,
            share_embeddings_and_output_weights=config.tie_word_embeddings,
            # `MegatronModel` makes the angles from the positions in each document.
            position_embedding_type="none",
        )


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

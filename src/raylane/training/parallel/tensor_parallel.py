"""Tensor parallelism: each worker holds a part of every weight matrix, and the loss never gathers the vocabulary.

The plan follows Megatron-LM (arXiv 1909.08053): the first matrices of attention and MLP are divided by columns, the
last one by rows, so that each block sums once over the workers. With sequence parallelism (arXiv 2205.05198) the tokens
are divided between the blocks as well:

    embedding   rows of the vocabulary      activations   whole, or divided by tokens
    q, k, v     columns (attention heads)   q_norm, k_norm: whole weights, whose gradients are summed over the heads
    o           rows
    gate, up    columns                     norms between the blocks: whole weights
    down        rows
    head        columns (the vocabulary)    loss: vocabulary stays divided

`plan` decides by names and refuses a model in which a parameter has no place in the plan: its gradient would be wrong
without any error. Called by `model.build` and `model.supervised`. T = tokens in a row, V = vocabulary, N =
tokens with a loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from raylane.errors import ConfigError
from raylane.training.config.model_types import MODEL_TYPES
from raylane.training.labels import IGNORED

_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")
"""Matrices of a decoder layer that are divided by rows; those in `_COLUMNS` are divided by columns."""
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def expert_block(modules: Iterable[str]) -> str | None:
    """Return the name of the module that holds the experts and the router of a decoder layer; None without experts."""
    return next((name.removesuffix(".experts") for name in modules if name.endswith(".experts")), None)


def plan(modules: Iterable[str]) -> dict[str, str]:
    """Return the treatment of each module of a decoder layer that has parameters, by its name in the layer.

    `columns`, `rows`, `head_norm`, `norm`, `heads` for a module whose own parameters have a number for each head, or
    `whole` for a module that is not divided: every worker computes all experts of whole rows, and their router. Raises
    ConfigError for a module that no plan knows.
    """
    known = {
        **dict.fromkeys(_COLUMNS, "columns"),
        **dict.fromkeys(ROWS, "rows"),
        **dict.fromkeys(_HEAD_NORMS, "head_norm"),
        **dict.fromkeys(_NORMS, "norm"),
        "self_attn": "heads",  # attention sinks (gpt-oss)
        # Adapters (`lora.LoraLinear`), whose inner size is never divided. Of columns, every worker computes the whole
        # inner values and its own columns of the output. Of rows, every worker has its own part of the input, and the
        # output has whole tokens or, like that of norms, divided ones.
        **{f"{name}.base": "columns" for name in _COLUMNS},
        **{f"{name}.lora_A": "whole" for name in _COLUMNS},
        **{f"{name}.lora_B": "columns" for name in _COLUMNS},
        **{f"{name}.base": "rows" for name in ROWS},
        **{f"{name}.lora_A": "rows" for name in ROWS},
        **{f"{name}.lora_B": "norm" for name in ROWS},
    }
    names = list(modules)
    known |= {name: "whole" for name in names if (block := expert_block(names)) and name.startswith(f"{block}.")}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(
            f"policy.dtensor_cfg.tensor_parallel_size is above 1, but raylane does not know how to divide {unknown[0]} "
            f"of this model ({len(unknown)} such modules in a layer). Use tensor_parallel_size=1, or a model of type "
            f"{', '.join(name for name, of_type in MODEL_TYPES.items() if of_type.tensors)}"
        )
    return {name: known[name] for name in names}


def apply(causal_lm: Any, mesh: DeviceMesh, sequence_parallel: bool) -> bool:
    """Divide the parameters of a model (or of a pipeline stage) in place. Collective over `mesh`.

    Afterwards the last norm returns whole rows, and the output head returns its own part of the vocabulary. Returns
    True if layers can still compute with transformers' own attention: they get whole rows, and hold no attention sinks,
    of which that attention would take those of all heads.
    """
    # Read before the modules are divided, which removes the tie.
    tied = causal_lm.config.tie_word_embeddings
    has_sinks = False
    between = Shard(1) if sequence_parallel else Replicate()
    styles: dict[str, ParallelStyle] = {
        "columns": ColwiseParallel(),
        "rows": RowwiseParallel(output_layouts=between),
        # The heads are on dimension 2 of [B, T, heads, D]. As one tensor divided by heads, its weight gets the sum of
        # the gradients of all heads.
        "head_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
        "norm": SequenceParallel(use_local_output=True),
    }
    decoder = causal_lm.get_decoder()
    for layer in decoder.layers:
        with_parameters = [name for name, module in layer.named_modules() if list(module.parameters(recurse=False))]
        treatment = plan(with_parameters)
        # Without sequence parallelism the norms see whole rows on every worker, so plain weights get whole gradients.
        plain = ("whole", "heads") if sequence_parallel else ("whole", "heads", "norm")
        divided = {name: styles[how] for name, how in treatment.items() if how not in plain}
        if sequence_parallel:
            whole_rows_in: dict[str, Any] = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
            if block := expert_block(with_parameters):
                # The result is whole too, and each worker keeps its part.
                divided[block] = PrepareModuleInputOutput(
                    **whole_rows_in,
                    use_local_input=True,
                    output_layouts=Replicate(),
                    desired_output_layouts=Shard(1),
                    use_local_output=True,
                )
            else:
                divided["mlp"] = PrepareModuleInput(**whole_rows_in, use_local_output=True)
            divided["self_attn"] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
                use_local_output=True,
            )
        parallelize_module(layer, mesh, divided)
        for name in (name for name, how in treatment.items() if how == "heads"):
            _divide_heads(layer.get_submodule(name), mesh)
            has_sinks = True
    if decoder.embed_tokens is not None:
        parallelize_module(
            decoder.embed_tokens, mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
        )
    if (head := causal_lm.get_output_embeddings()) is not None:
        _divide_head(decoder, head, mesh, sequence_parallel, tied)
    return not sequence_parallel and not has_sinks


def _divide_heads(module: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the own parameters of a module, which have a number for each attention head."""
    for key, parameter in list(module.named_parameters(recurse=False)):
        module.register_parameter(key, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))


def _divide_head(decoder: Any, head: Any, mesh: DeviceMesh, sequence_parallel: bool, tied: bool) -> None:
    """Divide the vocabulary of the output head, and make the last norm return whole rows."""
    if sequence_parallel:
        parallelize_module(decoder.norm, mesh, SequenceParallel(use_local_output=True))

        def whole_rows(_: Any, __: Any, local: Tensor) -> Tensor:
            """Return whole rows [B, T, H] from parts [B, T / tp, H]."""
            whole: Tensor = DTensor.from_local(local, mesh, [Shard(1)]).redistribute(mesh, [Replicate()]).to_local()
            return whole

        decoder.norm.register_forward_hook(whole_rows)
    parallelize_module(head, mesh, ColwiseParallel())
    if tied:  # dividing gave each name a tensor of its own
        head.weight = decoder.embed_tokens.weight


def whole_vocabulary(local: Tensor, mesh: DeviceMesh, words: int) -> Tensor:
    """Return logits [B, T, V] from the parts of the vocabulary of all workers; `words` is V."""
    rows, tokens = local.shape[:2]
    # With the whole shape: by itself DTensor takes all parts to be equally large.
    divided = DTensor.from_local(
        local,
        mesh,
        [Shard(2)],
        run_check=False,
        shape=torch.Size([rows, tokens, words]),
        stride=(tokens * words, words, 1),
    )
    whole: Tensor = divided.redistribute(mesh, [Replicate()]).to_local()
    return whole


def first_word(head: nn.Module) -> int:
    """Return the number of the first word of the vocabulary that this worker's part of the head computes."""
    weight = head.weight
    assert isinstance(weight, DTensor)
    offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)[1]
    return int(offset[0])


def vocabulary_cross_entropy(logits: Tensor, labels: Tensor, first: int, group: Any) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy summed over the N tokens, a float32 scalar, and the number of correct tokens.

    Both are the same on all workers of `group`. A token is correct if its label has the highest logit; of several
    highest logits the first one counts, as in `argmax`. `logits`: this worker's part of the vocabulary, float32
    [N, V / tp], which starts at word `first`; `labels`: int64 [N]. Collective, in the backward pass not.
    """
    total, correct = _VocabularyCrossEntropy.apply(logits, labels, first, group)  # type: ignore[no-untyped-call]
    return total, correct


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Cross-entropy over a vocabulary that is divided among workers, with four numbers per token on the wire."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int, group: Any) -> tuple[Tensor, Tensor]:
        if logits.shape[-1]:
            local_largest, word = logits.max(dim=-1)
        else:
            local_largest, word = logits.new_full(logits.shape[:1], float("-inf")), torch.zeros_like(labels)
        # The largest logit of a token may be in the part of another worker.
        largest = local_largest.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        powers = (logits - largest[:, None]).exp()
        counted = labels != IGNORED
        # Exactly one worker has the logit of a label; the others add 0.
        is_local = counted & (labels >= first) & (labels < first + logits.shape[-1])
        place = torch.where(is_local, labels - first, 0)
        taken = logits.gather(1, place[:, None])[:, 0] - largest if logits.shape[-1] else torch.zeros_like(largest)
        # Not 0 if a word before the label has the largest logit too.
        earlier = (local_largest == largest) & (word + first < labels)
        sums = torch.stack([powers.sum(dim=-1), torch.where(is_local, taken, 0.0), earlier.to(powers.dtype)])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(powers / sums[0][:, None], place, is_local, counted)
        correct = (counted & (sums[1] == 0) & (sums[2] == 0)).sum()
        ctx.mark_non_differentiable(correct)
        return torch.where(counted, sums[0].log() - sums[1], 0.0).sum(), correct

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        shares, place, is_local, counted = ctx.saved_tensors
        if shares.shape[-1]:
            # Softmax minus one at the label.
            shares = shares.scatter_add(1, place[:, None], -is_local.to(shares.dtype)[:, None])
        return shares * counted[:, None] * gradients[0], None, None, None

"""Model of a run: a Hugging Face class with the loss inside its forward; or a stage of it, in a pipeline.

Made by `build`, called by `step` and `pipeline`. Knows nothing of Ray, data files or optimizers. B, T, V, H as in
`loss`; t = T / cp, the tokens of a row that a worker holds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from raylane.errors import ConfigError
from raylane.training.model import attention
from raylane.training.model.loss import CrossEntropy, LossFunction, take_correct
from raylane.training.parallel import tensor_parallel
from raylane.training.parallel.mesh import WorkerMesh
from raylane.workers.batch import BatchDict

_HOST = "host_"
"""Prefix of the names of tensors that a pipeline stage gets in CPU memory too."""


@dataclass(frozen=True)
class OnHost:
    """A batch in CPU memory. In an object of its own, because FSDP2 moves the tensors of dictionaries to the GPU."""

    batch: BatchDict


@dataclass(frozen=True)
class _RouterLoss:
    """Loss that makes routers use all experts alike, by transformers' own function for the model."""

    function: Callable[..., Tensor]
    coefficient: float
    experts: int
    chosen: int
    """Number of experts of a token."""

    @classmethod
    def of(cls, causal_lm: Any) -> _RouterLoss | None:
        """Return the loss that the configuration of a model asks for with `output_router_logits`, None for none."""
        function = getattr(sys.modules[type(causal_lm).__module__], "load_balancing_loss_func", None)
        if function is None or not getattr(causal_lm.config, "output_router_logits", False):
            return None
        return cls(function, causal_lm.router_aux_loss_coef, causal_lm.num_experts, causal_lm.num_experts_per_tok)

    def __call__(self, router_logits: tuple[Tensor, ...], tokens: Tensor | None) -> Tensor:
        """Return the loss of the tokens of rows, bool [B, T] (None: of all), times its coefficient, a scalar."""
        return self.coefficient * self.function(router_logits, self.experts, self.chosen, tokens)


class RunModel(nn.Module):
    """Model as training steps and checkpoints see it, whole or in stages."""

    causal_lm: Any
    """transformers' model, or the part of it that this worker holds, with the parameter names of the whole model."""
    mesh: WorkerMesh

    @property
    def tied_copy(self) -> nn.Parameter | None:
        """Head of the last pipeline stage, if it is a copy of the embedding in the first one."""
        return None


class SupervisedModel(RunModel):
    """Causal language model whose forward returns the loss; or one stage of it, in a pipeline.

    FSDP2 gathers the embedding, the last norm and the head only during the forward of the module that it was applied to
    last. Code outside that forward would see only a shard of the head, so the loss is computed inside this wrapper.

    Every worker passes whole rows. With context parallelism the model cuts out its own part of them.
    """

    def __init__(self, causal_lm: Any, mesh: WorkerMesh) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.mesh = mesh
        self.gradient_sum: Callable[[Iterable[nn.Parameter]], None] | None = None
        """Replaces gradients by their sums over all workers, if each holds the whole model; None with FSDP2."""
        self.keeps_gathered = False
        """True if FSDP2 keeps the weights gathered until the last backward pass of a step."""
        self.has_head = causal_lm.get_output_embeddings() is not None
        self.has_reference = True
        """True if `causal_lm` can compute the hidden states by itself, with transformers' own attention and masks."""
        self.is_reference = False
        """True while `selfcheck` computes whole rows with transformers' own attention."""
        self._router_loss = _RouterLoss.of(causal_lm)
        """Loss of the routers of a model with experts, where its configuration asks for it; None for none."""
        self._plans_attention = causal_lm.config._attn_implementation == attention.NAME

    def forward(
        self,
        batch: BatchDict,
        loss_fn: LossFunction | None,
        *,
        host: OnHost | None = None,
        hidden_only: bool = False,
        incoming: Tensor | None = None,
    ) -> Tensor:
        """Return the summed loss of `input_ids`, `position_ids` and `labels`, int64 [B, T].

        Without `loss_fn` the result is the logits [B, T, V]; with `hidden_only`, the hidden states [B, T, H] before the
        output head. `host` is the same batch in CPU memory, if `batch` is on a GPU: plans are made from it, so that the
        CPU does not wait for the GPU. `incoming` is the output of the pipeline stage before, instead of tokens.

        No attention mask is passed. Documents are separated where `position_ids` restart, by raylane's attention as by
        transformers (masking_utils.find_packed_sequence_indices, 5.23), while any mask would connect them.
        """
        on_host = batch if host is None else host.batch
        whole_rows = hidden_only or self.is_reference or self.mesh.cp_group is None
        chunks = [(0, batch["input_ids"].shape[1])] if whole_rows else self.mesh.chunks(batch["input_ids"].shape[1])
        # With a key-value cache transformers does not look for restarting positions: documents would be connected.
        inputs: dict[str, Any] = {"use_cache": False}
        inputs["position_ids"] = attention.take_chunks(batch["position_ids"], chunks)
        if self._plans_attention and not self.is_reference:
            group = None if whole_rows else self.mesh.cp_group
            inputs["packed_rows"] = attention.PackedRows.of(on_host["position_ids"], chunks, group)
        if incoming is None:
            inputs["input_ids"] = attention.take_chunks(batch["input_ids"], chunks)
        else:
            inputs["inputs_embeds"] = incoming
        if hidden_only or not self.has_head:
            return self._hidden(inputs)
        if isinstance(loss_fn, CrossEntropy):
            labels = attention.take_chunks(batch["labels"], chunks)
            supervised = loss_fn.supervised(attention.take_chunks(on_host["labels"], chunks), labels.device)
            if self._router_loss is None or not self.training:
                return loss_fn.from_hidden(self._hidden(inputs), labels, self._summed, supervised)
            output = self._base_output(inputs)
            loss = loss_fn.from_hidden(output.last_hidden_state, labels, self._summed, supervised)
            # A mean over tokens beside a sum over supervised tokens: multiplied by their number, which the step divides
            # by. So the loss of a step is the mean of that of its micro-batches, by their supervised tokens.
            tokens = batch["document_ids"] >= 0 if "document_ids" in batch else None
            return loss + self._router_loss(output.router_logits, tokens) * supervised.numel()
        logits = self._logits(inputs)
        if self.mesh.tp is not None:
            words = self.causal_lm.get_output_embeddings().weight.shape[0]
            logits = tensor_parallel.whole_vocabulary(logits, self.mesh.tp, words)
        if loss_fn is None:
            return logits
        if self._router_loss is not None and self.training:
            raise ConfigError(
                "output_router_logits=true adds the loss of the routers to cross-entropy only, and this run has "
                "another loss function. Set policy.hf_config_overrides.output_router_logits=false",
                key="output_router_logits",
            )
        # This worker's part of every tensor that has a value for each token.
        tokens = batch["input_ids"].shape
        local = {
            name: attention.take_chunks(values, chunks)
            if isinstance(values, Tensor) and values.shape[:2] == tokens
            else values
            for name, values in batch.items()
        }
        return loss_fn(logits.float(), BatchDict(local))

    def _base_output(self, inputs: dict[str, Any]) -> Any:
        """Return transformers' output of the model without its head."""
        output = self.causal_lm.base_model(**inputs)
        if not hasattr(output, "last_hidden_state"):
            # Llama 4's text model has no `base_model` of its own.
            raise ConfigError(
                f"{type(self.causal_lm).__name__} cannot be trained: its base model returns no hidden states "
                f"({type(output).__name__}). Use llama, qwen2, qwen3, gemma or mistral"
            )
        return output

    def _hidden(self, inputs: dict[str, Any]) -> Tensor:
        """Return the output of the last norm, or of the last layer of a stage that has no head."""
        hidden: Tensor = self._base_output(inputs).last_hidden_state
        return hidden

    def _logits(self, inputs: dict[str, Any]) -> Tensor:
        """Return the logits of all tokens, of this worker's part of the vocabulary."""
        # Otherwise the class computes the loss of its routers too, without the tokens that count.
        without = {} if self._router_loss is None else {"output_router_logits": False}
        logits: Tensor = self.causal_lm(**inputs, **without).logits
        return logits

    def _apply_head(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states [N, H], of this worker's part of the vocabulary."""
        logits: Tensor = self.causal_lm.get_output_embeddings()(hidden)
        return logits

    def _summed(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the summed cross-entropy of hidden states [N, H] with labels [N], and the number of correct tokens."""
        config = self.causal_lm.config
        logits = self._apply_head(hidden).float()
        # Some classes change the logits after the head: Granite, Cohere, Gemma.
        if (divisor := getattr(config, "logits_scaling", None)) is not None:
            logits = logits / divisor
        if (factor := getattr(config, "logit_scale", None)) is not None:
            logits = logits * factor
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            logits = cap * torch.tanh(logits / cap)
        if self.mesh.tp is None:
            loss = F.cross_entropy(logits, labels, reduction="sum")
            with torch.no_grad():
                # Last, so that a checkpoint of this function does not compute it again for the backward pass.
                return loss, (logits.argmax(dim=-1) == labels).sum()
        first = tensor_parallel.first_word(self.causal_lm.get_output_embeddings())
        return tensor_parallel.vocabulary_cross_entropy(logits, labels, first, self.mesh.tp.get_group())


class StageModel(SupervisedModel):
    """One stage of a pipeline; its forward has the form that torch.distributed.pipelining calls."""

    def __init__(self, causal_lm: Any, mesh: WorkerMesh, number: int, count: int) -> None:
        super().__init__(causal_lm, mesh)
        self.number = number
        self.is_first, self.is_last = number == 0, number == count - 1
        self._is_tied = self.is_last and causal_lm.config.tie_word_embeddings
        self.loss_fn: LossFunction = CrossEntropy()
        """Loss of the next forward passes of the last stage."""

    @property
    def tied_copy(self) -> nn.Parameter | None:
        """Head of the last pipeline stage, if it is a copy of the embedding in the first one."""
        return self.causal_lm.get_output_embeddings().weight if self._is_tied else None

    def forward(self, incoming: Tensor, **tensors: Tensor) -> Tensor:  # type: ignore[override]
        """Return the hidden states [B, t, H] for the next stage; the last one returns two sums, float32 [2].

        The sums are those of the loss and of the correct tokens.
        `incoming`: tokens [B, T] for the first stage, hidden states for the others. `tensors`: those of the batch; in a
        GPU run also `host_position_ids` and `host_labels`, copies in CPU memory.
        """
        batch = BatchDict({name: value for name, value in tensors.items() if not name.startswith(_HOST)})
        on_host = {name.removeprefix(_HOST): value for name, value in tensors.items() if name.startswith(_HOST)}
        out = super().forward(
            batch,
            self.loss_fn,
            host=OnHost(BatchDict(on_host)) if on_host else None,
            incoming=None if self.is_first else incoming,
        )
        if not self.is_last:
            return out
        # In the output: torch also runs a stage to learn its shapes, and that run must count nothing.
        return torch.stack([out, take_correct(self.loss_fn, out.device).to(out.dtype)])


def stage_tensors(batch: BatchDict, device: torch.device) -> dict[str, Tensor]:
    """Return the keyword arguments of a `StageModel` for rows in CPU memory."""
    # torch's pipelines split every argument into micro-batches, so only tensors can be passed.
    tensors = {name: values for name, values in batch.to(device).items() if isinstance(values, Tensor)}
    if device.type != "cpu":
        # Plans of attention are made from these, so that the CPU does not wait for the GPU.
        tensors |= {_HOST + name: batch[name] for name in ("position_ids", "labels")}
    return tensors


def fsdp(model: SupervisedModel) -> FSDPModule | None:
    """Return the same object with the type that `fully_shard` gave it; None if every worker holds the whole model."""
    return cast("FSDPModule", model) if isinstance(model, FSDPModule) else None


def release_gathered(model: nn.Module) -> None:
    """Release the weights that FSDP2 gathered for a forward pass and that no backward pass released."""
    for module in model.modules():
        if isinstance(module, FSDPModule):  # `reshard` does not descend into the groups of the layers
            module.reshard()

"""One step of a pipeline whose stages exchange tensors over the edges of a compiled graph.

A graph calls the passes that `passes` planned, and carries the results of one stage to the next. Between two passes
this module keeps what the backward passes need. Called by `worker`; `pipeline` runs the same stages by torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raylane.sft.model.loss import LossFunction
from raylane.sft.model.pipeline import PipelinedModel
from raylane.sft.model.supervised import fsdp, stage_tensors
from raylane.sft.run import step
from raylane.sft.run.micro_batches import FixedRows, divide
from raylane.workers.batch import BatchDict


class EdgeStep:
    """A step under way on one worker. Rows of micro-batches may differ in length: nothing here has a fixed shape."""

    def __init__(
        self, model: PipelinedModel, batch: BatchDict, how: FixedRows, loss_fn: LossFunction, device: torch.device
    ) -> None:
        """Count the tokens of the global batch. Collective."""
        self.counts = step.count(batch, device, model.mesh.dims)
        self._model, self._device = model, device
        self._parts = divide(batch, how)
        self._scale = model.mesh.fsdp.size() / max(1, self.counts.supervised)
        self._total = torch.zeros((), dtype=torch.float64, device=device)
        self._waiting: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        """Input and output by (own stage, micro-batch), from its forward to its backward pass."""
        self._remaining = [len(self._parts)] * len(model.own_stages)
        """Number of backward passes to come, by own stage."""
        for stage in model.own_stages:
            stage.loss_fn = loss_fn

    def forward(self, own_stage: int, micro_batch: int, incoming: Tensor | None) -> Tensor | None:
        """Return the hidden states for the next stage; None from the last one, which adds to the loss."""
        stage, part = self._model.own_stages[own_stage], self._parts[micro_batch]
        tensors = stage_tensors(part, self._device)
        # A copy: `incoming` is memory of the edge, of which a sender has a limited amount. With gpipe it would wait for
        # some to be returned, while this worker waits for its last micro-batch before it returns any.
        stage_input = (
            tensors["input_ids"] if incoming is None else incoming.to(self._device, copy=True).requires_grad_()
        )
        out = stage(stage_input, **tensors)
        self._waiting[own_stage, micro_batch] = stage_input, out
        if not stage.is_last:
            return out.detach()  # type: ignore[no-any-return]
        self._total += out.detach().double().sum()
        return None

    def backward(self, own_stage: int, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """Add to the gradients of the stage; return the gradient of its input, None from the first stage."""
        stage = self._model.own_stages[own_stage]
        stage_input, out = self._waiting.pop((own_stage, micro_batch))
        self._remaining[own_stage] -= 1
        last = self._remaining[own_stage] == 0
        if (shards := fsdp(stage)) is not None:
            # Gradients are reduced once, after the last micro-batch.
            shards.set_is_last_backward(last)
            shards.set_requires_gradient_sync(last)
            shards.set_reshard_after_backward(last or not stage.keeps_gathered)
        if gradient is None:
            gradient = torch.full_like(out, self._scale)  # of the loss, which only the last stage has
        torch.autograd.backward(out, gradient.to(self._device))
        return stage_input.grad

    def end(self) -> float:
        """Return the global mean loss, the same on all workers, when all passes have run. Collective."""
        assert not any(self._remaining), "a worker ends its step after its last backward pass"
        self._model.sum_tied_gradients()
        return step.mean_loss(self._total, self.counts, self._model.mesh.dims)

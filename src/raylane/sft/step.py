"""One optimizer step on one worker: micro-batches forward and backward, global mean, clip, update.

Called by `worker`. Collective: all workers run it with the same number of micro-batches.

The gradient of a step is d/dw (sum of losses over all supervised tokens of the global batch / their number), for any
number of workers, replicas and micro-batches. FSDP averages gradients over workers, so each worker's sum is multiplied
by the number of workers before the division by the global count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from raylane.sft.loss import IGNORED, LossFunction
from raylane.sft.model import SupervisedModel, fsdp
from raylane.workers.batch import BatchDict

__all__ = ["Counts", "backward", "clip", "count", "evaluating", "forward_only", "optimize"]


@dataclass(frozen=True)
class Counts:
    """Token counts of the global batch."""

    supervised: int
    """Number of tokens with a loss."""
    tokens: int
    """Number of tokens of documents, without padding."""


def count(batch: BatchDict, device: torch.device) -> Counts:
    """Return the token counts summed over all workers, by one small all-reduce."""
    tokens = (batch["document_ids"] >= 0).sum() if "document_ids" in batch else torch.tensor(batch["labels"].numel())
    both = torch.stack([(batch["labels"] != IGNORED).sum(), tokens]).to(device)
    dist.all_reduce(both)
    supervised, tokens = both.tolist()
    return Counts(int(supervised), int(tokens))


def backward(
    model: SupervisedModel,
    batch: BatchDict,
    rows: int,
    loss_fn: LossFunction,
    counts: Counts,
    device: torch.device,
    reduce_each: bool = False,
) -> float:
    """Leave the gradients of the global mean loss in `.grad`; return that loss, the same on all workers.

    With `reduce_each` gradients are reduced after every micro-batch, so each worker keeps only its shard of them.
    Otherwise they are reduced once, after the last one, and each worker keeps whole float32 gradients until then.
    """
    shards = fsdp(model)
    # FSDP averages the gradients of the workers, `GradientSum` adds them.
    scale = (1 if shards is None else dist.get_world_size()) / max(1, counts.supervised)
    # float64, so that the sum does not depend on the number of micro-batches beyond rounding.
    total = torch.zeros((), dtype=torch.float64, device=device)
    parts = list(batch.micro_batches(rows))
    for i, part in enumerate(parts):
        if shards is not None:
            # Without this, FSDP would reduce in every backward pass; only the last one needs to.
            last = i == len(parts) - 1
            shards.set_requires_gradient_sync(reduce_each or last)
            shards.set_reshard_after_backward(last or not model.keeps_gathered)
        loss = model(part.to(device), loss_fn)
        (loss * scale).backward()
        total += loss.detach()
    if model.gradient_sum is not None:
        model.gradient_sum(model.parameters())
    dist.all_reduce(total)
    return float(total) / max(1, counts.supervised)


def forward_only(
    model: SupervisedModel, batch: BatchDict, rows: int, loss_fn: LossFunction, device: torch.device
) -> Tensor:
    """Return the summed loss over this worker's rows, float64, without gradients, in evaluation mode (no dropout)."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    with torch.no_grad(), evaluating(model):
        for part in batch.micro_batches(rows):
            total += model(part.to(device), loss_fn)
    return total


@contextmanager
def evaluating(model: SupervisedModel) -> Iterator[None]:
    """Put the model into evaluation mode for a `with` block, and back into training mode after it."""
    model.eval()
    try:
        yield
    finally:
        model.train()


def clip(model: SupervisedModel, max_norm: float | None) -> float:
    """Clip the gradients of the whole model to `max_norm` (None: do not clip); return their norm before. Collective."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):  # a partial norm per worker; full_tensor() combines them
        norm = norm.full_tensor()
    # A norm within the limit would multiply every gradient by 1. The comparison is written so that NaN multiplies.
    if max_norm is not None and not float(norm) + 1e-6 < max_norm:
        torch.nn.utils.clip_grads_with_norm_(list(model.parameters()), max_norm, norm)
    return float(norm)


def optimize(
    model: SupervisedModel,
    optimizer: torch.optim.Optimizer,
    batch: BatchDict,
    rows: int,
    loss_fn: LossFunction,
    max_norm: float | None,
    device: torch.device,
    reduce_each: bool = False,
) -> tuple[float, float, Counts]:
    """Run one step and return (loss, gradient norm, counts).

    FloatingPointError if loss or norm is not finite; no weight has changed then.
    """
    counts = count(batch, device)
    loss = backward(model, batch, rows, loss_fn, counts, device, reduce_each)
    norm = clip(model, max_norm)
    # All workers have the same loss and norm, so either all raise or none does.
    if not (math.isfinite(loss) and math.isfinite(norm)):
        optimizer.zero_grad(set_to_none=True)
        raise FloatingPointError(
            f"the step failed: loss {loss}, gradient norm {norm}. The weights are unchanged. Use a lower learning rate "
            "(policy.optimizer.kwargs.lr) or a lower policy.max_grad_norm, or check the data of this step"
        )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss, norm, counts

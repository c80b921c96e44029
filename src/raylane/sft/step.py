"""One optimizer step on one worker: micro-batches forward and backward, one division by the global token count, clip,
update. Called by `worker`; collective, so all workers run it with equally many micro-batches.

The gradient of a step is d/dw (sum of losses over all supervised tokens of the global batch / their number), whatever
the numbers of workers, replicas and micro-batches: FSDP averages gradients over workers, so each worker's sum is
multiplied by their number before it is divided by the global count.
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
from raylane.sft.model import SupervisedModel, sharded
from raylane.workers.batch import BatchDict

__all__ = ["Counts", "backward", "clip", "count", "evaluating", "forward_only", "optimize"]


@dataclass(frozen=True)
class Counts:
    """Of the global batch: tokens that the loss is on, and tokens of documents (padding left out)."""

    supervised: int
    tokens: int


def count(batch: BatchDict, device: torch.device) -> Counts:
    """Add up over all workers. One small all-reduce."""
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
    """Leave the gradients of the global mean loss in `.grad`; returns that loss, the same on all workers.

    `reduce_each`: reduce after every micro-batch, so that each worker keeps only its shard of the gradients; otherwise
    once, by the last one, and until then each worker keeps whole float32 gradients.
    """
    scale = dist.get_world_size() / max(1, counts.supervised)
    total = torch.zeros((), dtype=torch.float64, device=device)
    parts = list(batch.micro_batches(rows))
    for i, part in enumerate(parts):
        sharded(model).set_requires_gradient_sync(reduce_each or i == len(parts) - 1)
        loss = model(part.to(device), loss_fn)
        (loss * scale).backward()
        total += loss.detach()
    return _global_mean(total, counts)


def forward_only(
    model: SupervisedModel, batch: BatchDict, rows: int, loss_fn: LossFunction, device: torch.device
) -> Tensor:
    """Sum of the loss over this worker's rows, float64, without gradients, in evaluation mode (no dropout)."""
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
    """Norm of all gradients of the whole model, before clipping to `max_norm` (None: only measured). Collective."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm is not None:
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
    """(loss, gradient norm, counts) of a step. FloatingPointError, before any weight is touched, if not finite."""
    counts = count(batch, device)
    loss = backward(model, batch, rows, loss_fn, counts, device, reduce_each)
    norm = clip(model, max_norm)
    if not (math.isfinite(loss) and math.isfinite(norm)):
        optimizer.zero_grad(set_to_none=True)
        raise FloatingPointError(
            f"loss {loss}, gradient norm {norm}: the weights were left as they are; lower the learning rate, clip "
            "harder (policy.max_grad_norm), or look at the data of this step"
        )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss, norm, counts


def _global_mean(total: Tensor, counts: Counts) -> float:
    dist.all_reduce(total)
    return float(total) / max(1, counts.supervised)

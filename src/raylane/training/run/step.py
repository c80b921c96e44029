"""One optimizer step on one worker: micro-batches forward and backward, global mean, clip, update.

Called by `worker`. Collective: all workers run it with the same number of micro-batches.

The gradient of a step is d/dw (sum of losses over all supervised tokens of the global batch / their number), for any
layout and number of micro-batches. FSDP averages gradients over its workers, so each worker's sum is multiplied by
their number before the division by the global count.

Workers along pp, cp and tp have the same rows. All count their tokens, so counts are divided by the number of copies;
tensor-parallel workers have the same loss, context-parallel ones the loss of their part of each row, and of a pipeline
only the last stage has one.

`state_kept` keeps weights, optimizer and random generators over a warm-up step, which is a real step: it allocates what
the largest step needs, opens the connections of the process group, and shows a lack of memory before the first real
step.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from raylane.training.labels import IGNORED
from raylane.training.model.loss import LossFunction, take_correct
from raylane.training.model.pipeline import PipelinedModel
from raylane.training.model.supervised import OnHost, RunModel, SupervisedModel, fsdp
from raylane.training.parallel.mesh import ParallelDims
from raylane.training.parallel.sharded import own_part, whole
from raylane.training.run.micro_batches import Division, FixedRows, cut_together, divide, on_device
from raylane.workers.batch import BatchDict


@dataclass(frozen=True)
class TokenCounts:
    """Token counts of the global batch."""

    supervised: int
    """Number of tokens with a loss."""
    tokens: int
    """Number of tokens of documents, without padding."""


@dataclass(frozen=True)
class Means:
    """Means over the supervised tokens of the global batch."""

    loss: float
    token_accuracy: float | None = None
    """Share of tokens whose label had the highest logit; None if the loss does not count them."""

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics by name; perplexity and accuracy only of cross-entropy, which is the loss that counts tokens."""
        if self.token_accuracy is None:
            return {"loss": self.loss}
        # exp() of a float raises from 709.8 on.
        perplexity = math.inf if self.loss > 700 else math.exp(self.loss)
        return {"loss": self.loss, "perplexity": perplexity, "token_accuracy": self.token_accuracy}


def count(batch: BatchDict, device: torch.device, dims: ParallelDims) -> TokenCounts:
    """Return the token counts of the global batch, by one small all-reduce."""
    tokens = (batch["document_ids"] >= 0).sum() if "document_ids" in batch else torch.tensor(batch["labels"].numel())
    both = torch.stack([(batch["labels"] != IGNORED).sum(), tokens]).to(device)
    dist.all_reduce(both)
    supervised, tokens = both.tolist()
    return TokenCounts(int(supervised) // dims.copies, int(tokens) // dims.copies)


def backward(
    model: RunModel,
    batch: BatchDict,
    how: Division,
    loss_fn: LossFunction,
    counts: TokenCounts,
    device: torch.device,
    reduce_each: bool = False,
) -> Means:
    """Leave the gradients of the global mean loss in `.grad`; return the means, the same on all workers.

    `how` is the number of rows in a micro-batch, or the limit of its tokens. With `reduce_each` gradients are reduced
    after every micro-batch, so each worker keeps only its shard of them. Otherwise they are reduced once, after the
    last one, and each worker keeps whole float32 gradients until then.
    """
    mesh = model.mesh
    if isinstance(model, PipelinedModel):
        assert isinstance(how, FixedRows), "layout refuses a token budget in a pipeline"
        scale = mesh.fsdp.size() / max(1, counts.supervised)
        total = model.run(cut_together(batch, how), how.rows, loss_fn, scale)
        model.sum_tied_gradients()
    else:
        assert isinstance(model, SupervisedModel)
        total = _backward_each(model, batch, how, loss_fn, counts, device, reduce_each)
        if model.gradient_sum is not None:
            model.gradient_sum(model.parameters())
    return means_of(total, counts, mesh.dims)


def _backward_each(
    model: SupervisedModel,
    batch: BatchDict,
    how: Division,
    loss_fn: LossFunction,
    counts: TokenCounts,
    device: torch.device,
    reduce_each: bool,
) -> Tensor:
    """Run forward and backward passes of all micro-batches; return summed loss and correct tokens, float64 [2]."""
    shards = fsdp(model)
    # FSDP averages the gradients of the workers, `GradientSum` adds them.
    scale = (1 if shards is None else model.mesh.fsdp.size()) / max(1, counts.supervised)
    # float64, so that the sum does not depend on the number of micro-batches beyond rounding.
    total = torch.zeros((), dtype=torch.float64, device=device)
    parts = divide(batch, how)
    # Nothing in this loop waits for a GPU: the CPU runs ahead, and the loss stays on the device until the step's end.
    for i, (part, host) in enumerate(on_device(parts, device)):
        if shards is not None:
            # Without this, FSDP would reduce in every backward pass; only the last one needs to.
            last = i == len(parts) - 1
            shards.set_requires_gradient_sync(reduce_each or last)
            shards.set_reshard_after_backward(last or not model.keeps_gathered)
        loss = model(part, loss_fn, host=OnHost(host))
        (loss * scale).backward()
        total += loss.detach()
    return torch.stack([total, take_correct(loss_fn, device)])


def means_of(total: Tensor, counts: TokenCounts, dims: ParallelDims) -> Means:
    """Return the means of the global batch from the sums of the workers: loss and correct tokens [2]. Collective."""
    dist.all_reduce(total)
    loss, correct = (float(value) / dims.tp / max(1, counts.supervised) for value in total.tolist())
    return Means(loss, None if math.isnan(correct) else correct)


def forward_only(
    model: RunModel, batch: BatchDict, how: FixedRows, loss_fn: LossFunction, device: torch.device
) -> Tensor:
    """Return loss and correct tokens summed over this worker's rows, float64 [2], without gradients.

    Runs in evaluation mode (no dropout).
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    with torch.no_grad(), evaluating(model):
        if isinstance(model, PipelinedModel):
            return model.run(cut_together(batch, how), how.rows, loss_fn, None)
        for part, host in on_device(divide(batch, how), device):
            total += model(part, loss_fn, host=OnHost(host))
    return torch.stack([total, take_correct(loss_fn, device)])


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode for a `with` block, and back into training mode after it."""
    model.eval()
    try:
        yield
    finally:
        model.train()


def clip(model: RunModel, max_norm: float | None) -> float:
    """Clip the gradients of the whole model to `max_norm` (None: do not clip); return their norm before. Collective."""
    mesh = model.mesh
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    # The same parameter on two workers counts once.
    copied = None if model.tied_copy is None else model.tied_copy.grad
    # torch combines only gradients on one device mesh, and tensor parallelism leaves some parameters on another one.
    by_mesh: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        if gradient is not copied:  # the first stage counts the embedding, which is the same parameter
            by_mesh.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
    norms = [torch.nn.utils.get_total_norm(some) for some in by_mesh.values()]
    # Of shards a partial norm per worker, which `whole` combines.
    combined = [whole(norm) for norm in norms]
    norm = combined[0] if len(combined) == 1 else torch.linalg.vector_norm(torch.stack(combined))
    if mesh.pp_group is not None:
        # Each stage has other parameters.
        squared = norm.square()
        dist.all_reduce(squared, group=mesh.pp_group)
        norm = squared.sqrt()
    # A norm within the limit would multiply every gradient by 1. The comparison is written so that NaN multiplies.
    if max_norm is not None and not float(norm) + 1e-6 < max_norm:
        # In place and without DTensor, which would refuse tensors of several meshes.
        torch._foreach_mul_(
            [own_part(gradient) for gradient in gradients], torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        )
    return float(norm)


def update(
    model: RunModel, optimizer: torch.optim.Optimizer, loss: float, max_norm: float | None, device: torch.device
) -> tuple[float, bool]:
    """Change the weights by the gradients of the global mean loss. Collective.

    Returns the norm of the gradients, and True if loss and norm are finite on all workers; otherwise no weight has
    changed.
    """
    norm = clip(model, max_norm)
    finite = math.isfinite(loss) and math.isfinite(norm)
    if model.mesh.dims.world > 1:
        # Tensor-parallel workers have gradients of their own of the weights that are not divided. If a fault made those
        # of one worker NaN and the others went on, their weights would differ from then on without any error.
        wrong = torch.tensor(float(not finite), device=device)
        dist.all_reduce(wrong)
        finite = not wrong.item()
    if finite:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, finite


@contextmanager
def state_kept(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Undo, at the end of a `with` block, all that the block did to model, optimizer and random generators.

    Keeps a copy of this worker's weights and optimizer state in host memory during the block. Tensors stay the same
    objects; gradients are dropped. Works after an exception too.
    """
    # Frozen weights do not change, and may be most of the model.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    tensors = [own_part(tensor) for tensor in (*trained, *model.buffers())]
    copies = [_copy(tensor) for tensor in tensors]
    state = {parameter: _copies(values) for parameter, values in optimizer.state.items()}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    cpu, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)
            _restore_optimizer(optimizer, state)
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)
        optimizer.zero_grad(set_to_none=True)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        random.setstate(python)
        np.random.set_state(numpy)


def _restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[Any, dict[str, Any]]) -> None:
    for parameter in list(optimizer.state):
        # Before its first step an optimizer has no state, and creates it in the step.
        if parameter not in state:
            del optimizer.state[parameter]
            continue
        values = optimizer.state[parameter]
        for key, before in state[parameter].items():
            if isinstance(before, Tensor):
                own_part(values[key]).copy_(before)
            else:
                values[key] = before


def _copies(values: dict[str, Any]) -> dict[str, Any]:
    return {key: _copy(own_part(value)) if isinstance(value, Tensor) else value for key, value in values.items()}


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy in host memory: the device may have no room for a second model."""
    return tensor.detach().to("cpu", copy=True)

"""Loss of supervised fine-tuning: summed cross-entropy over the supervised tokens of a micro-batch.

Always a sum, never a mean. The divisor is the number of supervised tokens of the *global* batch, which is known only to
the step that sees all micro-batches and all workers (`run.step`); so the division of a batch does not change the loss.
Called inside the model's forward (`supervised.SupervisedModel`).

B = rows, T = tokens in a row, V = vocabulary, H = hidden size, N = B * T.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from raylane.training.labels import IGNORED
from raylane.workers.batch import BatchDict

SummedLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Summed loss of hidden states [N, H] with labels [N], and the number of labels with the highest logit; scalars."""


class LossFunction(Protocol):
    """Loss accepted by `Policy.train`: picklable, and called on every worker for each of its micro-batches."""

    def __call__(self, logits: Tensor, batch: BatchDict) -> Tensor:
        """Return the loss *summed* over the supervised tokens, a scalar; `logits` is float32 [B, T, V]."""


class CorrectTokens:
    """Count of supervised tokens whose label had the highest logit; it stays on the device until it is taken."""

    def __init__(self) -> None:
        self._count: Tensor | None = None
        """Number of such tokens since the last call of `take`; None before the first ones."""

    def add(self, count: Tensor) -> None:
        """Add the count of some tokens, a scalar."""
        self._count = count if self._count is None else self._count + count

    def take(self, device: torch.device) -> Tensor:
        """Return the count as a float64 scalar on `device`, and begin a new one."""
        count, self._count = self._count, None
        return torch.zeros((), dtype=torch.float64, device=device) if count is None else count.double()


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy in float32 with `batch["labels"]`, int64 [B, T], already shifted.

    With `chunk_tokens`, `from_hidden` computes the logits of that many supervised tokens at a time, and recomputes them
    in the backward pass. Memory then does not grow with V * T; the result is the same.
    """

    chunk_tokens: int | None = None
    """Maximum number of tokens whose logits exist at once; None for no limit."""
    correct: CorrectTokens = field(default_factory=CorrectTokens, compare=False, repr=False)
    """Count of correct tokens of `from_hidden`, for whoever calls the model."""

    def __call__(self, logits: Tensor, batch: BatchDict) -> Tensor:
        """Return the summed loss of logits [B, T, V], a float32 scalar."""
        labels = batch["labels"].reshape(-1)
        return F.cross_entropy(
            logits.reshape(labels.numel(), -1).float(), labels, ignore_index=IGNORED, reduction="sum"
        )

    @staticmethod
    def supervised(labels: Tensor, device: torch.device) -> Tensor:
        """Return the places of labels [B, T] that have a loss, as int64 [N] on `device`, counted row by row.

        With labels in CPU memory, neither this nor the use of the result waits for a GPU.
        """
        places = torch.nonzero(labels.flatten() != IGNORED).squeeze(1)
        return places if places.device == device else places.pin_memory().to(device, non_blocking=True)

    def from_hidden(self, hidden: Tensor, labels: Tensor, summed: SummedLoss, rows: Tensor) -> Tensor:
        """Return the summed loss of hidden states [B, T, H] before the output head and labels [B, T], a float32 scalar.

        `summed(hidden [N, H], labels [N])` applies the head, sums the loss and counts correct tokens, for `correct`.
        Only the places `rows` go through it. A micro-batch without supervised positions still sends one position
        through the head with weight zero: every worker must use every parameter, or its gradient collectives would wait
        forever.
        """
        hidden, labels = hidden.flatten(0, 1), labels.flatten()
        if rows.numel() == 0:
            return summed(hidden[:1], labels.new_zeros(1))[0] * 0.0
        hidden, labels = hidden[rows], labels[rows]
        if self.chunk_tokens is None or rows.numel() <= self.chunk_tokens:
            loss, correct = summed(hidden, labels)
            self.correct.add(correct)
            return loss
        total = hidden.new_zeros((), dtype=torch.float32)
        chunks = zip(
            torch.split(hidden, self.chunk_tokens),
            torch.split(labels, self.chunk_tokens),
            strict=True,
        )
        for some_hidden, some_labels in chunks:
            # checkpoint() drops the chunk's logits after the forward pass and recomputes them in the backward pass.
            part, correct = checkpoint(summed, some_hidden, some_labels, use_reentrant=False)
            total = total + part
            self.correct.add(correct)
        return total


def take_correct(loss_fn: LossFunction, device: torch.device) -> Tensor:
    """Return the number of correct tokens since the last call, float64; NaN for a loss that does not count them."""
    if isinstance(loss_fn, CrossEntropy):
        return loss_fn.correct.take(device)
    return torch.full((), torch.nan, dtype=torch.float64, device=device)

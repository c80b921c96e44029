"""The loss of supervised fine-tuning: summed cross-entropy over the supervised tokens of a micro-batch.

Always a sum, never a mean: what it is divided by is the number of supervised tokens of the *global* batch, which only
the step that sees all micro-batches and all workers knows (`step.py`). So the loss does not depend on how a batch is
cut. Called inside the model's forward (`model.SupervisedModel`).

B = rows, T = tokens in a row, V = vocabulary, H = hidden size, N = B * T.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from raylane.workers.batch import BatchDict

__all__ = ["IGNORED", "CrossEntropy", "LossFunction"]

IGNORED = -100
"""Label of a position that is not learned (torch's `ignore_index`)."""


class LossFunction(Protocol):
    """What `Policy.train` takes: module-level or picklable, called on every worker for each of its micro-batches."""

    def __call__(self, logits: Tensor, batch: BatchDict) -> Tensor:
        """`logits` [B, T, V] float32 and the micro-batch -> scalar: the loss *summed* over its supervised tokens."""


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy in float32 against `batch["labels"]` int64 [B, T], already shifted.

    With `chunk_tokens`, `from_hidden` makes the logits of that many supervised tokens at a time and makes them again
    in the backward pass, so that memory does not grow with V * T; the result is the same.
    """

    chunk_tokens: int | None = None

    def __call__(self, logits: Tensor, batch: BatchDict) -> Tensor:
        """Logits [B, T, V] -> summed loss, a float32 scalar."""
        labels = batch["labels"].reshape(-1)
        return F.cross_entropy(
            logits.reshape(labels.numel(), -1).float(), labels, ignore_index=IGNORED, reduction="sum"
        )

    def from_hidden(self, hidden: Tensor, labels: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """Hidden states [B, T, H] (before the output head) and labels [B, T] -> summed loss, a float32 scalar.

        Only supervised positions go through the head. A micro-batch without any still sends one through it, with weight
        zero: every worker must use every parameter, or its gradient collectives would wait for ever.
        """
        hidden, labels = hidden.flatten(0, 1), labels.flatten()
        rows = torch.nonzero(labels != IGNORED).squeeze(1)
        if rows.numel() == 0:
            return head(hidden[:1]).float().sum() * 0.0
        hidden, labels = hidden[rows], labels[rows]
        if self.chunk_tokens is None or rows.numel() <= self.chunk_tokens:
            return _summed(hidden, labels, head)
        total = hidden.new_zeros((), dtype=torch.float32)
        chunks = zip(
            torch.split(hidden, self.chunk_tokens),
            torch.split(labels, self.chunk_tokens),
            strict=True,
        )
        for some_hidden, some_labels in chunks:
            part: Tensor = checkpoint(_summed, some_hidden, some_labels, head, use_reentrant=False)
            total = total + part
        return total


def _summed(hidden: Tensor, labels: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
    return F.cross_entropy(head(hidden).float(), labels, reduction="sum")

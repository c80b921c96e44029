"""Division of a worker's rows into micro-batches: a fixed number of rows each, or as many as a token budget allows.

With a budget (`policy.dynamic_batching`), rows of about the same length go together, and padding that all of them have
is cut off (budget 12, lengths rounded to 2):

    rows of T = 8      aaaaaaa.  bb......  cccccc..  ddd.....
    micro-batches      aaaaaaa.        cccccc / ddd...        bb          each at most 12 tokens

Loss and gradients are sums over tokens, so they do not depend on the division. Called by `step`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from raylane.sft.layout import row_divisor
from raylane.workers.batch import BatchDict, plan_token_budget

if TYPE_CHECKING:
    from raylane.sft.config import PolicyConfig

__all__ = ["TokenBudget", "divide", "division"]


@dataclass(frozen=True)
class TokenBudget:
    """Limit of a micro-batch."""

    tokens: int
    """Largest number of rows times their length after cutting."""
    round_to: int
    """Divisor of the length after cutting, except where that would be longer than the rows are."""


def division(policy: PolicyConfig) -> int | TokenBudget:
    """Return the configured division: rows in a micro-batch, or a token budget."""
    settings = policy.dynamic_batching
    if not settings.enabled:
        return policy.train_micro_batch_size
    divisor = math.lcm(settings.sequence_length_round, row_divisor(policy.dtensor_cfg))
    return TokenBudget(policy.micro_batch_tokens, divisor)


def divide(batch: BatchDict, how: int | TokenBudget) -> list[BatchDict]:
    """Return the micro-batches of this worker's rows, equally many on all workers. With a budget collective.

    A row ends at the last token with a document (`document_ids`); without that key rows are not cut.
    """
    if isinstance(how, int):
        return list(batch.micro_batches(how))
    lengths = _lengths(batch)
    plan = plan_token_budget(lengths, how.tokens, round_to=how.round_to)
    # Every micro-batch has collectives of FSDP2, so the workers with fewer of them make more. The lengths of all
    # workers are known only to those that read their rows themselves; one number on the wire serves all of them.
    most = torch.tensor(len(plan))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if len(plan) < int(most):
        plan = plan_token_budget(lengths, how.tokens, round_to=how.round_to, at_least=int(most))
    row_tokens = batch["input_ids"].shape[1]
    parts = []
    for rows in plan:
        longest = max(lengths[row] for row in rows)
        parts.append(_cut(batch.select(rows), min(row_tokens, math.ceil(longest / how.round_to) * how.round_to)))
    return parts


def _lengths(batch: BatchDict) -> list[int]:
    """Return the tokens of each row up to its padding; at least 1, because a model takes no empty row."""
    shape = batch["input_ids"].shape
    if "document_ids" not in batch:
        return [int(shape[1])] * int(shape[0])
    used = batch["document_ids"] >= 0
    last = torch.where(used, torch.arange(1, shape[1] + 1, device=used.device), 1).amax(dim=1)
    return [int(length) for length in last.tolist()]


def _cut(batch: BatchDict, tokens: int) -> BatchDict:
    """Return the first tokens of every row, of each tensor that has a value for each token."""
    shape = batch["input_ids"].shape
    return BatchDict(
        {
            name: values[:, :tokens] if isinstance(values, Tensor) and values.shape[:2] == shape else values
            for name, values in batch.items()
        }
    )

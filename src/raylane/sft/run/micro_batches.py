"""Division of a worker's rows into micro-batches: a fixed number of rows each, or as many as a token budget allows.

Padding that all rows of a micro-batch have is cut off, unless rows are packed, and so nearly full. With a budget
(`policy.dynamic_batching`), rows of about the same length go together (budget 12, lengths rounded to 2):

    rows of T = 8      aaaaaaa.  bb......  cccccc..  ddd.....
    micro-batches      aaaaaaa.        cccccc / ddd...        bb          each at most 12 tokens

Loss and gradients are sums over tokens, so they do not depend on the division. Called by `step`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from raylane.sft.config.policy import PolicyConfig
from raylane.workers.batch import BatchDict, plan_token_budget

_ROUND_TO = 8
"""Divisor of the length of unpacked rows after cutting: kernels compute in tiles of at least 8."""
_PIPELINE_LENGTHS = 8
"""Number of different lengths of rows in a pipeline of torch, which keeps buffers for each."""


@dataclass(frozen=True)
class FixedRows:
    """Number of rows in a micro-batch."""

    rows: int
    round_to: int | None = None
    """Divisor of the length after cutting; None leaves rows whole."""


@dataclass(frozen=True)
class TokenBudget:
    """Limit of a micro-batch."""

    tokens: int
    """Largest number of rows times their length after cutting."""
    round_to: int
    """Divisor of the length after cutting, except where that would be longer than the rows are."""


Division: TypeAlias = FixedRows | TokenBudget


def division(policy: PolicyConfig, rows: int | None = None) -> Division:
    """Return the configured division; `rows` replaces it by a number of rows in a micro-batch."""
    settings, divisor = policy.dynamic_batching, policy.dtensor_cfg.row_divisor
    if settings.enabled and rows is None:
        return TokenBudget(policy.micro_batch_tokens, math.lcm(settings.sequence_length_round, divisor))
    # Packed rows are nearly full, and the kernels of one shape are made once.
    cuts = not policy.sequence_packing.enabled
    return FixedRows(rows or policy.train_micro_batch_size, math.lcm(_ROUND_TO, divisor) if cuts else None)


def divide(batch: BatchDict, how: Division) -> list[BatchDict]:
    """Return the micro-batches of this worker's rows, equally many on all workers. With a budget collective.

    A row ends at the last token with a document (`document_ids`); without that key rows are not cut.
    """
    if isinstance(how, FixedRows):
        parts = list(batch.micro_batches(how.rows))
        return parts if how.round_to is None else [_cut(part, _lengths(part), how.round_to) for part in parts]
    lengths = _lengths(batch)
    plan = plan_token_budget(lengths, how.tokens, round_to=how.round_to)
    # Every micro-batch has collectives of FSDP2, so the workers with fewer of them make more. The lengths of all
    # workers are known only to those that read their rows themselves; one number on the wire serves all of them.
    most = torch.tensor(len(plan))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if len(plan) < int(most):
        plan = plan_token_budget(lengths, how.tokens, round_to=how.round_to, at_least=int(most))
    return [_cut(batch.select(rows), [lengths[row] for row in rows], how.round_to) for rows in plan]


def cut_together(batch: BatchDict, how: FixedRows) -> BatchDict:
    """Return the rows of all micro-batches, cut to one length: stages of a pipeline of torch agree on one shape.

    The length is a multiple of an eighth of the whole one, so that few different shapes occur.
    """
    if how.round_to is None:
        return batch
    eighth = math.ceil(batch["input_ids"].shape[1] / _PIPELINE_LENGTHS)
    return _cut(batch, _lengths(batch), math.ceil(eighth / how.round_to) * how.round_to)


def _lengths(batch: BatchDict) -> list[int]:
    """Return the tokens of each row up to its padding; at least 1, because a model takes no empty row."""
    shape = batch["input_ids"].shape
    if "document_ids" not in batch:
        return [int(shape[1])] * int(shape[0])
    used = batch["document_ids"] >= 0
    last = torch.where(used, torch.arange(1, shape[1] + 1, device=used.device), 1).amax(dim=1)
    return [int(length) for length in last.tolist()]


def _cut(batch: BatchDict, lengths: Sequence[int], round_to: int) -> BatchDict:
    """Return the rows up to the longest of `lengths`, rounded up, of each tensor that has a value for each token."""
    shape = batch["input_ids"].shape
    tokens = min(shape[1], math.ceil(max(lengths) / round_to) * round_to)
    return BatchDict(
        {
            name: values[:, :tokens] if isinstance(values, Tensor) and values.shape[:2] == shape else values
            for name, values in batch.items()
        }
    )

"""Division of a worker's rows into micro-batches: a fixed number of rows each, or as many as a token budget allows.

Padding that all rows of a micro-batch have is cut off, unless rows are packed, and so nearly full. With a budget
(`policy.dynamic_batching`), rows of about the same length go together (budget 12, lengths rounded to 2):

    rows of T = 8      aaaaaaa.  bb......  cccccc..  ddd.....
    micro-batches      aaaaaaa.        cccccc / ddd...        bb          each at most 12 tokens

Loss and gradients are sums over tokens, so they do not depend on the division. `on_device` brings micro-batches to the
device that computes, each copied while the one before computes:

    copying stream       [0][1]       [2]         [3]
    computing stream        [--- 0 ---][--- 1 ---][--- 2 ---]

Copies start from pinned memory: from other memory the CPU would wait for every one of them. Called by `step`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from raylane.training.config.policy import PolicyConfig
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
    round_to = math.lcm(_ROUND_TO, divisor, policy.make_sequence_length_divisible_by) if cuts else None
    return FixedRows(rows or policy.train_micro_batch_size, round_to)


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


Item = TypeVar("Item")
Started = TypeVar("Started")
Ready = TypeVar("Ready")


def on_device(parts: Iterable[BatchDict], device: torch.device) -> Iterator[tuple[BatchDict, BatchDict]]:
    """Yield each micro-batch on the device and in CPU memory, which are the same if the device is the CPU.

    The CPU waits for no copy. A batch may be used on the stream that was current when it was yielded.
    """
    if device.type == "cpu":
        return ((part, part) for part in parts)
    return one_ahead(parts, lambda part: _start(part, device), _finish)


def one_ahead(
    items: Iterable[Item], start: Callable[[Item], Started], finish: Callable[[Started], Ready]
) -> Iterator[tuple[Ready, Item]]:
    """Yield `finish(start(item))` and the item, for each item; the next one is started before an item is yielded."""
    begun: Iterator[Any] = ((start(item), item) for item in items)
    for (started, item), _ in itertools.pairwise(itertools.chain(begun, [None])):
        yield finish(started), item


def pinned(batch: BatchDict) -> BatchDict:
    """Return the batch in pinned memory, for copies to a GPU; tensors that are pinned already are shared."""
    return BatchDict(
        {
            name: value.pin_memory() if isinstance(value, Tensor) and not value.is_pinned() else value
            for name, value in batch.items()
        }
    )


@cache
def _copying_stream(device: torch.device) -> torch.cuda.Stream:
    # One for the whole run: torch keeps the memory of every stream apart.
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _start(part: BatchDict, device: torch.device) -> tuple[BatchDict, Any]:
    """Start the copy of a micro-batch on the copying stream; return it and the event at its end."""
    # torch keeps pinned memory until the copies from it have ended.
    source = pinned(part)
    stream = _copying_stream(device)
    with torch.cuda.stream(stream):
        moved = {
            name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in source.items()
        }
        return BatchDict(moved), stream.record_event()


def _finish(copy: tuple[BatchDict, Any]) -> BatchDict:
    """Make the computing stream wait for a copy; return it."""
    batch, end = copy
    computing = torch.cuda.current_stream()
    computing.wait_event(end)
    for value in batch.values():
        if isinstance(value, Tensor):
            # The memory belongs to the copying stream, which must not reuse it before the computation has ended.
            value.record_stream(computing)
    return batch

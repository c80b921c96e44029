"""Micro-batches on the device that computes, each copied while the one before computes.

    copying stream       [0][1]       [2]         [3]
    computing stream        [--- 0 ---][--- 1 ---][--- 2 ---]

Copies start from pinned memory: from other memory the CPU would wait for every one of them. Called by `step`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from raylane.workers.batch import BatchDict

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

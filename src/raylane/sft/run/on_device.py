"""Micro-batches on the device that computes, each copied while the one before computes.

    copying stream       [0][1]       [2]         [3]
    computing stream        [--- 0 ---][--- 1 ---][--- 2 ---]

Copies start from pinned memory: from other memory the CPU would wait for every one of them. Called by `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple, TypeVar

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
    earlier: tuple[Started, Item] | None = None
    for item in items:
        started = start(item)
        if earlier is not None:
            yield finish(earlier[0]), earlier[1]
        earlier = (started, item)
    if earlier is not None:
        yield finish(earlier[0]), earlier[1]


def pinned(batch: BatchDict) -> BatchDict:
    """Return the batch in pinned memory, for copies to a GPU; tensors that are pinned already are shared."""
    return BatchDict(
        {
            name: value.pin_memory() if isinstance(value, Tensor) and not value.is_pinned() else value
            for name, value in batch.items()
        }
    )


class _Copy(NamedTuple):
    """A copy that was started, and the event at its end."""

    batch: BatchDict
    end: Any


@cache
def _copying_stream(device: torch.device) -> torch.cuda.Stream:
    # One for the whole run: torch keeps the memory of every stream apart.
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _start(part: BatchDict, device: torch.device) -> _Copy:
    """Start the copy of a micro-batch on the copying stream."""
    # torch keeps pinned memory until the copies from it have ended.
    source = pinned(part)
    stream = _copying_stream(device)
    with torch.cuda.stream(stream):
        moved = {
            name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in source.items()
        }
        return _Copy(BatchDict(moved), stream.record_event())


def _finish(copy: _Copy) -> BatchDict:
    """Make the computing stream wait for a copy; return it."""
    computing = torch.cuda.current_stream()
    computing.wait_event(copy.end)
    for value in copy.batch.values():
        if isinstance(value, Tensor):
            # The memory belongs to the copying stream, which must not reuse it before the computation has ended.
            value.record_stream(computing)
    return copy.batch

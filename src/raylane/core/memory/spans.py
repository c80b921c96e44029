"""Byte ranges in one address space, to find the leaves of a value that share memory. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """Addresses from `start` up to, but not including, `stop`."""

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.stop - self.start


def strided_span(address: int, shape: Sequence[int], strides_bytes: Sequence[int], itemsize: int) -> Span:
    """Return the span from the first to the last byte of a strided array; `address` is that of element [0, ..., 0].

    Strides may be negative or zero. An array without elements has an empty span at its address.
    """
    low = high = address
    for size, stride in zip(shape, strides_bytes, strict=True):
        if size == 0:
            return Span(address, address)
        # A negative stride leads to addresses below the first element.
        reach = (size - 1) * stride
        low, high = (low + reach, high) if reach < 0 else (low, high + reach)
    return Span(low, high + itemsize)


def merge(spans: Sequence[Span]) -> tuple[list[Span], list[int]]:
    """Join overlapping spans.

    Returns the joined spans in address order, and for each given span the index of the joined span that contains it
    (-1 for an empty span). Adjacent spans stay separate, because they share no memory.
    """
    order = sorted((i for i, span in enumerate(spans) if span.nbytes), key=lambda i: spans[i])
    # In ascending order of their starts, so a span can overlap only the last one of the joined spans.
    merged: list[Span] = []
    home = [-1] * len(spans)
    for i in order:
        span = spans[i]
        if merged and span.start < merged[-1].stop:
            merged[-1] = Span(merged[-1].start, max(merged[-1].stop, span.stop))
        else:
            merged.append(span)
        home[i] = len(merged) - 1
    return merged, home

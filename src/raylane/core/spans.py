"""Byte ranges in one address space: which leaves of a value share memory, and what has to move for them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """`start <= address < stop`, in bytes."""

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def strided_span(address: int, shape: Sequence[int], strides_bytes: Sequence[int], itemsize: int) -> Span:
    """The bytes that a strided array touches, first to last; `address` is that of element [0, ..., 0].

    Strides may be negative or zero. An array without elements touches nothing: an empty span at its address.
    """
    low = high = address
    for size, stride in zip(shape, strides_bytes, strict=True):
        if size == 0:
            return Span(address, address)
        reach = (size - 1) * stride
        low, high = (low + reach, high) if reach < 0 else (low, high + reach)
    return Span(low, high + itemsize)


def merge(spans: Sequence[Span]) -> tuple[list[Span], list[int]]:
    """Join spans that overlap. Returns the joined spans in address order, and for each given span the index of the one
    that holds it (-1 for an empty span). Spans that only touch stay apart: nothing is shared between them."""
    order = sorted((i for i, span in enumerate(spans) if span.nbytes), key=lambda i: spans[i])
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

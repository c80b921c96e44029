"""Reception of leaves: the parts of their memory that must come, where each goes, and what is left to do then.

Bytes go straight to their final place where the layouts allow it (`parts`); everything else is received into pooled
memory first and copied by torch or NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from raylane.core.deadline import Deadline
from raylane.core.memory.layout import address_of
from raylane.core.memory.receive_pool import BufferPool
from raylane.transport.read.deliver import PLAIN_TENSORS, copy_into
from raylane.transport.value import codec
from raylane.transport.value.layout import LeafSpec, itemsize_of
from raylane.transport.value.leaf_memory import leaf_address, strides_bytes
from raylane.transport.value.parts import Part, contiguous_strides, parts_of, size_of, span_of

WIDE_FACTOR = 2
"""Ratio of span to elements above which a slice is not received with the bytes between its elements."""


@dataclass(eq=False, slots=True)
class _Landing:
    """One leaf on its way: its parts, and what is left to do when they have arrived."""

    parts: list[Part]
    finish: Callable[[], Any]
    """Returns the leaf; called after the parts have arrived."""


def receive(
    specs: Sequence[LeafSpec],
    targets: Sequence[Any],
    pool: BufferPool,
    fetch: Callable[[list[Part]], None],
    deadline: Deadline,
) -> list[Any]:
    """Return leaves of these layouts, in their targets or in pooled memory; `fetch` moves the parts and may raise.

    The specs describe whole leaves or slices of them. The targets were checked (`check_target`); they are written by
    `fetch`, and within `deadline.writing()`.
    """
    landings = [_land(spec, target, pool) for spec, target in zip(specs, targets, strict=True)]
    fetch([part for landing in landings for part in landing.parts])
    with deadline.writing():
        return [landing.finish() for landing in landings]


def _land(spec: LeafSpec, target: Any, pool: BufferPool) -> _Landing:
    itemsize = itemsize_of(spec)
    # Of a tensor, these two bits mean that memory holds other values.
    plain = (
        type(target) in PLAIN_TENSORS and target.device.type == "cpu" and not target.is_conj() and not target.is_neg()
    )
    if plain or isinstance(target, np.ndarray):
        parts = parts_of(spec, itemsize, leaf_address(target), strides_bytes(target))
        if parts is not None:

            def written() -> Any:
                # Tells autograd that a tensor was written to behind its back.
                if isinstance(target, torch.Tensor) and not target.is_inference():
                    torch.autograd.graph.increment_version(target)
                return target

            return _Landing(parts, written)
    if spec.block < 0:
        return _Landing([], lambda: _fill(target, codec.build_leaves([spec], [])[0]))
    span = span_of(spec, itemsize)
    if target is None and span.nbytes > WIDE_FACTOR * size_of(spec, itemsize):
        dense = msgspec.structs.replace(spec, block=0, offset=0, strides=contiguous_strides(spec.shape, itemsize))
        buffer = pool.take(size_of(spec, itemsize))
        parts = parts_of(spec, itemsize, address_of(buffer), dense.strides)
        if parts is not None:
            return _Landing(parts, lambda: codec.build_leaves([dense], [buffer])[0])
    staging = pool.take(span.nbytes)
    moved = msgspec.structs.replace(spec, block=0, offset=spec.offset - span.start)
    part = Part(spec.block, span.start, span.nbytes, address_of(staging))
    return _Landing([part], lambda: _fill(target, codec.build_leaves([moved], [staging])[0]))


def _fill(target: Any, leaf: Any) -> Any:
    """Return a target with the content of a leaf; the leaf itself if there is no target."""
    return leaf if target is None else copy_into(target, leaf)

"""The buffers of one transfer through a channel, in the source and in the reader, with the owners of their memory.

Small blocks of a value lie in one shared buffer on both sides, at the same offsets. So a thousand small tensors are one
piece, which arrives as one message and needs one registration with a network card.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from raylane.core.segment import BufferPool, address_of, bytes_at, mapping_of, small_blocks
from raylane.core.spans import Span
from raylane.transport.store import Entry

__all__ = ["Memory", "Piece", "pieces_of_entry", "pieces_of_target"]


@dataclass(frozen=True, slots=True)
class Memory:
    """A block of memory, and the object with whose life the memory ends."""

    owner: Any
    """Object that can be weakly referenced; None if there is none."""
    whole: Span
    """Memory of the owner as it is now."""
    block: Span


class Piece(NamedTuple):
    """Bytes that travel together."""

    buffer: Any
    """Writable buffer. The source passes the bytes of a value in the producer's own memory only to system calls."""
    memory: Memory


def pieces_of_entry(entry: Entry, pool: BufferPool) -> list[Piece] | None:
    """Return the pieces of a published value; None if the owner has freed the memory.

    The small blocks are copied into a buffer of the pool.
    """
    # For a value in the producer's own memory, these are addresses that may be unmapped already: not read here.
    views = entry.views()
    offsets, total = small_blocks([view.nbytes for view, _ in views])
    pieces: list[Piece] = []
    if total:
        shared = pool.take(total)
        parts = [(ctypes.c_char * views[i][0].nbytes).from_buffer(shared, start) for i, start in offsets.items()]
        if not entry.copy_to(parts, list(offsets)):
            return None
        pieces.append(Piece(shared, _in_pool(shared, Span(address_of(shared), address_of(shared) + total))))
    # A block may hold several leaves; any of them keeps the memory alive, and one is enough.
    leaf_of = {spec.block: leaf for spec, leaf in zip(entry.layout.specs, entry.layout.held, strict=False)}
    for i, (view, array) in enumerate(views):
        if i in offsets or not view.nbytes:
            continue
        start = ctypes.addressof(ctypes.c_char.from_buffer(view))
        span = Span(start, start + view.nbytes)
        pieces.append(Piece(view, Memory(array, span, span) if entry.segment >= 0 else _of_leaf(leaf_of[i], span)))
    return pieces


def pieces_of_target(blocks: Sequence[Any], sizes: Sequence[int]) -> list[Piece]:
    """Return the pieces of the memory for a value: ctypes arrays as `backends.base.allocate` makes them."""
    offsets, total = small_blocks(sizes)
    large = [(memoryview(block).cast("B"), block) for i, block in enumerate(blocks) if i not in offsets]
    if total:
        # The parts of the shared buffer begin at the first small block (`small_blocks`).
        first = blocks[min(offsets)]
        large.insert(0, (bytes_at(address_of(first), total), first))
    return [
        Piece(view, _in_pool(block, Span(address_of(block), address_of(block) + view.nbytes))) for view, block in large
    ]


def _in_pool(array: Any, block: Span) -> Memory:
    mapping = mapping_of(array)
    if mapping is None:  # memory of the user's own tensors
        return Memory(None, block, block)
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    return Memory(mapping, Span(start, start + len(mapping)), block)


def _of_leaf(leaf: Any, block: Span) -> Memory:
    """Return the memory of a block that lies in a tensor or an array (see `store.Entry.leaves`)."""
    if hasattr(leaf, "untyped_storage"):
        # torch keeps one Python object for each storage, so it can stand for the memory.
        storage = leaf.untyped_storage()
        start = storage.data_ptr()
        return Memory(storage, Span(start, start + storage.nbytes()), block)
    # The last array of the chain owns the memory, or borrows it from an object that need not be weakly referenceable.
    while isinstance(leaf.base, type(leaf)):
        leaf = leaf.base
    return Memory(leaf, block, block)

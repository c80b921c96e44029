"""Values of a queue as bytes in shared memory: written by producers, read by consumers.

    block    one segment; its first page has the segment's key, then items follow each other
    item     header | sizes of the buffers | body | buffers, each aligned to 64 bytes

Bodies and buffers are those of the messages of graphs (`graph.values.message`). Called by `handle`; knows nothing of
Ray.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from raylane.core.deadline import Deadline
from raylane.core.memory.layout import BLOCK_ALIGNMENT, size_class
from raylane.core.memory.segment import Segment
from raylane.graph.values.message import Encoder, Message, decode

PAGE_BYTES = 4096
LEAST_BLOCK_BYTES = 1 << 20
MOST_BLOCKS = 64
"""Number of blocks that fill a queue, if no item is larger than a block."""
IDLE_S = 0.5
"""Seconds for which a free block beyond the limit is kept.

Pages of a new one cost several times the copy of an item, and the parts of the producers change all the time.
"""
_HEADER = struct.Struct("<BxxxIQ")
"""Kind of the message, number of buffers, size of the body."""
_SIZE = struct.Struct("<Q")


def block_bytes(max_bytes: int) -> int:
    """Return the size of the blocks of a queue of so many bytes."""
    return max(LEAST_BLOCK_BYTES, size_class(max_bytes // MOST_BLOCKS))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT


def _encoded_bytes(message: Message, sizes: list[int]) -> int:
    """Return the bytes of an item in a block."""
    head = _aligned(_HEADER.size + len(sizes) * _SIZE.size + len(message.body))
    return head + sum(_aligned(size) for size in sizes)


def _write(message: Message, buffers: list[memoryview], target: memoryview) -> None:
    sizes = [buffer.nbytes for buffer in buffers]
    _HEADER.pack_into(target, 0, message.kind, len(sizes), len(message.body))
    at = _HEADER.size
    struct.pack_into(f"<{len(sizes)}Q", target, at, *sizes)
    at += len(sizes) * _SIZE.size
    target[at : at + len(message.body)] = message.body
    at = _aligned(at + len(message.body))
    for buffer in buffers:
        target[at : at + buffer.nbytes] = buffer
        at = _aligned(at + buffer.nbytes)


def read_item(memory: memoryview) -> Any:
    """Return the value of an item, whose tensors and arrays use `memory` and keep it alive."""
    kind, count, body_bytes = _HEADER.unpack_from(memory, 0)
    at = _HEADER.size
    sizes = struct.unpack_from(f"<{count}Q", memory, at)
    at += count * _SIZE.size
    body = memory[at : at + body_bytes]
    at = _aligned(at + body_bytes)
    buffers = []
    for size in sizes:
        buffers.append(memory[at : at + size])
        at = _aligned(at + size)
    return decode(kind, body, buffers)


class WrittenItem(NamedTuple):
    """Place of an item that was written."""

    block: int
    offset: int
    nbytes: int


@dataclass
class _WriteBlock:
    segment: Segment
    path: str
    """Path by which its host holds it."""
    end: int = PAGE_BYTES
    """Offset of its free part."""
    free_since: float | None = None
    """Time from which on nothing in it is needed; None if something is."""


@dataclass
class BlockWriter:
    """Blocks of one producer. For one thread at a time."""

    nbytes: int
    """Size of a block; an item that is larger gets a block of its own."""
    limit: int
    """Bytes of all blocks above which free ones are given up, when they were free for IDLE_S."""
    hold: Callable[[str, Deadline], str]
    """Lets the host hold a segment of this process; returns its path there. The memory then outlives this process."""
    forget: Callable[[list[str]], object]
    """Lets the host give segments up."""
    clock: Callable[[], float] = time.monotonic
    blocks: dict[int, _WriteBlock] = field(default_factory=dict)
    full: list[int] = field(default_factory=list)
    """Blocks that were filled since the last call of `take_full`."""
    _current: int | None = None
    _numbers: int = 0
    _encoder: Encoder = field(default_factory=Encoder)

    def write(self, value: Any, deadline: Deadline) -> WrittenItem:
        """Write a value. GraphValueError if it cannot be pickled, OSError if there is no memory for it.

        Waits for the host, if a new block is needed.
        """
        message = self._encoder.encode(value)
        buffers = [memoryview(buffer).cast("B") for buffer in message.buffers]
        nbytes = _encoded_bytes(message, [buffer.nbytes for buffer in buffers])
        number = self._block_for(nbytes, deadline)
        block = self.blocks[number]
        offset, block.end = block.end, block.end + nbytes
        _write(message, buffers, block.segment.view[offset : offset + nbytes])
        return WrittenItem(number, offset, nbytes)

    def take_full(self) -> list[int]:
        """Return the blocks that were filled since the last call."""
        full, self.full = self.full, []
        return full

    def release(self, numbers: list[int], limit: int) -> None:
        """Note blocks whose items have all ended, and the new limit."""
        now = self.clock()
        for number in numbers:
            self.blocks[number].free_since = now
            self.blocks[number].end = PAGE_BYTES
        self.limit = limit
        self._give_up_free(limit, now - IDLE_S)

    def _block_for(self, nbytes: int, deadline: Deadline) -> int:
        """Return a block with room for an item."""
        # Items follow each other without gaps but those of alignment; a block is left when the next item does not fit.
        if self._current is not None:
            block = self.blocks[self._current]
            if block.end + nbytes <= block.segment.nbytes:
                return self._current
            self.full.append(self._current)
            self._current = None
        # Classes of sizes, so that the block of a large item fits the next one of about the same size.
        size = max(self.nbytes, size_class(nbytes + PAGE_BYTES))
        fitting = [
            at for at, block in self.blocks.items() if block.free_since is not None and block.segment.nbytes == size
        ]
        number = fitting[-1] if fitting else self._new_block(size, deadline)
        self.blocks[number].free_since = None
        self._current = number
        return number

    def _new_block(self, size: int, deadline: Deadline) -> int:
        self._give_up_free(self.limit - size, math.inf)
        # Pages take memory when they are touched, so a block that is hardly used costs little.
        segment = Segment.make(size)
        try:
            path = self.hold(segment.path, deadline)
        finally:
            segment.close_fd()  # the host has a descriptor of its own
        self._numbers += 1
        self.blocks[self._numbers] = _WriteBlock(segment, path)
        return self._numbers

    def _give_up_free(self, limit: int, since: float) -> None:
        """Give up blocks that are free since this time or longer, until all blocks have `limit` bytes at most."""
        # The oldest first: the youngest are those that are used again.
        free = [at for at, block in self.blocks.items() if block.free_since is not None and block.free_since <= since]
        while free and sum(block.segment.nbytes for block in self.blocks.values()) > limit:
            self.forget([self.blocks.pop(free.pop(0)).path])

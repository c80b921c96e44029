"""The buffers of one transfer through a channel, in the source and in the reader, with the owners of their memory.

Small blocks of a value lie in one shared buffer on both sides, at the same offsets. So a thousand small tensors are one
piece, which arrives as one message and needs one registration with a network card. Blocks in the memory of devices
follow those of the host, for channels that take them (`device_memory.groups_of`); for others they are copied to the
host.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from raylane.core.memory.layout import address_of, bytes_at, small_blocks
from raylane.core.memory.receive_pool import BufferPool, mapping_of
from raylane.core.memory.spans import Span
from raylane.core.process import vm
from raylane.transport.hold.store import Entry
from raylane.transport.link.connection import Connection

_CHUNK_BYTES = 1 << 20

HOST = -1
"""Number of the host in place of a device's."""


@dataclass(frozen=True, slots=True)
class OwnedMemory:
    """A block of memory, and the object with whose life the memory ends."""

    owner: Any
    """Object that can be weakly referenced; None if there is none."""
    whole: Span
    """Memory of the owner as it is now."""
    block: Span
    device: int = HOST
    """Number of the CUDA device of this process that has the memory."""


class Piece(NamedTuple):
    """Bytes that travel together."""

    buffer: Any
    """Writable buffer, or a tensor of bytes on a device.

    The source passes the bytes of a value in the producer's own memory in the host only to system calls.
    """
    memory: OwnedMemory

    @property
    def on_device(self) -> bool:
        """True for a tensor of bytes on a device."""
        return self.memory.device != HOST


def pieces_of_entry(entry: Entry, pool: BufferPool, *, on_device: bool) -> list[Piece] | None:
    """Return the pieces of a published value; None if the owner has freed the memory.

    The small blocks are copied into a buffer of the pool. With `on_device`, blocks in the memory of devices are pieces
    there. Waits for the producer's kernels, and for copies.
    """
    devices = entry.on_device if on_device else None
    host = [i for i in range(len(entry.layout.blocks)) if devices is None or i not in devices.devices]
    # For a value in the producer's own memory, these are addresses that may be unmapped already: not read here.
    views = entry.views(host)
    offsets, total = small_blocks([view.nbytes for view, _ in views])
    pieces: list[Piece] = []
    if total:
        shared = pool.take(total)
        parts = [(ctypes.c_char * views[k][0].nbytes).from_buffer(shared, start) for k, start in offsets.items()]
        if not entry.copy_to(parts, [host[k] for k in offsets]):
            return None
        pieces.append(Piece(shared, _in_pool(shared, Span(address_of(shared), address_of(shared) + total))))
    # A block may hold several leaves; any of them keeps the memory alive, and one is enough.
    leaf_of = {spec.block: leaf for spec, leaf in zip(entry.layout.specs, entry.layout.held, strict=False)}
    for k, (view, keeper) in enumerate(views):
        if k in offsets or not view.nbytes:
            continue
        start = ctypes.addressof(ctypes.c_char.from_buffer(view))
        span = Span(start, start + view.nbytes)
        # Bytes that the entry itself keeps are those of a leaf; a snapshot and a copy have an owner of their own.
        memory = _of_leaf(leaf_of[host[k]], span) if keeper is entry else OwnedMemory(keeper, span, span)
        pieces.append(Piece(view, memory))
    if devices is not None:
        devices.wait()
        if not entry.is_intact():
            return None
        pieces += [_of_tensor(group) for group in devices.pieces()]
    return pieces


def pieces_of_target(blocks: Sequence[Any], sizes: Sequence[int], devices: Mapping[int, int]) -> list[Piece]:
    """Return the pieces of the memory for a value, as `backends.base.allocate` makes it.

    `devices` has the blocks that are on a device in the source; empty for a channel that takes none.
    """
    host = [i for i in range(len(sizes)) if i not in devices]
    offsets, total = small_blocks([sizes[i] for i in host])
    large = [(memoryview(blocks[i]).cast("B"), blocks[i]) for k, i in enumerate(host) if k not in offsets]
    if total:
        # The parts of the shared buffer begin at the first small block (`small_blocks`).
        first = blocks[host[min(offsets)]]
        large.insert(0, (bytes_at(address_of(first), total), first))
    pieces = [
        Piece(view, _in_pool(block, Span(address_of(block), address_of(block) + view.nbytes))) for view, block in large
    ]
    if devices:
        from raylane.transport.hold.device_memory import groups_of, whole

        pieces += [_of_tensor(whole(blocks[group.numbers[0]])) for group in groups_of(devices, sizes)]
    return pieces


def _in_pool(array: Any, block: Span) -> OwnedMemory:
    mapping = mapping_of(array)
    if mapping is None:  # memory of the user's own tensors
        return OwnedMemory(None, block, block)
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    return OwnedMemory(mapping, Span(start, start + len(mapping)), block)


def _of_leaf(leaf: Any, block: Span) -> OwnedMemory:
    """Return the memory of a block that lies in a tensor or an array (see `store.Entry.leaves`)."""
    if hasattr(leaf, "untyped_storage"):
        # torch keeps one Python object for each storage, so it can stand for the memory.
        storage = leaf.untyped_storage()
        start = storage.data_ptr()
        return OwnedMemory(storage, Span(start, start + storage.nbytes()), block)
    # The last array of the chain owns the memory, or borrows it from an object that need not be weakly referenceable.
    while isinstance(leaf.base, type(leaf)):
        leaf = leaf.base
    return OwnedMemory(leaf, block, block)


def _of_tensor(tensor: Any) -> Piece:
    """Return the piece of a tensor of bytes: on a device, or in a reader that has none, in the host."""
    memory = _of_leaf(tensor, Span(tensor.data_ptr(), tensor.data_ptr() + tensor.numel()))
    return Piece(tensor, dataclasses.replace(memory, device=tensor.get_device()))


def send_host_pieces(connection: Connection, pieces: Sequence[Piece]) -> None:
    """Send the bytes of the pieces in host memory over a connection."""
    buffer = (ctypes.c_char * _CHUNK_BYTES)()
    for piece in pieces:
        if piece.on_device:
            continue
        block = piece.memory.block
        for start in range(block.start, block.stop, _CHUNK_BYTES):
            nbytes = min(_CHUNK_BYTES, block.stop - start)
            # By the kernel: the owner can unmap the memory at any time.
            vm.read(os.getpid(), [(start, address_of(buffer), nbytes)])
            connection.send_bytes(memoryview(buffer).cast("B")[:nbytes])


def receive_host_pieces(connection: Connection, pieces: Sequence[Piece]) -> None:
    """Receive what `send_host_pieces` sends."""
    blocks = [piece.memory.block for piece in pieces if not piece.on_device]
    connection.receive_into([bytes_at(block.start, block.nbytes) for block in blocks])

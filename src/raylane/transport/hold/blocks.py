"""Memory for the blocks of a value that is received, and copies between such blocks."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from raylane.core.deadline import Deadline
from raylane.core.memory.layout import bytes_at, small_blocks
from raylane.core.memory.receive_pool import BufferPool
from raylane.core.process.gc_pauses import paused
from raylane.errors import TransportError
from raylane.transport.value.parts import Part
from raylane.transport.value.ticket import Ticket, receive_error


def allocate(ticket: Ticket, pool: BufferPool, *, on_device: bool = False) -> list[Any]:
    """Return pooled memory for every block: a buffer of its own for a large block, one shared buffer for small ones.

    With `on_device`, blocks that are on a device in the source get memory of this process's devices.
    TransportError if this process has no more memory.
    """
    try:
        sizes = [block.nbytes for block in ticket.blocks]
        return take_blocks(sizes, pool, ticket.devices if on_device else {})
    except RuntimeError as error:  # also torch.OutOfMemoryError
        raise TransportError(
            f"this process cannot take in {ticket.nbytes} bytes from {ticket.origin()}: {error}. Free memory of the "
            "device, or read with raylane.get(ref, device='cpu')",
            source=ticket.origin().label,
        ) from error
    except OSError as error:
        raise receive_error(ticket, error) from error


def take_blocks(sizes: Sequence[int], pool: BufferPool, devices: Mapping[int, int]) -> list[Any]:
    """Return memory for blocks of these sizes, from a pool, or on the devices of those in `devices`; as `allocate`.

    OSError or RuntimeError if there is none.
    """
    blocks: dict[int, Any] = {}
    if devices:
        from raylane.transport.hold.device_memory import groups_of, new_blocks

        blocks = dict(new_blocks(groups_of(devices, sizes)))
    host = [i for i in range(len(sizes)) if i not in blocks]
    offsets, total = small_blocks([sizes[i] for i in host])
    shared: Any = pool.take(total) if total else None
    with paused(len(host)):
        for k, i in enumerate(host):
            if k in offsets:
                blocks[i] = (ctypes.c_char * sizes[i]).from_buffer(shared, offsets[k])
            else:
                blocks[i] = pool.take(sizes[i])
        return [blocks[i] for i in range(len(sizes))]


def host_view(block: Any) -> memoryview:
    """Return the bytes of a received block; one on a device is copied to the host."""
    return memoryview(block.cpu().numpy() if hasattr(block, "cpu") else block).cast("B")


def copy_parts(parts: Sequence[Part], blocks: Sequence[Any], deadline: Deadline) -> None:
    """Copy parts of these blocks to their addresses, unless the call to which the deadline belongs has ended."""
    views = [host_view(block) for block in blocks]
    with deadline.writing():
        for part in parts:
            bytes_at(part.address, part.nbytes)[:] = views[part.block][part.offset : part.offset + part.nbytes]


def copy_to_pool(ticket: Ticket, pool: BufferPool, sources: Sequence[Any]) -> list[Any]:
    """Return blocks in pooled memory with a copy of these buffers, such as the read-only ones of Ray's object store."""
    blocks = allocate(ticket, pool)
    for target, source in zip(blocks, sources, strict=True):
        memoryview(target).cast("B")[:] = memoryview(source).cast("B")
    return blocks

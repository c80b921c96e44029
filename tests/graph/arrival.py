"""The other end of an edge, without one."""

from __future__ import annotations

from typing import Any

from raylane.graph.values.message import Message, decode


def arrive(message: Message, *, shared: bool = False) -> Any:
    """As at the other end: bytes that nobody else holds, or that others see too."""
    buffers: list[Any] = [bytearray(memoryview(buffer).cast("B")) for buffer in message.buffers]
    if shared:
        buffers = [memoryview(buffer).toreadonly() for buffer in buffers]
    return decode(message.kind, bytes(message.body), buffers, shared=shared)

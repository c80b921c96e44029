"""Publication of values for the edges of compiled graphs: private copies in memory that is used again and again.

    leaves of a message ── copied ──> stage of the message's slot ── published ──> ticket

The sender of a message may change its tensors as soon as it has sent them, so an edge copies them. A stage keeps the
memory of the copy for the next message of the same slot: page faults cost more than copying, and a registration with a
network card (NIXL) lasts as long as its memory. Called by `graph.channels.published`, which knows when a slot is free.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from raylane.core.deadline import Deadline
from raylane.core.memory.layout import bytes_at
from raylane.core.process import copying
from raylane.transport.backends.base import AUTO
from raylane.transport.backends.registry import backends, find
from raylane.transport.hold.blocks import take_blocks
from raylane.transport.hold.device_memory import OnDevice, as_here
from raylane.transport.hold.store import Store
from raylane.transport.link.endpoint import Endpoint, endpoint
from raylane.transport.link.tls import cleartext_refusal
from raylane.transport.produce.options import PublishOptions
from raylane.transport.produce.publication import INLINE_BYTES, Publication, stays_on_device, store_leaves
from raylane.transport.read.redeem import redeem_leaves
from raylane.transport.value import codec
from raylane.transport.value.layout import ARRAY, Layout, itemsize_of
from raylane.transport.value.ticket import decode_ticket, encode_ticket

LARGE_ON_GPU_BYTES = 8 << 20
"""Size from which CUDA tensors go from device to device where an edge has the choice.

On an H200 an edge took 2.0 ms for 4 MB through host memory and 2.7 by CUDA IPC, 4.4 and 2.6 for 16 MB, 86 and 2.7 for
100 MB (2026-11-27).
"""


def check_available(transport: str) -> str | None:
    """Return why this process cannot take part in transfers by a transport, or None if it can; waits for nothing."""
    backend = find(transport)
    if backend is None:
        return "it is not installed in this process"
    if (reason := backend.missing()) is not None:
        return reason
    return cleartext_refusal(transport) if backend.capability.in_the_clear else None


def worth_publishing(leaves: Sequence[Any], transport: str) -> bool:
    """Return True if leaves shall travel by direct transport, and not inside the message.

    With `auto`, only if those on GPUs are so large that host memory is the longer way.
    """
    if transport == AUTO:
        return sum(int(leaf.nbytes) for leaf in leaves if _on_gpu(leaf)) >= LARGE_ON_GPU_BYTES
    if backends()[transport].capability.needs_device and not any(map(_on_gpu, leaves)):
        return False
    return sum(int(leaf.nbytes) for leaf in leaves) > INLINE_BYTES


def is_cpu_tensor(value: Any) -> bool:
    """Return True for a tensor in host memory; quicker than to split a value."""
    return isinstance(value, torch.Tensor) and value.is_cpu


def fetch(payload: bytes, transport: str, deadline: Deadline, notify: Callable[[], None]) -> Future[list[Any]]:
    """Fetch the leaves of a ticket on a thread of the endpoint, and call `notify` at the end. Does not wait.

    ValueError if the payload is no ticket of this version.
    """
    ticket = decode_ticket(payload)
    future = endpoint().fetchers.submit(as_here(functools.partial(redeem_leaves, ticket, transport, deadline)))
    future.add_done_callback(lambda _: notify())
    return future


def _on_gpu(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not leaf.is_cpu


class _StageCopies(NamedTuple):
    """Memory of a stage."""

    shape: Any
    """Layout of the leaves for which the memory was taken."""
    blocks: list[Any]
    leaves: list[Any] | None
    """Copies of the leaves, in their order, in these blocks; None if some leaves cannot lie in their blocks."""


class EdgeStage:
    """Memory of one slot of an edge, and the value that is published from it. Used by one thread at a time.

    `abandon` alone may be called from any thread.
    """

    __slots__ = ("_copies", "_keys", "_store")

    def __init__(self) -> None:
        self._store: Store | None = None
        self._keys: list[bytes] = []
        """Key of the published value; empty if there is none."""
        self._copies: _StageCopies | None = None

    def publish(self, leaves: Sequence[Any], transport: str, origin: str) -> tuple[bytes, int]:
        """Copy leaves, publish the copies, and return the encoded ticket and the number of bytes.

        Frees the value that was published before: all its readers must be done. Does not wait for the budget of
        this process, because nothing else would free the slots.
        """
        self.free()
        process, began_ns = endpoint(), time.perf_counter_ns()
        # "allow": no code but this class writes to the copies, so there is nothing to look for.
        options = PublishOptions(tensor_transport=transport, on_mutation="allow")
        copied = self._copied(process, leaves)
        layout = codec.plan_layout(copied, in_place=stays_on_device(copied, options))
        publication = Publication(options, anchored=False, origin=origin)
        ticket = store_leaves(process, copied, layout, publication)
        self._store, self._keys = process.store, publication.keys
        process.recorder.published(origin, ticket.nbytes, began_ns)
        return encode_ticket(ticket), ticket.nbytes

    def free(self) -> None:
        """Free the published value, if there is one; keep the memory for the next."""
        keys, self._keys = self._keys, []
        if keys and self._store is not None:
            self._store.free(keys)

    def abandon(self) -> None:
        """Free the published value and drop the memory; for a finalizer, so it never waits for a lock."""
        keys, self._keys = self._keys, []
        if keys and self._store is not None:
            self._store.free_soon(keys)
        self._copies = None

    def _copied(self, process: Endpoint, leaves: Sequence[Any]) -> list[Any]:
        """Return copies of leaves in the memory of this stage, which is taken anew if the layout is another one."""
        layout, on_device = _in_place(leaves)
        sizes = [block.nbytes for block in layout.blocks]
        shape = layout.specs, sizes, layout.devices
        copies = self._copies
        if copies is None or copies.shape != shape:
            self._copies = copies = None  # before new memory is taken: the old one may serve
            blocks = take_blocks(sizes, process.pool, layout.devices)
            tensors = [spec for spec in layout.specs if spec.kind != ARRAY and spec.block >= 0]
            # torch has no tensors at odd addresses: those are no views of their blocks.
            aligned = all(spec.offset % itemsize_of(spec) == 0 for spec in tensors)
            copies = _StageCopies(shape, blocks, codec.build_leaves(layout.specs, blocks) if aligned else None)
        for number, (target, block) in enumerate(zip(copies.blocks, layout.blocks, strict=True)):
            if number in layout.devices:
                target.copy_(on_device[number])  # on the current stream, after the kernels that wrote the tensor
            else:
                copying.copy(memoryview(target).cast("B"), bytes_at(block.start, block.nbytes))
        self._copies = copies
        # A leaf that cannot lie in its block is a copy of what is in the block now.
        return codec.build_leaves(layout.specs, copies.blocks) if copies.leaves is None else copies.leaves


def _in_place(leaves: Sequence[Any]) -> tuple[Layout, dict[int, torch.Tensor]]:
    """Return the layout of leaves in their own memory, and the bytes of the blocks on devices."""
    layout = codec.plan_layout(leaves, in_place=True)
    if not layout.devices:
        return layout, {}
    try:
        return layout, OnDevice(layout).blocks
    except ValueError:  # memory that torch did not allocate, seen through several storages
        layout = codec.plan_layout([leaf.clone() if _on_gpu(leaf) else leaf for leaf in leaves], in_place=True)
        return layout, OnDevice(layout).blocks

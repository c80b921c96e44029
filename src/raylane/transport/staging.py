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
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter

from raylane.core import copying
from raylane.core.deadline import Deadline
from raylane.core.segment import bytes_at
from raylane.transport import codec, nixl_agent
from raylane.transport.backends.base import take_blocks
from raylane.transport.backends.registry import adopt
from raylane.transport.endpoint import Endpoint, endpoint
from raylane.transport.options import PublishOptions
from raylane.transport.publish import INLINE_BYTES, Publication, store_leaves
from raylane.transport.redeem import redeem_leaves
from raylane.transport.store import Store
from raylane.transport.ticket import decode_ticket, encode_ticket
from raylane.transport.tls import cleartext_refusal

__all__ = ["Stage", "check_available", "fetch", "worth_publishing"]

FOR_GPUS = ("nccl", "cuda_ipc")
"""Transports that move CUDA tensors only."""
IN_THE_CLEAR = ("gloo", "nixl", "nccl")
"""Transports that send bytes over connections of their own, which nobody encrypts."""


def check_available(transport: str) -> str | None:
    """Return why this process cannot take part in transfers by a transport, or None if it can; waits for nothing."""
    if not adopt(transport):
        return "it is not installed in this process"
    if transport == "nixl" and (why := nixl_agent.missing()) is not None:
        return why
    if transport == "gloo" and not dist.is_gloo_available():
        return "this torch is built without gloo. Use 'auto'"
    if transport in FOR_GPUS and not torch.cuda.is_available():
        return "this process sees no GPU. Give the actor one (num_gpus=1), or use 'auto'"
    return cleartext_refusal(transport) if transport in IN_THE_CLEAR else None


def worth_publishing(leaves: Sequence[Any], transport: str) -> bool:
    """Return True if leaves shall travel by a transport of their own, and not inside the message."""
    if transport in FOR_GPUS and not any(map(_on_gpu, leaves)):
        return False
    return sum(int(leaf.nbytes) for leaf in leaves) > INLINE_BYTES


def fetch(payload: bytes, transport: str, deadline: Deadline, notify: Callable[[], None]) -> Future[list[Any]]:
    """Fetch the leaves of a ticket on a thread of the endpoint, and call `notify` at the end. Does not wait.

    ValueError if the payload is no ticket of this version.
    """
    ticket = decode_ticket(payload)
    future = endpoint().fetchers.submit(functools.partial(redeem_leaves, ticket, transport, deadline))
    future.add_done_callback(lambda _: notify())
    return future


def _on_gpu(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not leaf.is_cpu


class Stage:
    """Memory of one slot of an edge, and the value that is published from it. Used by one thread at a time."""

    __slots__ = ("_blocks", "_key", "_layout", "_leaves", "_shape", "_store")

    def __init__(self) -> None:
        self._store: Store | None = None
        self._key: list[bytes] = []
        """Key of the published value; empty if there is none."""
        self._shape: Any = None
        """Layout of the leaves for which the memory was taken."""
        self._blocks: list[Any] = []
        """Memory for the leaves of the host."""
        self._leaves: list[Any] = []
        """Copies of the leaves, in their order."""
        self._layout: codec.Layout | None = None

    def publish(self, leaves: Sequence[Any], transport: str, origin: str) -> tuple[bytes, int]:
        """Copy leaves, publish the copies, and return the encoded ticket and the number of bytes.

        Frees the value that was published before: all its readers must be done. Does not wait for the budget of
        this process, because nothing else would free the slots.
        """
        self.free()
        here, began_ns = endpoint(), time.perf_counter_ns()
        layout = self._copy(here, leaves)
        # "allow": no code but this class writes to the copies, so there is nothing to look for.
        options = PublishOptions(tensor_transport=transport, on_mutation="allow")
        publication = Publication(options, anchored=False, origin=origin)
        ticket = store_leaves(here, self._leaves, layout, publication)
        self._store, self._key = here.store, publication.keys
        here.recorder.published(origin, ticket.nbytes, began_ns)
        return encode_ticket(ticket), ticket.nbytes

    def free(self) -> None:
        """Free the published value, if there is one; keep the memory for the next."""
        keys, self._key = self._key, []
        if keys and self._store is not None:
            self._store.free(keys)

    def abandon(self) -> None:
        """Free the published value and drop the memory; for a finalizer, so it never waits for a lock."""
        keys, self._key = self._key, []
        if keys and self._store is not None:
            self._store.free_soon(keys)
        self._shape, self._blocks, self._leaves, self._layout = None, [], [], None

    def _copy(self, here: Endpoint, leaves: Sequence[Any]) -> codec.Layout:
        """Copy leaves into the memory of this stage; take new memory if the layout differs from the last one."""
        # CUDA tensors stay on their device, so they are no part of the layout in host memory.
        on_gpu = [leaf for leaf in leaves if _on_gpu(leaf)]
        given = codec.plan_layout([leaf for leaf in leaves if not _on_gpu(leaf)])
        shape = [_on_gpu(leaf) for leaf in leaves], given.specs, [codec.spec_of(leaf, leaf, -1, 0) for leaf in on_gpu]
        sizes = [block.nbytes for block in given.blocks]
        if self._layout is None or shape != self._shape or sizes != [len(block) for block in self._blocks]:
            self._shape = self._layout = None
            self._leaves = []  # before new memory is taken: the old one may serve
            self._blocks = []
            self._blocks = take_blocks(sizes, here.pool)
            host = iter(codec.build_leaves(given.specs, self._blocks))
            self._leaves = [_empty_like(leaf) if _on_gpu(leaf) else next(host) for leaf in leaves]
            self._layout = codec.plan_layout(self._leaves)
            self._shape = shape
        for target, block in zip(self._blocks, given.blocks, strict=True):
            copying.copy(memoryview(target).cast("B"), bytes_at(block.start, block.nbytes))
        for mine, leaf in zip(self._leaves, leaves, strict=True):
            if _on_gpu(leaf):
                mine.detach().copy_(leaf.detach())
        # The layout of CUDA tensors may hold a copy of their content, which is new.
        return codec.plan_layout(self._leaves) if on_gpu else self._layout


def _empty_like(leaf: torch.Tensor) -> torch.Tensor:
    """Return new memory for a CUDA leaf, with its strides where they leave no gaps."""
    found = torch.empty_like(leaf.detach())
    if type(leaf) is Parameter:
        return Parameter(found, requires_grad=leaf.requires_grad)
    return found.requires_grad_(leaf.requires_grad)

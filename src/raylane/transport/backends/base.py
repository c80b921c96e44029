"""The contract of a transport: one file, one object, found by name in the registry, addable from another package.

A backend moves the blocks of one value from their source into this process. What it can do is a frozen record that the
chooser reads; whether it can connect two given places is a pure question with an answer in words.
"""

from __future__ import annotations

import abc
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raylane.core.deadline import Deadline
from raylane.core.place import Place
from raylane.errors import TensorFreedError, TransferTimeoutError, TransportError
from raylane.transport.source import Source
from raylane.transport.ticket import Ticket

if TYPE_CHECKING:
    from raylane.transport.endpoint import Endpoint

SMALL_BLOCK_BYTES = 1 << 16
"""Blocks below this share one buffer: a thousand small tensors are one allocation."""


@dataclass(frozen=True, kw_only=True)
class Capability:
    """What a transport is for; `summary` is one line for people."""

    summary: str
    same_process: bool = False
    same_host: bool = False
    across_hosts: bool = False
    calls_ray: bool = False
    """Whether a read uses Ray itself, which is not possible while Ray unpickles the ticket."""


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """What a read brought."""

    blocks: list[Any]
    """ctypes arrays, one per block of the ticket, owned by whoever holds them."""
    mutated: bool
    """Whether the source saw a write since publication (False where the transport cannot tell)."""
    creator_read: bool
    """Whether the producing process received the same value itself before."""


class Backend(abc.ABC):
    """One way to move bytes. Stateless, or thread-safe; per-process state lives in the endpoint."""

    name: str
    capability: Capability

    @abc.abstractmethod
    def refusal(self, source: Source, here: Place) -> str | None:
        """Why this transport cannot bring a value from `source` to `here`; None if it can. Pure."""

    @abc.abstractmethod
    def fetch(self, ticket: Ticket, endpoint: Endpoint, deadline: Deadline) -> Arrival:
        """Bring the blocks. Waits, at most until the deadline. Raises SourceLostError, TensorFreedError,
        TransferTimeoutError, ProtocolError; TransportUnavailableError when this way turns out not to exist, after which
        `auto` takes the next."""


def freed(ticket: Ticket) -> TensorFreedError:
    """The error for a value that its source, which is alive, no longer holds."""
    source = ticket.origin()
    return TensorFreedError(
        f"{source} has freed this value: every ref to it was gone, or the process that owned the ref has died. "
        "Keep the ref (in a process that stays) until all readers are done",
        source=source.label,
        key=ticket.key.hex(),
    )


def moved(ticket: Ticket) -> TensorFreedError:
    """The error for a value whose memory its owner has freed, resized or re-pointed although refs to it live."""
    source = ticket.origin()
    return TensorFreedError(
        f"{source} has freed, resized or re-pointed the memory of a tensor of this value (untyped_storage().resize_, "
        "resize_, set_, `.data =`, share_memory_, ndarray.resize) since it was published. Leave published tensors in "
        "place until raylane.wait_tensor_freed(tensor), or publish with snapshot=True",
        source=source.label,
        key=ticket.key.hex(),
    )


def timed_out(ticket: Ticket, deadline: Deadline) -> TransferTimeoutError:
    """The error for a transfer that its deadline ended; the value is unharmed."""
    return TransferTimeoutError(
        f"{ticket.nbytes} bytes from {ticket.origin()} did not arrive within {deadline.timeout_s} s; raise the timeout "
        "(or RAYLANE_TIMEOUT_S) if the value is that large",
        source=ticket.origin().label,
    )


def allocate(ticket: Ticket, endpoint: Endpoint) -> list[Any]:
    """Warm memory for every block: large ones each their own, small ones in one shared buffer. TransportError if this
    process has no more memory."""
    try:
        return _allocate(ticket, endpoint)
    except OSError as error:
        raise cannot_receive(ticket, error) from error


def cannot_receive(ticket: Ticket, error: OSError) -> TransportError:
    """The reader, not the source, is in trouble."""
    return TransportError(
        f"this process cannot take in {ticket.nbytes} bytes from {ticket.origin()}: {error.strerror}; free memory, or "
        "descriptors (ulimit -n), here",
        source=ticket.origin().label,
    )


def _allocate(ticket: Ticket, endpoint: Endpoint) -> list[Any]:
    small = [i for i, block in enumerate(ticket.blocks) if block.nbytes < SMALL_BLOCK_BYTES]
    offsets, total = {}, 0
    for i in small:
        offsets[i] = total
        total += -(-ticket.blocks[i].nbytes // 64) * 64
    shared: Any = endpoint.pool.take(total) if total else None
    return [
        (ctypes.c_char * block.nbytes).from_buffer(shared, offsets[i])
        if i in offsets
        else endpoint.pool.take(block.nbytes)
        for i, block in enumerate(ticket.blocks)
    ]


def copied(ticket: Ticket, endpoint: Endpoint, sources: Sequence[Any]) -> list[Any]:
    """Blocks in warm memory with these bytes (one buffer a block), such as the read-only ones of Ray's store."""
    blocks = allocate(ticket, endpoint)
    for mine, theirs in zip(blocks, sources, strict=True):
        memoryview(mine).cast("B")[:] = memoryview(theirs).cast("B")
    return blocks

"""The contract of a transport: one module, one object, found by name in the registry, addable from another package.

A backend moves the blocks of one value from their source into this process. A frozen record states its capability for
the chooser, and `refusal` is a pure function that explains why a backend cannot connect two given places.
"""

from __future__ import annotations

import abc
import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raylane.core.collector import paused
from raylane.core.deadline import Deadline
from raylane.core.place import Place
from raylane.core.segment import BufferPool, bytes_at, small_blocks
from raylane.errors import TensorFreedError, TransferTimeoutError, TransportError, TransportUnavailableError
from raylane.transport.source import Source
from raylane.transport.ticket import Ticket

if TYPE_CHECKING:
    from raylane.transport.endpoint import Endpoint
    from raylane.transport.parts import Part


@dataclass(frozen=True, kw_only=True)
class Capability:
    """The distances that a transport covers; `summary` is one line for people."""

    summary: str
    on_request: bool = False
    """True if `auto` never chooses this transport, because another one is always at least as good."""
    same_process: bool = False
    same_host: bool = False
    across_hosts: bool = False
    parts: bool = False
    """True if a read of parts moves only these."""
    on_device: bool = False
    """True if CUDA tensors go from device to device; other transports copy them to the host first."""
    calls_ray: bool = False
    """True if a read calls Ray, which is not possible while Ray unpickles the ticket."""


@dataclass(frozen=True, kw_only=True)
class FetchResult:
    """The blocks that a transport received, and the state of the value in its source."""

    blocks: list[Any]
    """A ctypes array for each block of the ticket, or a tensor of bytes for one on a device; owned by its holders."""
    mutated: bool
    """True if the source found a write since publication; False if there was none or the transport cannot tell."""
    creator_read: bool
    """True if the producing process itself has received the value before."""


class Backend(abc.ABC):
    """One way to move bytes. Stateless or thread-safe; state of the process belongs in the endpoint."""

    name: str
    capability: Capability

    @abc.abstractmethod
    def refusal(self, source: Source, here: Place) -> str | None:
        """Return why this transport cannot bring a value from `source` to `here`, or None if it can. Pure."""

    @abc.abstractmethod
    def fetch(self, ticket: Ticket, endpoint: Endpoint, deadline: Deadline) -> FetchResult:
        """Fetch the blocks of a value; wait at most until the deadline.

        Raises SourceLostError, TensorFreedError, TransferTimeoutError or ProtocolError. TransportUnavailableError means
        that this transport turned out not to work between the two processes; `auto` then tries the next one.
        """

    def fetch_parts(self, ticket: Ticket, parts: Sequence[Part], endpoint: Endpoint, deadline: Deadline) -> FetchResult:
        """Fetch parts of the blocks to their addresses, which the caller keeps valid; the result has no blocks.

        Errors and waiting as for `fetch`; after an error the content at the addresses is undefined. Bytes are written
        there within `deadline.writing()` only, in which nothing waits that cannot be interrupted: the addresses belong
        to a caller, who may use them for something else as soon as its call has raised. This default fetches the whole
        value into pooled memory and copies; a transport that can move less overrides it.
        """
        found = self.fetch(ticket, endpoint, deadline)
        copy_parts(parts, found.blocks, deadline)
        return FetchResult(blocks=[], mutated=found.mutated, creator_read=found.creator_read)


class UnavailableNowError(TransportUnavailableError):
    """A transport cannot bring this value now; unlike its base, it says nothing about later values."""


def freed_error(ticket: Ticket) -> TensorFreedError:
    """Return the error for a value that its source, which is alive, no longer holds."""
    source = ticket.origin()
    return TensorFreedError(
        f"could not read a value: {source} has freed it, because every ref to it was gone or the process that owned "
        "the ref has died. Keep the ref (in a process that stays alive) until all readers are done",
        source=source.label,
        key=ticket.key.hex(),
    )


def moved_error(ticket: Ticket) -> TensorFreedError:
    """Return the error for a value whose owner freed, resized or re-pointed the memory while refs to it exist."""
    source = ticket.origin()
    return TensorFreedError(
        f"could not read a value: {source} has freed, resized or re-pointed the memory of one of its tensors "
        "(untyped_storage().resize_, resize_, set_, `.data =`, share_memory_, ndarray.resize) since the value was "
        "published. Leave published tensors in place until raylane.wait_tensor_freed(tensor), or publish with "
        "snapshot=True",
        source=source.label,
        key=ticket.key.hex(),
    )


def timeout_error(ticket: Ticket, deadline: Deadline) -> TransferTimeoutError:
    """Return the error for a transfer that exceeded its deadline; the published value is unharmed."""
    return TransferTimeoutError(
        f"could not read {ticket.nbytes} bytes from {ticket.origin()} within {deadline.timeout_s} s. Raise the timeout "
        "(or RAYLANE_TIMEOUT_S) if the value is that large",
        source=ticket.origin().label,
    )


def receive_error(ticket: Ticket, error: OSError) -> TransportError:
    """Return the error for a reader (not a source) that has no memory or descriptors left."""
    return TransportError(
        f"this process cannot take in {ticket.nbytes} bytes from {ticket.origin()}: {error.strerror}. Free memory or "
        "descriptors (ulimit -n) in this process",
        source=ticket.origin().label,
    )


def allocate(ticket: Ticket, endpoint: Endpoint, *, on_device: bool = False) -> list[Any]:
    """Return pooled memory for every block: a buffer of its own for a large block, one shared buffer for small ones.

    With `on_device`, blocks that are on a device in the source get memory of this process's devices.
    TransportError if this process has no more memory.
    """
    try:
        sizes = [block.nbytes for block in ticket.blocks]
        return take_blocks(sizes, endpoint.pool, ticket.devices if on_device else {})
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
    found: dict[int, Any] = {}
    if devices:
        from raylane.transport.device_memory import groups_of, new_blocks

        found = dict(new_blocks(groups_of(devices, sizes)))
    host = [i for i in range(len(sizes)) if i not in found]
    offsets, total = small_blocks([sizes[i] for i in host])
    shared: Any = pool.take(total) if total else None
    with paused(len(host)):
        for k, i in enumerate(host):
            if k in offsets:
                found[i] = (ctypes.c_char * sizes[i]).from_buffer(shared, offsets[k])
            else:
                found[i] = pool.take(sizes[i])
        return [found[i] for i in range(len(sizes))]


def host_view(block: Any) -> memoryview:
    """Return the bytes of a received block; one on a device is copied to the host."""
    return memoryview(block.cpu().numpy() if hasattr(block, "cpu") else block).cast("B")


def copy_parts(parts: Sequence[Part], blocks: Sequence[Any], deadline: Deadline) -> None:
    """Copy parts of these blocks to their addresses, unless the call to which the deadline belongs has ended."""
    views = [host_view(block) for block in blocks]
    with deadline.writing():
        for part in parts:
            bytes_at(part.address, part.nbytes)[:] = views[part.block][part.offset : part.offset + part.nbytes]


def copy_to_pool(ticket: Ticket, endpoint: Endpoint, sources: Sequence[Any]) -> list[Any]:
    """Return blocks in pooled memory with a copy of these buffers, such as the read-only ones of Ray's object store."""
    blocks = allocate(ticket, endpoint)
    for target, source in zip(blocks, sources, strict=True):
        memoryview(target).cast("B")[:] = memoryview(source).cast("B")
    return blocks

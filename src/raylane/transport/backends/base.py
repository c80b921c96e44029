"""The contract of a transport: one class, found by name in the registry, addable from another package.

A backend moves the blocks of one value from their source into this process. All in which transports differ is a field
of `Capability`; the rest of raylane asks these fields and never compares names. To add a transport, write a `Backend`
(or a `channels.ChannelBackend`) in a module of its own, and register it: with one line in `registry`, or from another
package with an entry point in the group `raylane.backends`. `raylane.testing.contract` tests it.
"""

from __future__ import annotations

import abc
import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from raylane.core.deadline import Deadline
from raylane.core.memory.receive_pool import BufferPool
from raylane.core.process.place import Place
from raylane.errors import TransportUnavailableError
from raylane.transport.hold.blocks import copy_parts
from raylane.transport.hold.store import Store
from raylane.transport.link.connection import Address, Link, LinkPool, LinkT, TakeStream
from raylane.transport.link.tls import cleartext_refusal
from raylane.transport.value.parts import Part
from raylane.transport.value.source import Source
from raylane.transport.value.ticket import Ticket

NO_DEVICE = "this process has no CUDA device"
AUTO = "auto"
"""Name that lets each reader choose the transport."""


@dataclass(frozen=True, kw_only=True)
class Capability:
    """All that distinguishes a transport from the others."""

    summary: str
    """One line for people."""
    same_process: bool = False
    """True if it connects a process with itself."""
    same_host: bool = False
    across_hosts: bool = False
    rank: int | None = 50
    """Place in the order in which `auto` tries transports, the lowest first; None: used on request only."""
    two_sided: bool = False
    """True if the source takes part in every transfer; collective groups are made of such transports."""
    needs_device: bool = False
    """True if both processes need a CUDA device. `auto` then takes it for CUDA tensors only."""
    on_device: bool = False
    """True if CUDA tensors go from device to device; other transports copy them to the host first."""
    in_the_clear: bool = False
    """True if bytes travel over connections of its own that nobody encrypts; refused where Ray uses TLS."""
    parts: bool = False
    """True if a read of parts moves only these."""
    into: bool = False
    """True if a read into targets writes to them directly; others receive into pooled memory and copy."""
    snapshots: bool = False
    """True if it can read the sealed shared memory of a value that was published with `snapshot=True`."""
    own_objects: bool = False
    """True if the reader gets the objects of the producer themselves, which only one process can do."""
    by_ray: bool = False
    """True if Ray carries the bytes. A read then calls Ray, which is not possible while Ray unpickles a ticket."""
    remedy: str = "see the documentation of the package that provides this transport."
    """Advice for users where it does not connect two processes (`raylane doctor`)."""


@dataclass(frozen=True, kw_only=True)
class FetchResult:
    """The blocks that a transport received, and the state of the value in its source."""

    blocks: list[Any]
    """A ctypes array for each block of the ticket, or a tensor of bytes for one on a device; owned by its holders."""
    mutated: bool
    """True if the source found a write since publication; False if there was none or the transport cannot tell."""
    creator_read: bool
    """True if the producing process itself has received the value before."""


class ProcessPart:
    """State of one transport in a process; ends with the Ray session (`Process.part`)."""

    def stats(self) -> dict[str, int]:
        """Return counters for `raylane.stats`."""
        return {}

    def close(self) -> None:  # a default, not a duty
        """Release threads, connections and memory."""


PartT = TypeVar("PartT", bound=ProcessPart)


class Process(Protocol):
    """The reading or publishing process, as transports see it. `link.endpoint.Endpoint` is the only one."""

    place: Place
    store: Store
    pool: BufferPool
    """Pooled memory for received blocks."""
    blocked: dict[tuple[str, Place], str]
    """Ways that failed to reach a process, with the reason; they are not tried again."""
    streams: dict[bytes, TakeStream]
    """Takers of connections that readers open to this process's listener, by the key of their request."""

    @property
    def counts(self) -> collections.Counter[str]:
        """Counters of `raylane.stats`."""

    def secret(self) -> bytes:
        """Return the secret of this Ray cluster."""

    def links(self) -> LinkPool[Link]:
        """Return the connections to other processes."""

    def link_pool(self, open_link: Callable[..., LinkT]) -> LinkPool[LinkT]:
        """Return a new pool of connections that `open_link` opens."""

    def address_of(self, source: Source) -> Address:
        """Return the address by which a link reaches a source from here."""

    def check_alive(self, source: Source) -> None:
        """Raise SourceLostError if a source has died."""

    def part(self, kind: type[PartT], make: Callable[[], PartT] | None = None) -> PartT:
        """Return the state of this kind; `make` (else `kind` without arguments) creates it at the first call."""


class Backend(abc.ABC):
    """One way to move bytes. Stateless or thread-safe; state of a process is a part of it (`Process.part`)."""

    name: str
    capability: Capability

    def missing(self) -> str | None:
        """Return why this process cannot use the transport at all (no package, no device), or None. Does not wait."""
        if self.capability.needs_device and not has_cuda():
            return "it sees no GPU. Give the actor one (num_gpus=1), or use 'auto'"
        return None

    def refusal(self, source: Source, place: Place) -> str | None:
        """Return why this transport cannot bring a value from `source` to `place`, or None if it can. Does not wait.

        This default compares the two places with the capability.
        """
        there, capability = source.place, self.capability
        if capability.own_objects and not there.same_process(place):
            return f"the value is in another process ({there}); this is {place}"
        if capability.needs_device and not has_cuda():
            return NO_DEVICE
        if there.same_process(place) and not capability.same_process:
            return "source and reader are one process"
        if not there.same_host(place) and not capability.across_hosts:
            return f"the value is on another host ({there.hostname}; this is {place.hostname})"
        return cleartext_refusal(self.name) if capability.in_the_clear else None

    def prepare_source(  # noqa: B027  # a default, not a duty
        self, process: Process, find: Callable[[str], Backend | None]
    ) -> None:
        """Prepare this process to be read from; called before its first ticket exists, perhaps by several threads.

        `find` returns the transport of a name. This default is for transports that need nothing.
        """

    @abc.abstractmethod
    def fetch(self, ticket: Ticket, process: Process, deadline: Deadline) -> FetchResult:
        """Fetch the blocks of a value into this process; wait at most until the deadline.

        Raises SourceLostError, TensorFreedError, TransferTimeoutError or ProtocolError. TransportUnavailableError means
        that this transport turned out not to work between the two processes; `auto` then tries the next one.
        """

    def fetch_parts(self, ticket: Ticket, parts: Sequence[Part], process: Process, deadline: Deadline) -> FetchResult:
        """Fetch parts of the blocks to their addresses, which the caller keeps valid; the result has no blocks.

        Errors and waiting as for `fetch`; after an error the content at the addresses is undefined. Bytes are written
        there within `deadline.writing()` only, in which nothing waits that cannot be interrupted: the addresses belong
        to a caller, who may use them for something else as soon as its call has raised. This default fetches the whole
        value into pooled memory and copies; a transport that can move less overrides it.
        """
        received = self.fetch(ticket, process, deadline)
        copy_parts(parts, received.blocks, deadline)
        return FetchResult(blocks=[], mutated=received.mutated, creator_read=received.creator_read)


class ChannelError(RuntimeError):
    """A transfer through a channel failed; its other end is told why. The channel must be closed."""


class UnavailableNowError(TransportUnavailableError):
    """A transport cannot bring this value now; unlike its base, it says nothing about later values."""


def has_cuda() -> bool:
    """Return True if torch sees a CUDA device in this process."""
    import torch

    return torch.cuda.is_available()

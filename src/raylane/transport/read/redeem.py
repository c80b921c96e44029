"""Redemption of a ticket: choose a transport, fetch, check that the content is what was published, deliver.

`Read` has these steps in this order. `reader` redeems when Ray unpickles a ticket, `api` for `raylane.get`; `opened`
reads parts.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from raylane import _ray
from raylane.core.deadline import Deadline
from raylane.core.memory.layout import bytes_at
from raylane.core.process.gc_pauses import paused
from raylane.core.process.place import Place
from raylane.errors import TensorMutatedError, TransportError, TransportUnavailableError
from raylane.transport.backends.base import AUTO, Backend, FetchResult, ProcessPart, UnavailableNowError, has_cuda
from raylane.transport.backends.registry import backends, find
from raylane.transport.hold.blocks import allocate, copy_parts, host_view
from raylane.transport.hold.store import Entry
from raylane.transport.link.endpoint import Endpoint, endpoint
from raylane.transport.read.choose import choose
from raylane.transport.read.deliver import PLAIN, Delivery, Present, convert, with_targets
from raylane.transport.read.receiving import receive
from raylane.transport.value import codec
from raylane.transport.value.layout import ARRAY, LeafSpec, itemsize_of
from raylane.transport.value.parts import Part, size_of
from raylane.transport.value.source import Source
from raylane.transport.value.ticket import Ticket, checksum, freed_error, moved_error

_MOST_CHOICES = 4096
"""Limit of the choices that are kept: actors that are restarted again and again have new places."""


@dataclass(frozen=True)
class Read:
    """One read of a published value, or of parts of it, by this process."""

    process: Endpoint
    ticket: Ticket
    names: tuple[str, ...]
    """Transports to try, in order."""
    deadline: Deadline
    last_resort: bool
    """True to raise the first TransportUnavailableError instead of trying the next transport."""

    # Choose

    @classmethod
    def of(
        cls,
        ticket: Ticket,
        transport: str | None,
        deadline: Deadline,
        *,
        may_call_ray: bool,
        on_device: bool = False,
    ) -> Read:
        """Choose the transports. TransportUnavailableError if there is none."""
        process = endpoint()
        source = ticket.origin()
        name = ticket.transport if transport is None else transport
        if transport is None and ticket.groups and not process.groups().keys() & set(ticket.groups):
            process.counts["outside_group"] += 1
            name = AUTO
        elif transport is None and (backend := find(name)) and backend.capability.needs_device and not has_cuda():
            # The producer chose it for readers with a GPU; a driver without one wants the value all the same.
            process.counts["without_device"] += 1
            name = AUTO
        names = _choice(process, source, name, may_call_ray=may_call_ray, on_device=on_device)
        return cls(process, ticket, names, deadline, last_resort=name != AUTO)

    # Take what this process holds

    def own(self, skeleton: bytes = b"", *, copy: bool = False) -> Present | None:
        """Return the value if this process holds it: the producer's own objects, or a copy. None if it must be fetched.

        A copy on request (`copy`), and in a plain task.
        """
        process, ticket = self.process, self.ticket
        if not backends()[self.names[0]].capability.own_objects:
            return None
        entry = process.store.get(ticket.key)
        if entry is None or entry.nonce != ticket.nonce:
            raise freed_error(ticket)
        if entry.segment >= 0:  # a snapshot is fetched like any other value: nobody may write to its sealed memory
            return None
        process.counts[self.names[0]] += 1
        if copy or _ray.is_task_worker():
            # Tasks share worker processes arbitrarily, so copy instead of aliasing.
            blocks = allocate(ticket, process.pool)
            if not entry.copy_to(blocks):
                raise moved_error(ticket)
            _check_content(ticket, blocks)
            return Present(skeleton, codec.build_leaves(ticket.specs, blocks))
        # The creator gets its own leaves even where other readers get a copy, so those must be intact as well.
        if not entry.is_intact(include_copied=True):
            raise moved_error(ticket)
        if ticket.checksum is not None:
            _check_own_content(ticket, entry)
        _, by_remote = process.store.mark_read(entry, creator=True)
        if by_remote:
            _warn_shared(ticket)
        return Present(skeleton, entry.leaves, own_objects=True)

    # Fetch, and check

    def blocks(self) -> list[Any]:
        """Return all blocks of the value, in pooled memory, after a check of their content."""
        result = self._try_all(
            lambda backend: backend.fetch(self.ticket, self.process, self.deadline), self.ticket.nbytes
        )
        # Before the value is unpickled, so that no code of the user sees other content than was published.
        _check_content(self.ticket, result.blocks)
        self._warn(result)
        return result.blocks

    def parts(self, parts: list[Part]) -> None:
        """Bring parts of the blocks to their addresses."""
        if self.ticket.checksum is not None:
            # The checksum covers the whole value, so only a read of the whole can be checked.
            copy_parts(parts, self.blocks(), self.deadline)
            return
        nbytes = sum(part.nbytes for part in parts)
        self._warn(
            self._try_all(lambda backend: backend.fetch_parts(self.ticket, parts, self.process, self.deadline), nbytes)
        )

    def _try_all(self, fetch: Callable[[Backend], FetchResult], nbytes: int) -> FetchResult:
        """Try the transports in order; remember one that does not work between these two processes.

        `nbytes` is the size that a transport moves if it can move parts; the others move the whole value.
        """
        for name in self.names:
            began_ns = time.perf_counter_ns()
            try:
                result = fetch(backends()[name])
            except TransportError as error:
                self.process.recorder.read_failed(name, self.ticket, began_ns, error)
                if not isinstance(error, TransportUnavailableError):
                    raise
                # Such a failure is permanent (kernel settings, object layout), so later reads skip the attempt.
                if not isinstance(error, UnavailableNowError):
                    self.process.blocked[name, self.ticket.origin().place] = error.message
                if self.last_resort or name == self.names[-1]:
                    raise
                continue
            self.process.counts[name] += 1
            moved = nbytes if backends()[name].capability.parts else self.ticket.nbytes
            self.process.counts[f"{name}_bytes"] += moved
            self.process.recorder.read(name, self.ticket, began_ns, moved)
            return result
        raise AssertionError(f"no transport to try for {self.ticket.origin()}")

    def leaves(self, specs: Sequence[LeafSpec]) -> list[Any]:
        """Return the leaves of the value, with these layouts, in new memory."""
        blocks = self.blocks()
        with paused(len(specs)):  # not during the transfer, which may take long
            return _build_leaves(self.ticket, specs, blocks)

    def _warn(self, result: FetchResult) -> None:
        if result.mutated and self.ticket.on_mutation == "warn":
            warnings.warn(_mutated_text(self.ticket), UserWarning, stacklevel=2)
        if result.creator_read:
            _warn_shared(self.ticket)

    # Deliver

    def deliver(self, skeleton: bytes, wish: Delivery) -> Any:
        """Fetch the value, and return it as `wish` describes."""
        ticket, specs = self.ticket, self.ticket.specs
        if wish.targets is not None:
            if ticket.devices and backends()[self.names[0]].capability.on_device:
                # From the device to the targets, instead of through host memory.
                return Present(skeleton, _build_leaves(ticket, specs, self.blocks())).deliver(wish, self.deadline)
            leaves = receive(specs, wish.targets.first, self.process.pool, self.parts, self.deadline)
            with self.deadline.writing():
                return with_targets(skeleton, leaves, wish.targets)
        if wish.device is not None:
            specs = [
                msgspec.structs.replace(spec, device=str(wish.device)) if spec.kind != ARRAY else spec for spec in specs
            ]
        leaves = self.leaves(specs)
        with paused(len(specs)):
            return codec.decode_value(skeleton, convert(leaves, wish))


def redeem(
    ticket: Ticket,
    skeleton: bytes,
    transport: str | None,
    deadline: Deadline,
    *,
    may_call_ray: bool,
    wish: Delivery = PLAIN,
) -> Any:
    """Return the value of a ticket as `wish` describes; wait at most until the deadline. Raises a TransportError.

    ValueError or TypeError if the targets of the wish do not fit the value.
    """
    on_device = _is_for_device(ticket, wish)
    if wish.copy and ticket.regions:  # without them, a ticket names memory that can only be copied
        ticket = msgspec.structs.replace(ticket, regions={})
    read = Read.of(ticket, transport, deadline, may_call_ray=may_call_ray, on_device=on_device)
    present = read.own(skeleton, copy=wish.copy)
    return read.deliver(skeleton, wish) if present is None else present.deliver(wish, deadline)


def _is_for_device(ticket: Ticket, wish: Delivery) -> bool:
    """Return True if the value has CUDA tensors, and its reader wants them on a device."""
    if not ticket.devices:
        return False
    if wish.targets is None:
        return wish.device is None or wish.device.type == "cuda"
    return any(isinstance(target, torch.Tensor) and target.is_cuda for _, target in wish.targets.all())


def redeem_parts(
    ticket: Ticket,
    views: Sequence[LeafSpec],
    targets: Sequence[Any],
    transport: str | None,
    deadline: Deadline,
    select: Callable[[list[Any]], list[Any]],
) -> list[Any]:
    """Return leaves, or slices of leaves, of the value of a ticket, in their targets (None: in new memory).

    `select` makes the same of the producer's own leaves, if this process is the producer. Waits and raises as `redeem`.
    """
    nbytes = sum(size_of(view, itemsize_of(view)) for view in views)
    chosen = ticket.transport
    if transport is None and nbytes < ticket.nbytes and (backend := find(chosen)) is not None:
        # The producer chose a transport for the value. If that can only move all of it, another one moves the part.
        transport = None if backend.capability.parts else AUTO
    read = Read.of(ticket, transport, deadline, may_call_ray=True)
    if (present := read.own()) is not None:
        return select(present.leaves)
    return receive(views, targets, read.process.pool, read.parts, deadline)


def redeem_leaves(ticket: Ticket, transport: str, deadline: Deadline) -> list[Any]:
    """Return the leaves of a value of another process, fetched by this transport. Waits and raises as `redeem`."""
    read = Read.of(ticket, transport, deadline, may_call_ray=True, on_device=bool(ticket.devices))
    return read.leaves(ticket.specs)


class _Choices(dict[tuple[str, Place, bool, bool, int], tuple[str, ...]], ProcessPart):
    """Transports that were chosen for a source, by all that the choice depends on."""


def _choice(
    process: Endpoint, source: Source, transport: str, *, may_call_ray: bool, on_device: bool
) -> tuple[str, ...]:
    """Return the transports that `choose` gives. Kept, because the next reads from a source mostly ask the same."""
    # `blocked` only grows: every transport that failed asks for a new choice.
    key = (transport, source.place, may_call_ray, on_device, len(process.blocked))
    choices = process.part(_Choices)
    names = choices.get(key)
    if names is None:
        find(transport)
        choice = choose(
            source,
            process.place,
            transport,
            backends(),
            process.blocked,
            may_call_ray=may_call_ray,
            on_device=on_device,
        )
        if len(choices) >= _MOST_CHOICES:
            choices.clear()
        names = choices[key] = choice.names
    return names


def _check_content(ticket: Ticket, blocks: Sequence[Any]) -> None:
    """Raise TensorMutatedError if the ticket has a checksum and these bytes do not match it."""
    if ticket.checksum is not None and checksum(map(host_view, blocks)) != ticket.checksum:
        raise TensorMutatedError(_mutated_text(ticket), source=ticket.origin().label)


def _check_own_content(ticket: Ticket, entry: Entry) -> None:
    """Raise TensorMutatedError if the producer's own objects do not match the ticket's checksum.

    Leaves that were copied at publication (such as a column of a matrix) are copied again here, to other addresses.
    Blocks are numbered by address, so a block may have another number now than in the ticket.
    """
    now = codec.plan_layout(entry.leaves)
    number = {then.block: spec.block for then, spec in zip(ticket.specs, now.specs, strict=True)}
    renumbered = [msgspec.structs.replace(then, block=number[then.block]) for then in ticket.specs]
    if renumbered != now.specs or len(now.blocks) != len(ticket.blocks):
        raise TensorMutatedError(_mutated_text(ticket), source=ticket.origin().label)
    blocks = [now.blocks[number[i]] for i in range(len(ticket.blocks))]
    _check_content(ticket, [bytes_at(block.start, block.nbytes) for block in blocks])


def _build_leaves(ticket: Ticket, specs: Sequence[LeafSpec], blocks: list[Any]) -> list[Any]:
    if ticket.devices:
        from raylane.transport.hold.device_memory import separated

        blocks = separated(blocks)
    try:
        return codec.build_leaves(specs, blocks)
    except (RuntimeError, AssertionError) as error:  # torch raises either class in a process without CUDA
        devices = sorted({spec.device for spec in specs if spec.device != "cpu"})
        if not devices:
            raise
        raise TransportUnavailableError(
            f"could not rebuild the value of {ticket.origin()}: its tensors are on {', '.join(devices)}, which this "
            f"process does not have ({error}). Read the value with "
            "raylane.get(ref, device='cpu'), or move the tensors to the CPU before returning them"
        ) from error


def _mutated_text(ticket: Ticket) -> str:
    if ticket.checksum is not None and ticket.on_mutation != "error":
        return (
            f"the bytes of a value published by {ticket.origin()} differ from the published ones (RAYLANE_CHECKSUM): "
            "they changed on the way, or in the source, whose owner may have written to a tensor. If no tensor was "
            "written to, check memory and network of both hosts; else wait with raylane.wait_free(tensor)"
        )
    return (
        f"a tensor published by {ticket.origin()} was written to in place before or during this read, so the reader "
        "would see other content than was published. Wait for readers with raylane.wait_free(tensor), or "
        "publish with snapshot=True"
    )


def _warn_shared(ticket: Ticket) -> None:
    if ticket.on_mutation != "allow":
        warnings.warn(
            f"a value is passed both to {ticket.origin()}, which created it, and to other processes. Its tensors are "
            "not copied for the creator: if the creator writes to them, the other processes see the write or not, "
            "depending on when they read. Publish with snapshot=True, or clone before writing",
            UserWarning,
            stacklevel=2,
        )

"""Redemption of a ticket: choice of a transport, the fetch, and all checks that the content is what was published.

`reader` calls it when Ray unpickles a ticket, `api` for `raylane.get`, and `opened` for reads of parts.
"""

from __future__ import annotations

import bisect
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from raylane import _ray
from raylane.core.collector import paused
from raylane.core.deadline import Deadline
from raylane.core.memory.layout import bytes_at
from raylane.core.place import Place
from raylane.core.spans import merge
from raylane.errors import TensorMutatedError, TransportError, TransportUnavailableError
from raylane.transport.backends.base import AUTO, Backend, FetchResult, ProcessPart, UnavailableNowError, has_cuda
from raylane.transport.backends.registry import backends, find
from raylane.transport.hold.blocks import allocate, copy_parts, host_view
from raylane.transport.hold.store import Entry
from raylane.transport.link.endpoint import Endpoint, endpoint
from raylane.transport.read.choose import choose
from raylane.transport.read.receiving import Delivery, check_target, convert, copied, copy_into, receive
from raylane.transport.read.targets import Destination, Targets, match, structure, with_part
from raylane.transport.value import codec
from raylane.transport.value.layout import ARRAY, LeafSpec, itemsize_of
from raylane.transport.value.leaf_memory import leaf_address, leaf_span, strides_bytes
from raylane.transport.value.parts import Part, size_of
from raylane.transport.value.source import Source
from raylane.transport.value.ticket import Ticket, checksum, freed_error, moved_error

PLAIN = Delivery()
_MOST_CHOICES = 4096
"""Limit of the choices that are kept: actors that are restarted again and again have new places."""


@dataclass(frozen=True)
class Present:
    """A value whose tensors are in this process."""

    skeleton: bytes
    leaves: list[Any]
    own_objects: bool = False
    """True if the leaves are the producer's own objects."""

    def deliver(self, wish: Delivery, deadline: Deadline) -> Any:
        """Return the value as its reader wants it; targets are written within `deadline.writing()`."""
        if wish.plain:
            return codec.decode_value(self.skeleton, self.leaves, own_objects=self.own_objects)
        if wish.targets is None:
            return codec.decode_value(self.skeleton, convert(self.leaves, wish), own_objects=self.own_objects)
        with deadline.writing():
            leaves = list(self.leaves)
            sources = _apart(self.leaves, wish.targets) if self.own_objects else self.leaves
            for number, target in enumerate(wish.targets.first):
                if target is not None:
                    leaves[number] = copy_into(target, sources[number])
            return _with_targets(self.skeleton, leaves, wish.targets, own_objects=self.own_objects)

    def destinations(self, targets: Targets) -> list[Destination]:
        """Return the targets of this value with the places of their leaves. ValueError if one does not fit its leaf."""
        destinations = []
        for number, target in targets.all():
            leaf = self.leaves[number]
            check_target(codec.spec_of(leaf, leaf, -1, 0), target)
            destinations.append(Destination(target, (0, 0), leaf_address(leaf), strides_bytes(leaf)))
        return destinations

    def match(self, into: Any) -> Targets:
        """Return the targets of this value by the numbers of `leaves`, which need not all be tensors."""
        numbers = [i for i, leaf in enumerate(self.leaves) if codec.is_leaf(leaf)]
        matched = match(self.shown(), len(numbers), into)
        first = [None] * len(self.leaves)
        for number, target in zip(numbers, matched.first, strict=True):
            first[number] = target
        return Targets(first, [placed._replace(number=numbers[placed.number]) for placed in matched.further])

    def shown(self) -> Any:
        """Return the structure of the value, with a Slot for each tensor."""
        return structure(self.skeleton, self.leaves)


def _apart(leaves: list[Any], targets: Targets) -> list[Any]:
    """Return the producer's own leaves, copied where writing the targets would change them before they are read."""
    written, _ = merge([leaf_span(target) for _, target in targets.all() if codec.is_leaf(target)])
    starts = [span.start for span in written]

    def is_written(leaf: Any) -> bool:
        span = leaf_span(leaf)
        last = bisect.bisect_left(starts, span.stop) - 1  # the last one that begins before the end of the leaf
        return last >= 0 and written[last].stop > span.start

    return [copied(leaf) if codec.is_leaf(leaf) and is_written(leaf) else leaf for leaf in leaves]


def _with_targets(skeleton: bytes, leaves: list[Any], targets: Targets, *, own_objects: bool = False) -> Any:
    """Return the value with its targets in it."""
    for placed in targets.further:
        if leaves[placed.number] is not placed.target:
            copy_into(placed.target, leaves[placed.number])
    value = codec.decode_value(skeleton, leaves, own_objects=own_objects)
    for placed in targets.further:
        value = with_part(value, placed.path, placed.target)
    return value


@dataclass(frozen=True)
class _Fetching:
    """One read of a value of another process, or of parts of it."""

    process: Endpoint
    ticket: Ticket
    names: tuple[str, ...]
    """Transports to try, in order."""
    deadline: Deadline
    last_resort: bool
    """True to raise the first TransportUnavailableError instead of trying the next transport."""

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

    def _warn(self, result: FetchResult) -> None:
        if result.mutated and self.ticket.on_mutation == "warn":
            warnings.warn(_mutated_text(self.ticket), UserWarning, stacklevel=2)
        if result.creator_read:
            _warn_shared(self.ticket)


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
    value = _find(ticket, skeleton, transport, deadline, may_call_ray=may_call_ray, on_device=on_device, copy=wish.copy)
    if isinstance(value, Present):
        return value.deliver(wish, deadline)
    specs = ticket.specs
    if wish.targets is not None:
        if ticket.devices and backends()[value.names[0]].capability.on_device:
            # From the device to the targets, instead of through host memory.
            return Present(skeleton, _build_leaves(ticket, specs, value.blocks())).deliver(wish, deadline)
        leaves = receive(specs, wish.targets.first, value.process.pool, value.parts, deadline)
        with deadline.writing():
            return _with_targets(skeleton, leaves, wish.targets)
    if wish.device is not None:
        specs = [
            msgspec.structs.replace(spec, device=str(wish.device)) if spec.kind != ARRAY else spec for spec in specs
        ]
    blocks = value.blocks()
    with paused(len(specs)):  # not during the transfer, which may take long
        leaves = _build_leaves(ticket, specs, blocks)
        return codec.decode_value(skeleton, convert(leaves, wish))


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
    value = _find(ticket, b"", transport, deadline, may_call_ray=True)
    if isinstance(value, Present):
        return select(value.leaves)
    return receive(views, targets, value.process.pool, value.parts, deadline)


def redeem_leaves(ticket: Ticket, transport: str, deadline: Deadline) -> list[Any]:
    """Return the leaves of a value of another process, fetched by this transport. Waits and raises as `redeem`."""
    value = _find(ticket, b"", transport, deadline, may_call_ray=True, on_device=bool(ticket.devices))
    assert isinstance(value, _Fetching), "the value belongs to this process"
    blocks = value.blocks()
    with paused(len(ticket.specs)):
        return _build_leaves(ticket, ticket.specs, blocks)


def _find(
    ticket: Ticket,
    skeleton: bytes,
    transport: str | None,
    deadline: Deadline,
    *,
    may_call_ray: bool,
    on_device: bool = False,
    copy: bool = False,
) -> Present | _Fetching:
    """Return the value if this process holds it, else the way to fetch it."""
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
    if backends()[names[0]].capability.own_objects:
        entry = process.store.get(ticket.key)
        if entry is None or entry.nonce != ticket.nonce:
            raise freed_error(ticket)
        # A snapshot is fetched like any other value below: nobody may write to its sealed memory.
        if entry.segment < 0:
            process.counts[names[0]] += 1
            return _own(process, entry, ticket, skeleton, copy=copy)
    return _Fetching(process, ticket, names, deadline, last_resort=name != AUTO)


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


def _own(process: Endpoint, entry: Entry, ticket: Ticket, skeleton: bytes, *, copy: bool) -> Present:
    """Return a value that this process holds: the producer's own objects, or a copy on request and for a plain task."""
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

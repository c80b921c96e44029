"""Redeems tickets: what runs when Ray unpickles one, and what `raylane.get` does with it.

`materialize` is named in every ticket. It returns a value or, if that cannot be had, an *instance* of a TransportError:
Ray raises such an instance by itself, of that very class, wherever the value would have gone. Nothing reached from
there calls Ray but for one key look-up per process.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import FrameType
from typing import Any

import msgspec

from raylane import _ray
from raylane.core.deadline import Deadline, default_timeout_s
from raylane.core.segment import bytes_at
from raylane.errors import (
    ProtocolError,
    TensorMutatedError,
    TransferTimeoutError,
    TransportError,
    TransportUnavailableError,
)
from raylane.transport import codec
from raylane.transport.backends.base import Arrival, allocate, copied, freed, moved
from raylane.transport.backends.registry import AUTO, backends
from raylane.transport.choose import choose
from raylane.transport.endpoint import Endpoint, endpoint
from raylane.transport.store import Entry
from raylane.transport.ticket import Ticket, checksum, decode

_FRAMES_TO_GET = 64
"""Five lie between `materialize` and `Worker.get_objects` in Ray 2.60; a user's unpickling may lie between as well."""


_GRACE_S = 0.5
"""What a fetch on another thread is given to report its own, better, timeout."""


class _Collecting(threading.local):
    depth = 0


_collecting = _Collecting()
"""While `raylane.get` calls `ray.get` in this thread, the number of nested `ray.get`s that this call makes: tickets
unpickled at that depth are returned unredeemed, as Pending. Those deeper belong to a user's own unpickling."""


class Pending:
    """A value that is not fetched yet. Seen by `raylane.get` and by decorated methods' wrappers, never by users."""

    __slots__ = ("deadline", "future", "skeleton", "ticket")

    def __init__(self, ticket: Ticket, skeleton: bytes) -> None:
        self.ticket = ticket
        self.skeleton = skeleton
        self.future: Future[Any] | None = None
        self.deadline = Deadline(None)

    def start(self, wanted: str | None, deadline: Deadline, *, may_call_ray: bool) -> None:
        """Fetch on a thread of the endpoint's."""
        self.deadline = deadline
        self.future = endpoint().fetchers.submit(
            functools.partial(redeem, self.ticket, self.skeleton, wanted, deadline, may_call_ray=may_call_ray)
        )

    def result(self) -> Any:
        """Wait, at most until the deadline of `start`. Raises what the fetch raised, or TransferTimeoutError."""
        if self.future is None:
            raise AssertionError("a pending value was waited for before it was started")
        left = self.deadline.left_s()
        try:
            return self.future.result(None if left is None else left + _GRACE_S)
        except FutureTimeoutError:
            if self.future.done():
                raise  # the fetch's own error, which is a TimeoutError as well
            raise TransferTimeoutError(
                f"the value of {self.ticket.origin()} did not arrive within {self.deadline.timeout_s} s"
            ) from None


def materialize(payload: bytes, skeleton: bytes, anchor: object = None, carried: list[Any] | None = None) -> Any:
    """Called by unpickling, with Ray's locks held. `anchor` is there to be counted by Ray, not used; `carried` are the
    blocks' bytes where Ray carried them, read-only in its store."""
    try:
        ticket = decode(payload)
    except ValueError as error:
        return ProtocolError(str(error))
    if ticket.inline is not None:
        return codec.decode(skeleton, codec.build(ticket.specs, [bytearray(block) for block in ticket.inline]))
    if carried is not None:
        return codec.decode(skeleton, codec.build(ticket.specs, copied(ticket, endpoint(), carried)))
    gets = _gets_around()
    if gets and gets == _collecting.depth:
        return Pending(ticket, skeleton)
    deadline = Deadline(default_timeout_s())
    if not gets:
        from raylane.transport.calls import runs_a_wrapper  # it imports this module

        if runs_a_wrapper():
            pending = Pending(ticket, skeleton)
            pending.start(None, deadline, may_call_ray=False)
            return pending
    try:
        return redeem(ticket, skeleton, None, deadline, may_call_ray=False)
    except TransportError as error:
        return error


def _gets_around() -> int:
    """How many `ray.get`s this runs in, in whatever thread: each has `Worker.get_objects` in the stack. 0 means that
    a task's arguments are being unpickled, or an awaited ref."""
    found = 0
    code = _ray.get_objects_code()
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES_TO_GET):
        if frame is None:
            break
        found += frame.f_code is code
        frame = frame.f_back
    return found


def redeem(ticket: Ticket, skeleton: bytes, wanted: str | None, deadline: Deadline, *, may_call_ray: bool) -> Any:
    """The value. Waits for its bytes, at most until the deadline. Raises TransportError of some kind."""
    here = endpoint()
    source = ticket.origin()
    wish = ticket.wanted if wanted is None else wanted
    choice = choose(source, here.place, wish, backends(), here.blocked, may_call_ray=may_call_ray)
    if choice.names[0] == "local":
        entry = here.store.get(ticket.key)
        if entry is None or entry.nonce != ticket.nonce:
            raise freed(ticket)
        if entry.segment < 0:
            here.counts["local"] += 1
            return _redeem_own(here, entry, ticket, skeleton)
    arrival = _fetch(here, ticket, choice.names, deadline, last_resort=wish != AUTO)
    _check_content(ticket, arrival.blocks)
    if arrival.mutated and ticket.on_mutation == "warn":
        warnings.warn(_mutated_text(ticket), UserWarning, stacklevel=2)
    if arrival.creator_read:
        _warn_shared(ticket)
    return codec.decode(skeleton, _leaves(ticket, arrival))


def _redeem_own(here: Endpoint, entry: Entry, ticket: Ticket, skeleton: bytes) -> Any:
    """Return a value that this very process holds: the producer's own objects, or a copy for a plain task."""
    if _ray.is_task_worker():
        # Tasks share worker processes arbitrarily, so copy instead of aliasing.
        blocks = allocate(ticket, here)
        if not entry.copy_to(blocks):
            raise moved(ticket)
        _check_content(ticket, blocks)
        return codec.decode(skeleton, codec.build(ticket.specs, blocks))
    if not entry.in_place(leaves_too=True):
        raise moved(ticket)
    if ticket.checksum is not None:
        _check_own_content(ticket, entry)
    _, by_remote = here.store.mark_read(entry, creator=True)
    if by_remote:
        _warn_shared(ticket)
    return codec.decode(skeleton, entry.leaves, own=True)


def _check_content(ticket: Ticket, blocks: Sequence[Any]) -> None:
    """Raise TensorMutatedError if these are not the bytes that were published, where the ticket can tell."""
    if ticket.checksum is not None and checksum(blocks) != ticket.checksum:
        raise TensorMutatedError(_mutated_text(ticket), source=ticket.origin().label)


def _check_own_content(ticket: Ticket, entry: Entry) -> None:
    """`_check_content` for the producer's own objects. What was copied at publication (a column of a matrix) is copied
    again, to other addresses, so its block may have another number now than in the ticket."""
    now = codec.plan(entry.leaves)
    number = {then.block: spec.block for then, spec in zip(ticket.specs, now.specs, strict=True)}
    renumbered = [msgspec.structs.replace(then, block=number[then.block]) for then in ticket.specs]
    if renumbered != now.specs or len(now.blocks) != len(ticket.blocks):
        raise TensorMutatedError(_mutated_text(ticket), source=ticket.origin().label)
    blocks = [now.blocks[number[i]] for i in range(len(ticket.blocks))]
    _check_content(ticket, [bytes_at(block.start, block.nbytes) for block in blocks])


def _fetch(here: Endpoint, ticket: Ticket, names: tuple[str, ...], deadline: Deadline, *, last_resort: bool) -> Arrival:
    """Try the transports in order; one that turns out not to exist between these processes is not tried again."""
    source = ticket.origin()
    for name in names:
        try:
            arrival = backends()[name].fetch(ticket, here, deadline)
        except TransportUnavailableError as error:
            here.blocked[name, source.place] = error.message
            if last_resort or name == names[-1]:
                raise
            continue
        here.counts[name] += 1
        here.counts[f"{name}_bytes"] += ticket.nbytes
        return arrival
    raise AssertionError(f"no transport to try for {source}")


def _leaves(ticket: Ticket, arrival: Arrival) -> list[Any]:
    try:
        return codec.build(ticket.specs, arrival.blocks)
    except (RuntimeError, AssertionError) as error:  # torch raises either where there is no CUDA
        devices = sorted({spec.device for spec in ticket.specs if spec.device != "cpu"})
        if not devices:
            raise
        raise TransportUnavailableError(
            f"the value of {ticket.origin()} has tensors on {', '.join(devices)}, which this process does not have "
            f"({error}); move them to the CPU before returning them, or read them on a GPU"
        ) from error


def _mutated_text(ticket: Ticket) -> str:
    return (
        f"a tensor published by {ticket.origin()} was written to in place before or during this read, so the reader "
        "would see another content than was published. Wait for readers with raylane.wait_tensor_freed(tensor), or "
        "publish with snapshot=True"
    )


def _warn_shared(ticket: Ticket) -> None:
    if ticket.on_mutation != "allow":
        warnings.warn(
            f"a value is passed both to {ticket.origin()}, which created it, and to other processes. Its tensors are "
            "not copied for the creator: if that writes to them, the others see it or not depending on when they read. "
            "Publish with snapshot=True, or clone before writing",
            UserWarning,
            stacklevel=2,
        )


def collect(refs: list[Any], timeout_s: float | None) -> list[Any]:
    """`ray.get` that leaves tickets unredeemed. Raises what `ray.get` raises."""
    import ray

    outer = _collecting.depth
    _collecting.depth = _gets_around() + 1
    try:
        values: list[Any] = ray.get(refs, timeout=timeout_s)
    finally:
        _collecting.depth = outer
    return values

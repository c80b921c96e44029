"""Redemption of tickets: unpickling a ticket calls `materialize`, and `raylane.get` calls `redeem`.

`materialize` is named in every ticket. It returns the value or, if the value cannot be had, an *instance* of a
TransportError: Ray raises such an instance itself, with its class, wherever the value would have been used. Unpickling
must not call Ray, apart from one look-up of the cluster's secret per process.
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
from raylane.transport.backends.base import FetchResult, allocate, copy_to_pool, freed_error, moved_error
from raylane.transport.backends.registry import AUTO, adopt, backends
from raylane.transport.choose import choose
from raylane.transport.endpoint import Endpoint, endpoint
from raylane.transport.groups import groups_of_this_process
from raylane.transport.invocation import unpickles_for_wrapper
from raylane.transport.store import Entry
from raylane.transport.ticket import Ticket, checksum, decode_ticket

_FRAMES_TO_GET = 64
"""Number of stack frames searched for `Worker.get_objects`.

Five lie between `materialize` and that method in Ray 2.60, plus those of a user's own unpickling.
"""
_GRACE_S = 0.5
"""Time for a fetch on another thread to report its own timeout error, which says more than the waiter's."""


class _Collecting(threading.local):
    depth = 0


_collecting = _Collecting()
"""Number of nested `ray.get` calls at which `raylane.get` collects tickets in this thread; 0 outside `raylane.get`.

A ticket that is unpickled at this depth is returned unredeemed, as Pending. Tickets at a greater depth belong to
`ray.get` calls of the user's own unpickling code, which needs values.
"""


class Pending:
    """A value that is not fetched yet. Only `raylane.get` and the wrappers of decorated methods see such objects."""

    __slots__ = ("deadline", "future", "skeleton", "ticket")

    def __init__(self, ticket: Ticket, skeleton: bytes) -> None:
        self.ticket = ticket
        self.skeleton = skeleton
        self.future: Future[Any] | None = None
        self.deadline = Deadline(None)

    def start(self, wanted: str | None, deadline: Deadline, *, may_call_ray: bool) -> None:
        """Begin the fetch on a thread of the endpoint. Does not wait."""
        self.deadline = deadline
        self.future = endpoint().fetchers.submit(
            functools.partial(redeem, self.ticket, self.skeleton, wanted, deadline, may_call_ray=may_call_ray)
        )

    def result(self) -> Any:
        """Wait for the value, at most until the deadline of `start`. Raises the fetch's error or a timeout error."""
        if self.future is None:
            raise AssertionError("a pending value was waited for before it was started")
        left = self.deadline.left_s()
        try:
            return self.future.result(None if left is None else left + _GRACE_S)
        except FutureTimeoutError:
            if self.future.done():
                raise  # the fetch's own error, which is a TimeoutError as well
            raise TransferTimeoutError(
                f"could not read the value of {self.ticket.origin()} within {self.deadline.timeout_s} s. Raise the "
                "timeout (or RAYLANE_TIMEOUT_S)"
            ) from None


def materialize(payload: bytes, skeleton: bytes, anchor: object = None, carried: list[Any] | None = None) -> Any:
    """Return the value of a ticket, or a TransportError instance; called by unpickling, with Ray's locks held.

    `anchor` is an argument only so that Ray counts it together with the ticket. `carried` holds the blocks' bytes if
    Ray carried them; they are read-only memory of Ray's object store.
    """
    try:
        ticket = decode_ticket(payload)
    except ValueError as error:
        return ProtocolError(str(error))
    if ticket.inline is not None:
        # bytearray, because the tensors must be writable and bytes are not.
        blocks = [bytearray(block) for block in ticket.inline]
        return codec.decode_value(skeleton, codec.build_leaves(ticket.specs, blocks))
    if carried is not None:
        # The caller may write to its tensors, and the memory of Ray's store is shared and read-only.
        copies = copy_to_pool(ticket, endpoint(), carried)
        return codec.decode_value(skeleton, codec.build_leaves(ticket.specs, copies))
    gets = _enclosing_gets()
    if gets and gets == _collecting.depth:
        return Pending(ticket, skeleton)
    deadline = Deadline(default_timeout_s())
    if not gets and unpickles_for_wrapper():
        # Fetch on another thread: all arguments of the call are then fetched at the same time, and the wrapper waits.
        pending = Pending(ticket, skeleton)
        pending.start(None, deadline, may_call_ray=False)
        return pending
    try:
        return redeem(ticket, skeleton, None, deadline, may_call_ray=False)
    except TransportError as error:
        return error  # Ray raises the returned object itself; a raise here would become an untyped RaySystemError


def _enclosing_gets() -> int:
    """Return the number of `ray.get` calls in the stack of this thread, each one a frame of `Worker.get_objects`.

    0 means that Ray unpickles a task's arguments or an awaited ref.
    """
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
    """Return the value of a ticket; wait for its bytes at most until the deadline. Raises a TransportError."""
    here = endpoint()
    source = ticket.origin()
    wish = ticket.wanted if wanted is None else wanted
    if wanted is None and ticket.groups and not groups_of_this_process(here).keys() & set(ticket.groups):
        here.counts["outside_group"] += 1
        wish = AUTO
    adopt(wish)
    choice = choose(source, here.place, wish, backends(), here.blocked, may_call_ray=may_call_ray)
    if choice.names[0] == "local":
        entry = here.store.get(ticket.key)
        if entry is None or entry.nonce != ticket.nonce:
            raise freed_error(ticket)
        # A snapshot is fetched like any other value below: nobody may write to its sealed memory.
        if entry.segment < 0:
            here.counts["local"] += 1
            return _redeem_own(here, entry, ticket, skeleton)
    result = _fetch(here, ticket, choice.names, deadline, last_resort=wish != AUTO)
    # Before the value is unpickled, so that no code of the user sees other content than was published.
    _check_content(ticket, result.blocks)
    if result.mutated and ticket.on_mutation == "warn":
        warnings.warn(_mutated_text(ticket), UserWarning, stacklevel=2)
    if result.creator_read:
        _warn_shared(ticket)
    return codec.decode_value(skeleton, _build_leaves(ticket, result))


def _redeem_own(here: Endpoint, entry: Entry, ticket: Ticket, skeleton: bytes) -> Any:
    """Return a value that this process holds: the producer's own objects, or a copy for a plain task."""
    if _ray.is_task_worker():
        # Tasks share worker processes arbitrarily, so copy instead of aliasing.
        blocks = allocate(ticket, here)
        if not entry.copy_to(blocks):
            raise moved_error(ticket)
        _check_content(ticket, blocks)
        return codec.decode_value(skeleton, codec.build_leaves(ticket.specs, blocks))
    # The creator gets its own leaves even where other readers get a copy, so those must be intact as well.
    if not entry.is_intact(include_copied=True):
        raise moved_error(ticket)
    if ticket.checksum is not None:
        _check_own_content(ticket, entry)
    _, by_remote = here.store.mark_read(entry, creator=True)
    if by_remote:
        _warn_shared(ticket)
    return codec.decode_value(skeleton, entry.leaves, own=True)


def _check_content(ticket: Ticket, blocks: Sequence[Any]) -> None:
    """Raise TensorMutatedError if the ticket has a checksum and these bytes do not match it."""
    if ticket.checksum is not None and checksum(blocks) != ticket.checksum:
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


def _fetch(
    here: Endpoint, ticket: Ticket, names: tuple[str, ...], deadline: Deadline, *, last_resort: bool
) -> FetchResult:
    """Try the transports in order; remember a transport that does not work between these two processes.

    With `last_resort` the first TransportUnavailableError is raised instead of trying the next transport.
    """
    source = ticket.origin()
    for name in names:
        try:
            result = backends()[name].fetch(ticket, here, deadline)
        except TransportUnavailableError as error:
            # Such a failure is permanent (kernel settings, object layout), so later reads skip the attempt.
            here.blocked[name, source.place] = error.message
            if last_resort or name == names[-1]:
                raise
            continue
        here.counts[name] += 1
        here.counts[f"{name}_bytes"] += ticket.nbytes
        return result
    raise AssertionError(f"no transport to try for {source}")


def _build_leaves(ticket: Ticket, result: FetchResult) -> list[Any]:
    try:
        return codec.build_leaves(ticket.specs, result.blocks)
    except (RuntimeError, AssertionError) as error:  # torch raises either class in a process without CUDA
        devices = sorted({spec.device for spec in ticket.specs if spec.device != "cpu"})
        if not devices:
            raise
        raise TransportUnavailableError(
            f"could not rebuild the value of {ticket.origin()}: its tensors are on {', '.join(devices)}, which this "
            f"process does not have ({error}). Move the tensors to the CPU before returning them, or read them on a GPU"
        ) from error


def _mutated_text(ticket: Ticket) -> str:
    return (
        f"a tensor published by {ticket.origin()} was written to in place before or during this read, so the reader "
        "would see other content than was published. Wait for readers with raylane.wait_tensor_freed(tensor), or "
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


def collect(refs: list[Any], timeout_s: float | None) -> list[Any]:
    """Return the values of refs as `ray.get` does, unredeemed tickets as Pending. Raises the errors of `ray.get`."""
    import ray

    # Ray may unpickle a user's object inside this ray.get, and that object may call raylane.get again.
    outer = _collecting.depth
    _collecting.depth = _enclosing_gets() + 1
    try:
        values: list[Any] = ray.get(refs, timeout=timeout_s)
    finally:
        _collecting.depth = outer
    return values

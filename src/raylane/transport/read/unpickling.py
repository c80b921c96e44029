"""Unpickling of tickets: it calls `materialize`, and `raylane.get` collects tickets to redeem them together.

`materialize` is named in every ticket. It returns the value or, if the value cannot be had, an *instance* of a
TransportError: Ray raises such an instance itself, with its class, wherever the value would have been used. Unpickling
must not call Ray, apart from one look-up of the cluster's secret per process.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import FrameType
from typing import Any

from raylane import _ray
from raylane.core import settings
from raylane.core.deadline import Cancellation, Deadline
from raylane.errors import ProtocolError, TransferTimeoutError, TransportError
from raylane.transport.hold.blocks import copy_to_pool
from raylane.transport.hold.device_memory import as_here
from raylane.transport.link.endpoint import endpoint
from raylane.transport.read.deliver import PLAIN, Delivery, Present, check_target
from raylane.transport.read.invocation import unpickles_for_wrapper
from raylane.transport.read.redeem import redeem
from raylane.transport.read.targets import Destination, Targets, check_apart, match, structure
from raylane.transport.value import codec
from raylane.transport.value.ticket import Ticket, decode_ticket

_FRAMES_TO_GET = 64
"""Number of stack frames searched for `Worker.get_objects`.

Five lie between `materialize` and that method in Ray 2.60, plus those of a user's own unpickling.
"""
_GRACE_S = 0.5
"""Time for a fetch on another thread to report its own timeout error, which says more than the waiter's."""


class _Collecting(threading.local):
    depth = 0
    leaves = False
    """True if values that arrived with their tickets are wanted as Present."""


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

    def match(self, into: Any) -> Targets:
        """Return the targets of this value by the numbers of its leaves."""
        return match(structure(self.skeleton, self.ticket.specs), len(self.ticket.specs), into)

    def destinations(self, targets: Targets) -> list[Destination]:
        """Return the targets of this value with the places of their leaves. ValueError if one does not fit its leaf."""
        destinations = []
        for number, target in targets.all():
            spec = self.ticket.specs[number]
            check_target(spec, target)
            destinations.append(Destination(target, (0, spec.block), spec.offset, spec.strides))
        return destinations

    def redeem(self, transport: str | None, deadline: Deadline, *, may_call_ray: bool, wish: Delivery = PLAIN) -> Any:
        """Return the value; as the function `redeem`."""
        return redeem(self.ticket, self.skeleton, transport, deadline, may_call_ray=may_call_ray, wish=wish)

    def start(self, transport: str | None, deadline: Deadline, *, may_call_ray: bool, wish: Delivery = PLAIN) -> None:
        """Begin the fetch on a thread of the endpoint. Does not wait."""
        self.deadline = deadline
        call = functools.partial(self.redeem, transport, deadline, may_call_ray=may_call_ray, wish=wish)
        self.future = endpoint().fetchers.submit(as_here(call))

    def cancel(self) -> None:
        """End the fetch that `start` has begun; when this returns, nothing is written into targets any more."""
        if self.deadline.cancellation is not None:
            self.deadline.cancellation.cancel()
        # The error of the fetch refers to frames that refer to this object: the cycle would keep tensors in memory.
        self.future = None

    def result(self) -> Any:
        """Wait for the value, at most until the deadline of `start`. Raises the fetch's error or a timeout error."""
        if self.future is None:
            raise AssertionError("a pending value was waited for before it was started")
        remaining_s = self.deadline.left_s()
        try:
            return self.future.result(None if remaining_s is None else remaining_s + _GRACE_S)
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
        return _arrived(ticket, skeleton, [bytearray(block) for block in ticket.inline])
    if carried is not None:
        # The caller may write to its tensors, and the memory of Ray's store is shared and read-only.
        return _arrived(ticket, skeleton, copy_to_pool(ticket, endpoint().pool, carried))
    gets = _enclosing_gets()
    if gets and gets == _collecting.depth:
        return Pending(ticket, skeleton)
    if not gets and unpickles_for_wrapper():
        # Fetch on another thread: all arguments of the call are then fetched at the same time, and the wrapper waits.
        pending = Pending(ticket, skeleton)
        pending.start(None, Deadline(settings.TIMEOUT_S.read(), Cancellation()), may_call_ray=False)
        return pending
    try:
        return redeem(ticket, skeleton, None, Deadline(settings.TIMEOUT_S.read()), may_call_ray=False)
    except TransportError as error:
        return error  # Ray raises the returned object itself; a raise here would become an untyped RaySystemError


def _arrived(ticket: Ticket, skeleton: bytes, blocks: list[Any]) -> Any:
    """Return the value whose blocks came with its ticket; the Present if `raylane.get` asked for it."""
    leaves = codec.build_leaves(ticket.specs, blocks)
    if _collecting.leaves and _enclosing_gets() == _collecting.depth:
        return Present(skeleton, leaves)
    return codec.decode_value(skeleton, leaves)


def _enclosing_gets() -> int:
    """Return the number of `ray.get` calls in the stack of this thread, each one a frame of `Worker.get_objects`.

    0 means that Ray unpickles a task's arguments or an awaited ref.
    """
    count = 0
    code = _ray.get_objects_code()
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES_TO_GET):
        if frame is None:
            break
        count += frame.f_code is code
        frame = frame.f_back
    return count


def collect(
    refs: list[Any], timeout_s: float | None, looks_inside: Sequence[bool] = (), *, lenient: bool = False
) -> list[Any]:
    """Return the values of refs as `ray.get` does, unredeemed tickets as Pending. Raises the errors of `ray.get`.

    Where `looks_inside` is True, every other value is returned as Present. TypeError if it cannot be pickled again, or
    with `lenient`, tensors are found in its dicts, lists and tuples only.
    """
    import ray

    # Ray may unpickle a user's object inside this ray.get, and that object may call raylane.get again.
    outer = _collecting.depth, _collecting.leaves
    _collecting.depth, _collecting.leaves = _enclosing_gets() + 1, any(looks_inside)
    try:
        values: list[Any] = ray.get(refs, timeout=timeout_s)
    finally:
        _collecting.depth, _collecting.leaves = outer
    return [
        Present(*codec.encode_objects(value, lenient=lenient))
        if inside and type(value) not in (Pending, Present)
        else value
        for value, inside in zip(values, looks_inside or [False] * len(values), strict=True)
    ]


def fit(values: Sequence[Any], wishes: Sequence[Delivery]) -> list[Delivery]:
    """Return the wishes with the targets of these values, which are Pending or Present where `into` is used.

    Nothing is written to the targets.
    ValueError or TypeError if targets do not fit their value, or share memory with each other.
    """
    if all(wish.into is None for wish in wishes):
        return list(wishes)
    fitted, destinations = [], []
    for number, (value, wish) in enumerate(zip(values, wishes, strict=True)):
        if wish.into is not None:
            wish = dataclasses.replace(wish, targets=value.match(wish.into))
            for destination in value.destinations(wish.targets):
                destinations.append(destination._replace(memory=(number, destination.memory[1])))
        fitted.append(wish)
    check_apart(destinations)
    return fitted

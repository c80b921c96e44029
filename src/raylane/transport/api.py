"""The public functions of direct transport. They check their options and leave the work to the other modules."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import ray
import torch

from raylane import _ray
from raylane.core import settings
from raylane.core.deadline import Cancellation, Deadline
from raylane.errors import TransferTimeoutError
from raylane.transport.backends.registry import check_name
from raylane.transport.hold.device_memory import as_here
from raylane.transport.link.endpoint import endpoint, existing
from raylane.transport.produce import methods as calls
from raylane.transport.produce.buffers import wait_free
from raylane.transport.produce.options import publish_options
from raylane.transport.produce.publication import Publication, PublishOnPickle
from raylane.transport.read.deliver import Delivery, Present, delivery
from raylane.transport.read.invocation import WRAPPER_ATTRIBUTE
from raylane.transport.read.unpickling import Pending, collect, fit

ABANDONED_AFTER_S = 2.0
"""Interval in seconds at which a thread that waits for a coroutine checks whether the coroutine was cancelled."""

_F = TypeVar("_F", bound=Callable[..., Any])


@overload
def method(function: _F, /) -> _F: ...
@overload
def method(
    *, tensor_transport: str = "auto", snapshot: bool = False, on_mutation: str = "warn", **ray_options: Any
) -> Callable[[_F], _F]: ...
def method(
    function: Any = None,
    /,
    *,
    tensor_transport: str = "auto",
    snapshot: bool = False,
    on_mutation: str = "warn",
    **ray_options: Any,
) -> Any:
    """Decorate an actor method (or a plain task's function) whose tensors should go directly to their readers.

    The method may be sync, async or a generator of either kind. When Ray calls the method, the tensors in its result
    (nested anywhere) stay in this process by reference until every ref to the result is gone; consumers need no
    decorator. Called from Python, the decorated method is the plain method; it warns once in an actor that does not
    inherit it or that overrides it. Other options are passed to `ray.method` (such as `num_returns` and
    `concurrency_group`), which may also be stacked above or below this decorator.

    Options of one call: `raylane.options(actor.method, ...)` or `actor.method.options(tensor_transport=...)`.

    Small CPU values (at most 96 KiB of tensors, under `auto`) travel inside the reply and are copies from the start.

    Args:
        function: The method or function.
        tensor_transport: `auto` (the closest transport that works), `local`, `host`, `tcp`, or `object_store` (Ray
            carries the bytes). Ray always carries the items of a generator.
        snapshot: Copy the tensors once into sealed shared memory when published; readers never see later writes.
        on_mutation: `warn`, `error` or `allow`: reaction of a read that finds a tensor written to since publication.
        **ray_options: Options of `ray.method`.

    Raises:
        ValueError: An option has a value that is not accepted.
        TypeError: An option or the decorated object has the wrong type.
        TransportUnavailableError: The transport is known but not available here.
    """
    options = publish_options(tensor_transport, None, snapshot, on_mutation, where="raylane.method")
    unknown = sorted(set(ray_options) - set(_ray.METHOD_OPTIONS))
    if unknown:
        raise TypeError(
            f"raylane.method got unknown options {', '.join(unknown)}. Its own options are tensor_transport, snapshot "
            f"and on_mutation; those of ray.method are {', '.join(_ray.METHOD_OPTIONS)}"
        )

    def decorate(function: Any) -> Any:
        # Wrap the function inside, so that Python still binds the static or class method.
        if isinstance(function, staticmethod | classmethod):
            return type(function)(decorate(function.__func__))
        if not callable(function) or isinstance(function, type):
            raise TypeError(
                f"raylane.method decorates a method or a function, got {function!r}. Put it below @ray.remote"
            )
        # functools.wraps copies the attribute to functions that call a decorated method: these may be decorated.
        if hasattr(function, WRAPPER_ATTRIBUTE) and getattr(function, WRAPPER_ATTRIBUTE) is function:
            raise TypeError(f"{function.__qualname__} is decorated with raylane.method already. Decorate it once")
        wrapper = calls.wrap(function, options)
        return ray.method(**ray_options)(wrapper) if ray_options else wrapper

    return decorate if function is None else decorate(function)


def put(
    value: Any,
    *,
    tensor_transport: str | None = None,
    snapshot: bool = False,
    on_mutation: str = "warn",
    _tensor_transport: str | None = None,
) -> ray.ObjectRef:
    """Publish a value from this process (driver, task or actor) and return an ordinary ObjectRef to it.

    The tensors stay in this process by reference until the ref is gone everywhere. Returns at once, and copies nothing
    except small values and snapshots. Raises the errors of pickling the rest of the value.

    A streaming generator or a deployment of Ray Serve that returns the ref must keep it until it was read: Ray 2.60
    loses count of such refs, and their readers then get TensorFreedError.

    Args:
        value: Any value that can be pickled, with tensors anywhere inside.
        tensor_transport: The transport, as in `raylane.method`.
        snapshot: Copy the tensors when published, as in `raylane.method`.
        on_mutation: Reaction of readers to a changed tensor, as in `raylane.method`.
        _tensor_transport: Another spelling of `tensor_transport`.
    """
    options = publish_options(tensor_transport, _tensor_transport, snapshot, on_mutation, where="raylane.put")
    if isinstance(value, ray.ObjectRef):
        raise TypeError("raylane.put got an ObjectRef, whose value is published already. Just pass the ref on")
    # The caller of this function, for `raylane memory`: 0.4 us, which a report of leaked memory is worth.
    caller = sys._getframe(1)
    origin = f"put at {caller.f_code.co_filename}:{caller.f_lineno}"
    publication = Publication(options, anchored=False, origin=origin)
    try:
        # Ray pickles the value here, and pickling publishes it.
        ref = ray.put(PublishOnPickle(value, publication))
    except BaseException:
        # Pickling may fail after a part of the value was published, and no ref exists that would free it.
        endpoint().store.free(publication.keys)
        raise
    if publication.keys:  # empty for an inline value, which needs no callback
        publication.free_after(ref)
    return ref


def get(
    refs: Any,
    *,
    timeout: float | None = None,
    tensor_transport: str | None = None,
    into: Any = None,
    device: Any = None,
    dtype: torch.dtype | None = None,
    copy: bool = False,
    _tensor_transport: str | None = None,
) -> Any:
    """Return the value of a ref, or the values of a list of refs, which are fetched at the same time.

    `ray.get` works as well. In contrast, this function applies its timeout to transfers too, can select a transport,
    and can bring the tensors where they are needed.

    The caller owns the tensors and may write to them; in the producing process they are the producer's own tensors
    (with `into` or `copy`, copies of them). Tensors in memory of `raylane.empty` are mapped on the producer's host:
    what the caller writes to them stays in this process, and the producer waits with `raylane.wait_free` until they are
    garbage.

    With `into`, the bytes go straight into existing tensors or arrays, and the value is returned with these in it.
    Shapes and dtypes must be equal; strides may differ, and CUDA tensors may receive CPU tensors and the reverse. Each
    tensor needs a target of its own; a tensor that stands in several places of the value fills all of their targets.
    Targets that do not fit are refused before anything is written. After any other error the content of the targets is
    undefined, but nothing writes to them any more.

    Args:
        refs: A ref, or a list or tuple of refs.
        timeout: Seconds for the producing calls and the transfers together; 0 returns only values that are ready, as
            with `ray.get`. None: the calls have no limit, as with `ray.get`. With 0 and None, the transfers get
            RAYLANE_TIMEOUT_S (60 s).
        tensor_transport: The transport, as in `raylane.method`; `object_store` sends the value through Ray's store.
        into: A tensor or array for a value with one; a list with one for each tensor of the value, in the order of
            `raylane.open(ref).tensors`; or containers like those of the value, such as a state_dict, in which keys may
            be left out. None in place of a tensor means a new one. For a list of refs: a list of these.
        device: Device of all tensors, such as `"cpu"` or `"cuda:0"`; None: as in the producer.
        dtype: Floating-point dtype to which all floating-point tensors are converted; None: as in the producer.
        copy: True for tensors in new memory, which the producer need not wait for.
        _tensor_transport: Another spelling of `tensor_transport`.

    Raises:
        TransferTimeoutError: The timeout has passed.
        SourceLostError: The producing process has died.
        TensorFreedError: The value's memory was freed, resized or re-pointed by its owner.
        TensorMutatedError: A tensor was written to since publication, under `on_mutation="error"`.
        TransportUnavailableError: The selected transport does not work between these processes.
        ValueError: The transport is unknown, or `into` does not fit the value; TypeError likewise.
        Exception: The error of the producing call.
    """
    transport = _wanted(tensor_transport, _tensor_transport)
    deadline = Deadline(timeout, Cancellation())
    return _get(refs, transport, deadline, collect, _wishes(refs, into, device, dtype, copy))


def _wishes(refs: Any, into: Any, device: Any, dtype: Any, copy: bool) -> list[Delivery]:
    """Return the checked wishes for each ref."""
    single = not isinstance(refs, list | tuple)
    if into is None or single:
        return [delivery(into, device, dtype, copy=copy, where="raylane.get")] * (1 if single else len(refs))
    if not isinstance(into, list | tuple) or len(into) != len(refs):
        raise ValueError(
            f"raylane.get: for {len(refs)} refs, into must be a list with {len(refs)} items, one for each value"
        )
    return [delivery(target, device, dtype, copy=copy, where="raylane.get") for target in into]


def _wanted(tensor_transport: str | None, alias: str | None) -> str | None:
    """Return the checked name of the transport that the caller selected, or None if raylane may choose."""
    if tensor_transport is not None and alias is not None and tensor_transport != alias:
        raise ValueError(
            "raylane.get: tensor_transport and _tensor_transport are two spellings of one option. Pass one of them"
        )
    name = tensor_transport if tensor_transport is not None else alias
    return None if name is None else check_name(name)


def _get(
    refs: Any,
    transport: str | None,
    deadline: Deadline,
    collect_within: Callable[..., list[Any]],
    wishes: Sequence[Delivery],
) -> Any:
    """Wait for the producing calls with `collect_within`, then fetch all values at the same time.

    After an error, no thread writes into targets any more when this function raises. The deadline has a cancellation.
    """
    single = not isinstance(refs, list | tuple)
    cancellation = deadline.cancellation
    assert cancellation is not None
    began_ns = time.perf_counter_ns()
    try:
        values = collect_within(
            [refs] if single else list(refs), deadline.left_s(), [not wish.plain for wish in wishes]
        )
    except ray.exceptions.GetTimeoutError as error:
        raise TransferTimeoutError(
            f"raylane.get: not all of the values were produced within {deadline.timeout_s} s. The producing calls are "
            "still running, or waiting for resources; raise the timeout if that is expected"
        ) from error
    process = existing()
    if process is not None:
        process.recorder.waited(began_ns, len(values))
    if deadline.timeout_s is None or deadline.timeout_s == 0:
        # Calls may take as long as they need, but a transfer from a hanging source must end. A timeout of 0 asks for a
        # value that is ready, as this one is.
        deadline = Deadline(settings.TIMEOUT_S.read(), deadline.cancellation)
    fitted = fit(values, wishes)
    pending = [value for value in values if type(value) is Pending]
    try:
        if len(pending) > 1:
            for value, wish in zip(values, fitted, strict=True):
                if type(value) is Pending:
                    value.start(transport, deadline, may_call_ray=True, wish=wish)
        results = []
        for value, wish in zip(values, fitted, strict=True):
            if type(value) is Present:
                results.append(value.deliver(wish, deadline))
            elif type(value) is not Pending:
                results.append(value)
            elif len(pending) > 1:
                results.append(value.result())
            else:  # a single one on this thread, which saves a thread switch
                results.append(value.redeem(transport, deadline, may_call_ray=True, wish=wish))
    except BaseException:
        # The caller may use its targets for something else from now on.
        cancellation.cancel()
        for value in pending:
            value.cancel()
        raise
    return results[0] if single else results


async def get_async(
    refs: Any,
    *,
    timeout: float | None = None,
    tensor_transport: str | None = None,
    into: Any = None,
    device: Any = None,
    dtype: torch.dtype | None = None,
    copy: bool = False,
    _tensor_transport: str | None = None,
) -> Any:
    """Return the value or values as `get` does, without blocking the event loop.

    `await ref` works too, but fetches on the single thread that Ray has for callbacks, where a large transfer delays
    every other ref of the process. Each call of this function waits on a thread of its own, so that no call delays
    another; the timeout begins at once. A cancelled call (for example by `asyncio.wait_for`) interrupts the transfer
    that it has begun, and ends when nothing writes into its targets any more; its thread ends within
    ABANDONED_AFTER_S seconds.

    Args:
        refs: A ref, or a list or tuple of refs.
        timeout: Seconds, as in `get`.
        tensor_transport: The transport, as in `get`.
        into: Tensors to fill, as in `get`.
        device: As in `get`.
        dtype: As in `get`.
        copy: As in `get`.
        _tensor_transport: Another spelling of `tensor_transport`.
    """
    transport, cancellation = _wanted(tensor_transport, _tensor_transport), Cancellation()
    deadline = Deadline(timeout, cancellation)
    wishes = _wishes(refs, into, device, dtype, copy)

    def collect_unless_abandoned(refs: list[Any], timeout_s: float | None, inside: Sequence[bool]) -> list[Any]:
        # A waiting ray.get cannot be interrupted, so wait in short steps and check for the cancellation in between.
        while True:
            remaining_s = deadline.left_s()
            last = remaining_s is not None and remaining_s <= ABANDONED_AFTER_S
            try:
                return collect(refs, remaining_s if last else ABANDONED_AFTER_S, inside)
            except ray.exceptions.GetTimeoutError:
                if last or cancellation.cancelled:
                    raise

    # Not the event loop's own executor: its few threads would be taken by waiting calls.
    future = endpoint().getters.submit(
        as_here(lambda: _get(refs, transport, deadline, collect_unless_abandoned, wishes))
    )
    try:
        return await asyncio.wrap_future(future)
    except BaseException:
        await _cancel(cancellation)
        raise


async def _cancel(cancellation: Cancellation) -> None:
    """Run `cancellation.cancel` without blocking the event loop, and to its end if this task is cancelled again."""
    try:
        done = asyncio.wrap_future(endpoint().getters.submit(cancellation.cancel))
    except RuntimeError:  # the system starts no more threads
        cancellation.cancel()
        return
    while not done.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(done)


def wait_tensor_freed(tensor: Any, timeout: float | None = None) -> None:
    """Do what `raylane.wait_free` does; the name is that of Ray's direct transport.

    Args:
        tensor: As in `wait_free`.
        timeout: As in `wait_free`.
    """
    wait_free(tensor, timeout)


def stats() -> dict[str, Any]:
    """Return the counters of this process.

    They cover values published, inline, carried by Ray, and read by each transport with their bytes; entries held for
    readers and their bytes; actors kept alive; idle links; pooled memory and shared copies in bytes; and transports
    that failed, with the reason. Returns at once. TransportUnavailableError if this process is not connected to Ray.
    """
    return endpoint().stats()


__all__: Sequence[str] = ["get", "get_async", "method", "put", "stats", "wait_tensor_freed"]

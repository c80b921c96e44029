"""The public calls of direct transport. Thin: options are checked here, the work is done by the modules beside it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import ray

from raylane import _ray
from raylane.core.deadline import Deadline, default_timeout_s
from raylane.errors import TransferTimeoutError
from raylane.transport import calls, codec
from raylane.transport.backends.registry import check_name
from raylane.transport.endpoint import endpoint
from raylane.transport.options import publish_options
from raylane.transport.publish import Publication, Returned
from raylane.transport.reader import Pending, collect, redeem

ABANDONED_AFTER_S = 2.0
"""Interval at which a thread that waits for a coroutine checks if the coroutine was cancelled."""

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
    """Decorate an actor method (or a plain task's function) whose tensors should go directly to whoever reads them.

    The method may be sync, async or a generator of either kind. What it returns when Ray calls it, tensors nested
    anywhere in it, stays in this process by reference until every ref to it is gone; consumers need no decorator.
    Called from Python it is the plain method. Other options go to `ray.method` (`num_returns`, `concurrency_group`,
    ...), which may also be stacked above or below this decorator.

    tensor_transport: `auto` (the closest way that works), `local`, `host`, `tcp`, or `object_store` (Ray carries it).
        Items of a generator are always carried by Ray.
    snapshot: copy the tensors once into sealed shared memory when published; later writes are never seen by readers.
    on_mutation: `warn`, `error` or `allow`, for a read that finds a tensor written to since it was published.

    Small CPU values (96 KiB of tensors in all, under `auto`) travel inside the reply and are copies from the start.
    ValueError or TypeError for a bad option; TransportUnavailableError for a transport that is known but not here.
    """
    options = publish_options(tensor_transport, None, snapshot, on_mutation, where="raylane.method")
    unknown = sorted(set(ray_options) - set(_ray.METHOD_OPTIONS))
    if unknown:
        raise TypeError(
            f"raylane.method got unknown options {', '.join(unknown)}; its own are tensor_transport, snapshot and "
            f"on_mutation, and those of ray.method are {', '.join(_ray.METHOD_OPTIONS)}"
        )

    def decorate(function: Any) -> Any:
        if isinstance(function, staticmethod | classmethod):
            return type(function)(decorate(function.__func__))
        if not callable(function) or isinstance(function, type):
            raise TypeError(
                f"raylane.method decorates a method or a function, not {function!r}; put it below @ray.remote"
            )
        if hasattr(function, calls.OPTIONS_ATTRIBUTE):
            raise TypeError(f"{function.__qualname__} is decorated with raylane.method already; once is enough")
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

    The tensors stay here, by reference, until the ref is gone everywhere. Options as in `raylane.method`;
    `_tensor_transport` is another spelling of `tensor_transport`. Returns at once; nothing is copied but small values
    and what `snapshot` copies. Raises what pickling the rest of the value raises.
    """
    options = publish_options(tensor_transport, _tensor_transport, snapshot, on_mutation, where="raylane.put")
    if isinstance(value, ray.ObjectRef):
        raise TypeError("raylane.put was given an ObjectRef: the value is published already, pass the ref on")
    publication = Publication(options, anchored=False)
    try:
        ref = ray.put(Returned(value, publication))
    except BaseException:
        endpoint().store.free(publication.keys)
        raise
    if publication.keys:
        publication.free_after(ref)
    return ref


def get(
    refs: Any,
    *,
    timeout: float | None = None,
    tensor_transport: str | None = None,
    _tensor_transport: str | None = None,
) -> Any:
    """The value of a ref, or the values of a list of refs, fetched at the same time. `ray.get` works as well; this one
    keeps its timeout during transfers and can be told which transport to take.

    timeout: seconds for everything, the producing calls included; 0 takes only what is there and needs no transfer.
        None: the calls may take as long as they take, as with `ray.get`, and the transfers after them get
        RAYLANE_TIMEOUT_S (60 s).
    tensor_transport: as in `raylane.method`; `object_store` sends the value through Ray's object store.

    The tensors belong to the caller and may be written to; in the producing process they are the producer's own.
    Raises what the producing call raised, TransferTimeoutError, SourceLostError, TensorFreedError,
    TransportUnavailableError (all TransportError), ValueError for an unknown transport.
    """
    wanted = _wanted(tensor_transport, _tensor_transport)
    return _get(refs, wanted, Deadline(timeout), collect)


def _wanted(tensor_transport: str | None, alias: str | None) -> str | None:
    """Return the checked name of the transport that `get` was asked for; None if it may choose."""
    if tensor_transport is not None and alias is not None and tensor_transport != alias:
        raise ValueError(
            "raylane.get: tensor_transport and _tensor_transport are two spellings of one option, pass one"
        )
    name = tensor_transport if tensor_transport is not None else alias
    return None if name is None else check_name(name)


def _get(
    refs: Any, wanted: str | None, deadline: Deadline, collect_within: Callable[[list[Any], float | None], list[Any]]
) -> Any:
    single = not isinstance(refs, list | tuple)
    try:
        values = collect_within([refs] if single else list(refs), deadline.left_s())
    except ray.exceptions.GetTimeoutError as error:
        raise TransferTimeoutError(
            f"raylane.get: not all of the values were produced within {deadline.timeout_s} s; the calls that make them "
            "are still running, or waiting for resources"
        ) from error
    limited = deadline.timeout_s is not None
    found = _redeem_all(values, wanted, deadline if limited else Deadline(default_timeout_s()))
    return found[0] if single else found


def _redeem_all(values: list[Any], wanted: str | None, deadline: Deadline) -> list[Any]:
    pending = [value for value in values if type(value) is Pending]
    if len(pending) == 1:  # no thread for one
        one = pending[0]
        fetched = redeem(one.ticket, one.skeleton, wanted, deadline, may_call_ray=True)
        return [fetched if value is one else value for value in values]
    for value in pending:
        value.start(wanted, deadline, may_call_ray=True)
    return [value.result() if type(value) is Pending else value for value in values]


async def get_async(
    refs: Any,
    *,
    timeout: float | None = None,
    tensor_transport: str | None = None,
    _tensor_transport: str | None = None,
) -> Any:
    """`get` for coroutines: the event loop goes on meanwhile. `await ref` works too, but fetches on the one thread that
    Ray has for callbacks, where a large transfer holds up every other ref of the process.

    Each call waits on a thread of its own, so that no call delays another; the timeout begins at once. A call that is
    cancelled (`asyncio.wait_for`, for example) ends at once; its thread ends within ABANDONED_AFTER_S or with a
    transfer that has begun.
    """
    wanted, deadline, abandoned = _wanted(tensor_transport, _tensor_transport), Deadline(timeout), threading.Event()

    def collect_unless_abandoned(refs: list[Any], timeout_s: float | None) -> list[Any]:
        while True:
            left = deadline.left_s()
            last = left is not None and left <= ABANDONED_AFTER_S
            try:
                return collect(refs, left if last else ABANDONED_AFTER_S)
            except ray.exceptions.GetTimeoutError:
                if last or abandoned.is_set():
                    raise

    future = endpoint().getters.submit(lambda: _get(refs, wanted, deadline, collect_unless_abandoned))
    try:
        return await asyncio.wrap_future(future)
    finally:
        abandoned.set()


def wait_tensor_freed(tensor: Any, timeout: float | None = None) -> None:
    """Wait until no published value of this process holds memory of `tensor` (torch tensor or NumPy array), so that
    it may be written to again. Returns at once if none does.

    timeout: seconds; None means RAYLANE_TIMEOUT_S (60 s). TransferTimeoutError (a TimeoutError) if refs are still there
    then. Every ref must be dropped by others meanwhile: a driver that waits for the method that waits here deadlocks.
    """
    if not codec.is_leaf(tensor):
        raise TypeError(f"wait_tensor_freed takes a torch tensor or a NumPy array, not {type(tensor).__name__}")
    deadline = Deadline(default_timeout_s() if timeout is None else timeout)
    if not endpoint().store.wait_freed([codec.span(tensor)], deadline):
        raise TransferTimeoutError(
            f"a tensor of shape {tuple(tensor.shape)} is still referenced after {deadline.timeout_s} s: drop every "
            "ObjectRef to the value that holds it (`del ref` in the process that has it), and end the calls that use it"
        )


def stats() -> dict[str, Any]:
    """Counters of this process: values published, inline, and read by each transport with their bytes; entries held
    for others; refs owned; links; pooled memory in bytes; transports that were tried and do not work, with the reason.
    Returns at once. TransportUnavailableError when not connected to Ray."""
    return endpoint().stats()


__all__: Sequence[str] = ["get", "get_async", "method", "put", "stats", "wait_tensor_freed"]

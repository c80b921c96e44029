"""Tells the calls that Ray makes from those that Python makes, and wraps methods accordingly.

Only the call that Ray makes is published. The same method called from Python, inside the actor or on a plain instance,
is an ordinary method. The rule, tried on some 35 kinds of call: publish if the function that Ray says it is running,
looked up on the actor's class, is this very wrapper, and this task has not been claimed by a wrapper further out.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import warnings
from collections.abc import AsyncIterator, Callable, Generator
from types import GeneratorType
from typing import Any

from raylane import _ray
from raylane.errors import TransportUnavailableError
from raylane.transport.lifetime import keep_actor_alive
from raylane.transport.options import PublishOptions
from raylane.transport.publish import Publication, Returned
from raylane.transport.reader import Pending

_claim: contextvars.ContextVar[bytes | None] = contextvars.ContextVar("raylane_claim", default=None)
"""The task that a wrapper further out in this context has taken; outlives it in tasks and threads it started."""
_running: set[bytes] = set()
"""Tasks of this process that a wrapper has taken and not ended. set.add and set.discard are atomic."""
_targets: dict[tuple[Callable[..., Any], str], bool] = {}
"""Whether a wrapper is what Ray runs under a function name; worked out once for each pair."""

OPTIONS_ATTRIBUTE = "__raylane_options__"
_SELF_ATTRIBUTE = "__raylane_wrapper__"
"""The wrapper itself: a decorator above that copies attributes (functools.wraps) is told from it by this."""


class Call:
    """One call by Ray of one wrapper, claimed for as long as it runs."""

    __slots__ = ("options", "streams", "task_id")

    def __init__(self, task_id: bytes, options: PublishOptions, *, streams: bool) -> None:
        self.task_id = task_id
        self.options = options
        self.streams = streams

    def __enter__(self) -> Call:
        _claim.set(self.task_id)
        _running.add(self.task_id)
        return self

    def __exit__(self, *_: object) -> None:
        # Set, not reset: a generator may end in another context than it began in.
        _claim.set(None)
        _running.discard(self.task_id)

    def publish(self, value: Any) -> Any:
        """What to hand to Ray for the method's result."""
        if _ray.is_canceled():
            return value
        if isinstance(value, GeneratorType):  # made by a function that is none itself: Ray takes its items one by one
            return self._items(value)
        return Returned(value, Publication(self.options, anchored=True, streams=self.streams))

    def _items(self, values: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        self.streams = True
        with self:
            for value in values:
                yield self.publish(value)


def _is_target(wrapper: Callable[..., Any], name: str) -> bool:
    """Whether Ray runs this wrapper under the function name it reports (`module.Class.method`, `script.function`)."""
    found = _targets.get((wrapper, name))
    if found is None:
        last = name.rpartition(".")[2]
        if _ray.current_actor_id() is not None:
            target = _ray.actor_target(last)
            found = target is wrapper
            if not found and getattr(target, _SELF_ATTRIBUTE, None) is wrapper:
                warnings.warn(
                    f"{wrapper.__qualname__} has a decorator above raylane.method, which would get tickets instead "
                    "of tensors: its result goes through Ray's object store. Put @raylane.method on top",
                    UserWarning,
                    stacklevel=4,
                )
        else:
            found = _is_task_function(wrapper, name, last)
        _targets[wrapper, name] = found
    return found


def _is_task_function(wrapper: Callable[..., Any], name: str, last: str) -> bool:
    qualified: str = wrapper.__qualname__
    if "<locals>" in qualified:  # Ray shortens such names; the last part is all that can be compared
        return last == wrapper.__name__
    if not name.endswith(qualified):
        return False
    # A driver script's functions are in __main__, and Ray names its file instead.
    return wrapper.__module__ == "__main__" or name == f"{wrapper.__module__}.{qualified}"


def is_outermost(wrapper: Callable[..., Any]) -> bytes | None:
    """The task id if Ray itself made this call and nobody further out has claimed it; else None. About 2 us."""
    identity = _ray.call_identity()
    if identity is None:
        return None
    name, task_id = identity
    if task_id in _running or _claim.get() == task_id or not _is_target(wrapper, name):
        return None
    return task_id


def begin(wrapper: Callable[..., Any], *, streams: bool = False) -> Call | None:
    """The call, if it is one of Ray's; None for Python's own, which goes straight to the function."""
    task_id = is_outermost(wrapper)
    return None if task_id is None else Call(task_id, getattr(wrapper, OPTIONS_ATTRIBUTE), streams=streams)


def receive(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with those that are still being fetched waited for. Raises what a fetch raised."""
    return tuple(_ready(a) for a in args), {name: _ready(a) for name, a in kwargs.items()}


def _ready(value: Any) -> Any:
    return value.result() if type(value) is Pending else value


async def receive_async(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`receive` that lets the event loop go on."""
    futures = [a.future for a in (*args, *kwargs.values()) if type(a) is Pending]
    waiting = [asyncio.wrap_future(future) for future in futures if future is not None]
    if waiting:
        await asyncio.wait(waiting)
    return receive(args, kwargs)


def wrap(function: Callable[..., Any], options: PublishOptions) -> Callable[..., Any]:
    """The function under its own name and signature, publishing when Ray calls it.

    The wrapper may be pickled by value together with the user's class, globals and all: it touches nothing but names
    of this module, which are pickled by reference. It has no `__wrapped__`, because Ray reads `num_returns` and the
    like from the unwrapped function and would miss what `ray.method` wrote on this one.
    """
    generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    if generator and options.tensor_transport not in ("auto", "object_store"):
        raise TransportUnavailableError(
            f"tensor_transport={options.tensor_transport!r} is not available for {function.__qualname__}, a generator: "
            "Ray loses count of refs nested in streamed items, so Ray itself carries them. Use auto, or return a list"
        )
    wrapper = _choose_wrapper(function)
    functools.update_wrapper(wrapper, function)
    del wrapper.__wrapped__  # type: ignore[attr-defined]
    wrapper.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    setattr(wrapper, OPTIONS_ATTRIBUTE, options)
    setattr(wrapper, _SELF_ATTRIBUTE, wrapper)
    setattr(wrapper, _ray.INVOCATION_HOOK, keep_actor_alive)
    return wrapper


def _choose_wrapper(function: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.isasyncgenfunction(function):
        return _wrap_async_generator(function)
    if inspect.iscoroutinefunction(function):
        return _wrap_coroutine(function)
    if inspect.isgeneratorfunction(function):
        return _wrap_generator(function)
    return _wrap_function(function)


def _wrap_function(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        call = begin(wrapper)
        if call is None:
            return function(*args, **kwargs)
        with call:
            args, kwargs = receive(args, kwargs)
            return call.publish(function(*args, **kwargs))

    return wrapper


def _wrap_coroutine(function: Callable[..., Any]) -> Callable[..., Any]:
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        call = begin(wrapper)
        if call is None:
            return await function(*args, **kwargs)
        with call:
            args, kwargs = await receive_async(args, kwargs)
            return call.publish(await function(*args, **kwargs))

    return wrapper


def _wrap_generator(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        call = begin(wrapper, streams=True)
        if call is None:
            return (yield from function(*args, **kwargs))
        with call:
            args, kwargs = receive(args, kwargs)
            for value in function(*args, **kwargs):
                yield call.publish(value)
        return None

    return wrapper


def _wrap_async_generator(function: Callable[..., Any]) -> Callable[..., Any]:
    async def wrapper(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        call = begin(wrapper, streams=True)
        if call is None:
            async for value in function(*args, **kwargs):
                yield value
            return
        with call:
            args, kwargs = await receive_async(args, kwargs)
            async for value in function(*args, **kwargs):
                yield call.publish(value)

    return wrapper


def runs_a_wrapper() -> bool:
    """Whether Ray is about to call a decorated method in this thread and now unpickles its arguments."""
    identity = _ray.call_identity()
    if identity is None:
        return False
    name, task_id = identity
    if task_id in _running:
        return False
    target = _ray.actor_target(name.rpartition(".")[2])
    return target is not None and getattr(target, _SELF_ATTRIBUTE, None) is target

"""Wrappers of decorated methods: publish the result when Ray made the call, and pass Python's own calls through.

`invocation` decides which calls Ray made. Called by `raylane.method`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Generator
from types import GeneratorType
from typing import Any

from raylane import _ray
from raylane.transport.invocation import WRAPPER_ATTRIBUTE, claim, release, task_to_publish
from raylane.transport.options import PublishOptions
from raylane.transport.publish import Publication, PublishOnPickle
from raylane.transport.reader import Pending
from raylane.transport.submission import check_generator, keep_actor_alive

OPTIONS_ATTRIBUTE = "__raylane_options__"


class PublishingCall:
    """One call of one wrapper by Ray, as a context manager that claims the task while the call runs."""

    __slots__ = ("options", "streams", "task_id")

    def __init__(self, task_id: bytes, options: PublishOptions, *, streams: bool) -> None:
        self.task_id = task_id
        self.options = options
        self.streams = streams

    def __enter__(self) -> PublishingCall:
        claim(self.task_id)
        return self

    def __exit__(self, *_: object) -> None:
        release(self.task_id)

    def publish(self, value: Any) -> Any:
        """Return the object to give to Ray in place of the method's result."""
        if _ray.is_canceled():  # Ray discards the result, so no reader would come
            return value
        if isinstance(value, GeneratorType):
            # A plain function has returned a generator. Ray takes its items one by one, so publish each item.
            return self._items(value)
        return PublishOnPickle(value, Publication(self.options, anchored=True, streams=self.streams))

    def _items(self, values: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        self.streams = True
        with self:
            for value in values:
                yield self.publish(value)


def begin(wrapper: Callable[..., Any], kwargs: dict[str, Any], *, streams: bool = False) -> PublishingCall | None:
    """Return the call if Ray made it, or None for a call from Python, which goes straight to the function.

    Takes the options of this one call out of its keyword arguments.
    """
    options = kwargs.pop(_ray.OPTIONS_KEYWORD, None) or getattr(wrapper, OPTIONS_ATTRIBUTE)
    task_id = task_to_publish(wrapper)
    return None if task_id is None else PublishingCall(task_id, options, streams=streams)


def receive(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments after waiting for the ones that are still being fetched. Raises the errors of the fetch."""
    return tuple(_ready(a) for a in args), {name: _ready(a) for name, a in kwargs.items()}


def _ready(value: Any) -> Any:
    return value.result() if type(value) is Pending else value


async def receive_async(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Do the same as `receive` without blocking the event loop."""
    futures = [a.future for a in (*args, *kwargs.values()) if type(a) is Pending]
    waiting = [asyncio.wrap_future(future) for future in futures if future is not None]
    if waiting:
        # `wait` raises no errors of the fetches; `receive` then raises the first one in the order of the arguments.
        await asyncio.wait(waiting)
    return receive(args, kwargs)


def _with_options(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature with the keyword for options of one call: Ray checks arguments against it."""
    keyword = inspect.Parameter(_ray.OPTIONS_KEYWORD, inspect.Parameter.KEYWORD_ONLY, default=None)
    parameters = list(signature.parameters.values())
    last = len(parameters) - (bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    return signature.replace(parameters=[*parameters[:last], keyword, *parameters[last:]])


def wrap(function: Callable[..., Any], options: PublishOptions) -> Callable[..., Any]:
    """Return a wrapper with the name and signature of `function` that publishes the result when Ray calls it.

    Ray may pickle the wrapper by value together with the user's class, including its globals. The wrapper therefore
    uses only names of this module, which are pickled by reference. It has no `__wrapped__`, because Ray reads
    `num_returns` and similar options from the unwrapped function and would miss those that `ray.method` wrote on the
    wrapper.
    """
    generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    if generator:
        check_generator(function.__qualname__, options)
    if inspect.isasyncgenfunction(function):
        wrapper = _wrap_async_generator(function)
    elif inspect.iscoroutinefunction(function):
        wrapper = _wrap_coroutine(function)
    elif generator:
        wrapper = _wrap_generator(function)
    else:
        wrapper = _wrap_function(function)
    # Before the attributes below: this copies the attributes of `function`, such as the options of ray.method.
    functools.update_wrapper(wrapper, function)
    del wrapper.__wrapped__  # type: ignore[attr-defined]
    wrapper.__signature__ = _with_options(inspect.signature(function))  # type: ignore[attr-defined]
    setattr(wrapper, OPTIONS_ATTRIBUTE, options)
    setattr(wrapper, WRAPPER_ATTRIBUTE, wrapper)
    setattr(wrapper, _ray.INVOCATION_HOOK, keep_actor_alive)
    return wrapper


# Four wrappers, because Ray inspects a method's kind: each wrapper has to be of the same kind as its function.


def _wrap_function(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        call = begin(wrapper, kwargs)
        if call is None:
            return function(*args, **kwargs)
        with call:
            args, kwargs = receive(args, kwargs)
            return call.publish(function(*args, **kwargs))

    return wrapper


def _wrap_coroutine(function: Callable[..., Any]) -> Callable[..., Any]:
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        call = begin(wrapper, kwargs)
        if call is None:
            return await function(*args, **kwargs)
        with call:
            args, kwargs = await receive_async(args, kwargs)
            return call.publish(await function(*args, **kwargs))

    return wrapper


def _wrap_generator(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        call = begin(wrapper, kwargs, streams=True)
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
        call = begin(wrapper, kwargs, streams=True)
        if call is None:
            async for value in function(*args, **kwargs):
                yield value
            return
        with call:
            args, kwargs = await receive_async(args, kwargs)
            async for value in function(*args, **kwargs):
                yield call.publish(value)

    return wrapper

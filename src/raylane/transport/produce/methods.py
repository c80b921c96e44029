"""Calls of methods with direct transport, on both sides.

The wrapper of a decorated method publishes the result when Ray made the call, and passes Python's own calls through
(`invocation` decides which calls Ray made). In the caller, a hook keeps the actor alive for its results. Options of one
call, by `raylane.options(actor.method, ...)` or `actor.method.options(tensor_transport=...)`, reach the actor so:

    decorated method    -> in a keyword argument that the wrapper takes out
    any other method    -> Ray runs `call_and_publish` in the actor, which calls the method and publishes its result
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Generator
from types import GeneratorType
from typing import Any

import ray

from raylane import _ray
from raylane.errors import TransportUnavailableError
from raylane.transport.backends.base import AUTO
from raylane.transport.link.endpoint import endpoint
from raylane.transport.produce.options import PublishOptions, publish_options
from raylane.transport.produce.publication import Publication, PublishOnPickle
from raylane.transport.read.invocation import WRAPPER_ATTRIBUTE, claim, release, task_to_publish
from raylane.transport.read.unpickling import Pending

OPTIONS_ATTRIBUTE = "__raylane_options__"


class PublishingCall:
    """One call of one wrapper by Ray, as a context manager that claims the task while the call runs."""

    __slots__ = ("name", "options", "streams", "task_id")

    def __init__(self, task_id: bytes, name: str, options: PublishOptions, *, streams: bool) -> None:
        self.task_id = task_id
        self.name = name
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
        return PublishOnPickle(value, Publication(self.options, anchored=True, origin=self.name, streams=self.streams))

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
    return None if task_id is None else PublishingCall(task_id, wrapper.__qualname__, options, streams=streams)


def receive(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments after waiting for the ones that are still being fetched. Raises the errors of the fetch."""
    try:
        return tuple(_ready(a) for a in args), {name: _ready(a) for name, a in kwargs.items()}
    except BaseException:
        _cancel(args, kwargs)
        raise


def _cancel(args: Any, kwargs: Any) -> None:
    """End the fetches of arguments of a call that will not run."""
    for argument in (*args, *kwargs.values()):
        if type(argument) is Pending:
            argument.cancel()


def _ready(value: Any) -> Any:
    return value.result() if type(value) is Pending else value


async def receive_async(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Do the same as `receive` without blocking the event loop."""
    futures = [a.future for a in (*args, *kwargs.values()) if type(a) is Pending]
    waiting = [asyncio.wrap_future(future) for future in futures if future is not None]
    if waiting:
        try:
            # `wait` raises no errors of the fetches; `receive` then raises the first one in the order of the arguments.
            await asyncio.wait(waiting)
        except BaseException:  # the call was cancelled
            _cancel(args, kwargs)
            raise
    return receive(args, kwargs)


def keep_actor_alive(invocation: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the actor of a call alive for the returned refs. Ray runs this hook in the caller of a decorated method.

    The hook is an attribute of the method that stock Ray reads; Ray pickles this function by name.
    """

    method = _ray.called_method(invocation)
    if method is None:  # a plain task
        return invocation

    def submit(args: Any, kwargs: Any) -> Any:
        return _watched(invocation(args, kwargs), method)

    return submit


def _watched(returned: Any, method: Any) -> Any:
    """Return what a call of a method returned, after the actor is kept alive for its refs."""
    if type(returned) is ray.ObjectRef:  # most calls
        endpoint().keeper().watch(returned, method)
    elif isinstance(returned, list):
        keeper = endpoint().keeper()
        for ref in returned:
            keeper.watch(ref, method)
    return returned


def check_generator(name: str, options: PublishOptions) -> None:
    """Raise TransportUnavailableError if the items of a generator cannot travel with these options."""
    if options.tensor_transport != AUTO and not options.by_ray:
        raise TransportUnavailableError(
            f"tensor_transport={options.tensor_transport!r} is not available for {name}, a generator: Ray loses count "
            "of refs nested in streamed items, so Ray itself carries them. Use auto, or return a list"
        )


def _with_options(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature with the keyword for options of one call: Ray checks arguments against it."""
    if _ray.OPTIONS_KEYWORD in signature.parameters:  # copied by functools.wraps from a decorated method
        return signature
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


# Options of one call


class MethodWithOptions:
    """An actor method with options for its next calls; returned by `raylane.options`."""

    def __init__(self, method: Any, bound: Any, publish: PublishOptions, ray_options: dict[str, Any]) -> None:
        self._method = method
        self._publish = publish
        self._ray_options = ray_options
        self._actor, self._name, self._returns, _ = bound
        self._declared = {} if _is_decorated(method) else _ray.declared_options(method)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Submit a call; returns what `actor.method.remote` returns. Does not wait."""
        if _is_decorated(self._method):
            kwargs[_ray.OPTIONS_KEYWORD] = self._publish
            return _ray.submit(self._method, args, kwargs, self._ray_options)
        call = self._actor.__ray_call__
        # Under its own name in Ray's dashboard, and with the options that the method declares.
        options = {"name": self._name, "num_returns": self._returns} | self._declared | self._ray_options
        returned = _ray.submit(call, (call_and_publish, self._name, self._publish, *args), kwargs, options)
        return _watched(returned, self._method)

    def __repr__(self) -> str:
        return f"MethodWithOptions({self._name}, {self._publish})"


def _is_decorated(method: Any) -> bool:
    return _ray.hook_of(method) is keep_actor_alive


def options(
    method: Any,
    *,
    tensor_transport: str = AUTO,
    snapshot: bool = False,
    on_mutation: str = "warn",
    **ray_options: Any,
) -> MethodWithOptions:
    """Return an actor method with options for its calls: `raylane.options(actor.method, ...).remote(...)`.

    The method need not be decorated: the tensors of its result then stay in the actor as if it were. For a method that
    is decorated, the options replace those of the decorator, and `actor.method.options(tensor_transport=...)` is the
    same.

    Args:
        method: A method of an actor handle, such as `actor.method`.
        tensor_transport: As in `raylane.method`.
        snapshot: As in `raylane.method`.
        on_mutation: As in `raylane.method`.
        **ray_options: Options of `actor.method.options`, such as `num_returns` and `concurrency_group`.

    Raises:
        TypeError: `method` is no method of an actor handle, or is an async method without `raylane.method`.
        ValueError: An option has a value that is not accepted.
        TransportUnavailableError: The transport is known but not available here, or not for a generator.
    """
    bound = _ray.bound_method(method)
    if bound is None or not _ray.is_handle(bound[0]):
        raise TypeError(f"raylane.options takes a method of an actor handle, such as actor.method, got {method!r}")
    checked = publish_options(tensor_transport, None, snapshot, on_mutation, where="raylane.options")
    if _ray.is_generator_method(method):
        check_generator(bound[1], checked)
        if not _is_decorated(method):
            raise TypeError(
                f"raylane.options cannot publish the items of {bound[1]}, a generator without a "
                "decorator. Decorate it with raylane.method"
            )
    return MethodWithOptions(method, bound, checked, ray_options)


def options_of_ray(method: Any, keywords: dict[str, Any]) -> MethodWithOptions | None:
    """Answer `actor.method.options(...)` for decorated methods with a transport; None leaves the answer to Ray."""
    if keywords.get("tensor_transport") is None or not _is_decorated(method):
        return None
    return options(method, **keywords)


def call_and_publish(actor: Any, name: str, publish: PublishOptions, *args: Any, **kwargs: Any) -> Any:
    """Call a method and publish its result; runs in the actor, called by Ray."""
    function: Callable[..., Any] = getattr(actor, name)
    if inspect.iscoroutinefunction(function):
        raise TypeError(f"raylane.options cannot call {name}, an async method. Decorate it with raylane.method")
    identity = _ray.call_identity()
    assert identity is not None  # Ray made this call
    # Claims the task: a decorated method that is called inside does not warn that its tensors are in Ray's store.
    with PublishingCall(identity[1], f"{type(actor).__qualname__}.{name}", publish, streams=False) as call:
        return call.publish(function(*args, **kwargs))


_ray.answer_options_first(options_of_ray)

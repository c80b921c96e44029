"""The caller's side of a call: actors that live as long as their results, and options of direct transport for one call.

Options are given by `raylane.options(actor.method, ...)` or `actor.method.options(tensor_transport=...)`:

decorated method    -> the options travel in a keyword argument that the wrapper takes out
any other method    -> Ray runs `call_and_publish` in the actor, which calls the method and publishes its result
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import ray

from raylane import _ray
from raylane.errors import TransportUnavailableError
from raylane.transport.endpoint import endpoint
from raylane.transport.options import PublishOptions, publish_options
from raylane.transport.publish import Publication, PublishOnPickle

__all__ = ["MethodWithOptions", "check_generator", "keep_actor_alive", "options"]


def keep_actor_alive(invocation: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the actor of a call alive for the returned refs. Ray runs this hook in the caller of a decorated method.

    The hook is an attribute of the method that stock Ray reads; Ray pickles this function by name.
    """

    def submit(args: Any, kwargs: Any) -> Any:
        returned = invocation(args, kwargs)
        for ref in returned if isinstance(returned, list) else [returned]:
            if type(ref) is ray.ObjectRef and _ray.is_actor_call(ref):
                # `invocation` holds the actor's handle.
                endpoint().keeper().watch(ref, invocation)
        return returned

    return submit


def check_generator(name: str, options: PublishOptions) -> None:
    """Raise TransportUnavailableError if the items of a generator cannot travel with these options."""
    if options.tensor_transport not in ("auto", "object_store"):
        raise TransportUnavailableError(
            f"tensor_transport={options.tensor_transport!r} is not available for {name}, a generator: Ray loses count "
            "of refs nested in streamed items, so Ray itself carries them. Use auto, or return a list"
        )


class MethodWithOptions:
    """An actor method with options for its next calls; returned by `raylane.options`."""

    def __init__(self, method: Any, bound: Any, publish: PublishOptions, ray_options: dict[str, Any]) -> None:
        self._method = method
        self._publish = publish
        self._ray_options = ray_options
        self._actor, self._name, self._returns, _ = bound

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Submit a call; returns what `actor.method.remote` returns. Does not wait."""
        if _is_decorated(self._method):
            kwargs[_ray.OPTIONS_KEYWORD] = self._publish
            return _ray.submit(self._method, args, kwargs, self._ray_options)
        call = self._actor.__ray_call__
        # Under its own name in Ray's dashboard, and with the number of returns that the method declares.
        options = {"name": self._name, "num_returns": self._returns} | self._ray_options
        submit = keep_actor_alive(lambda args, kwargs: _ray.submit(call, args, kwargs, options))
        return submit((call_and_publish, self._name, self._publish, *args), kwargs)

    def __repr__(self) -> str:
        return f"MethodWithOptions({self._name}, {self._publish})"


def _is_decorated(method: Any) -> bool:
    return _ray.hook_of(method) is keep_actor_alive


def options(
    method: Any,
    *,
    tensor_transport: str = "auto",
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
    found = publish_options(tensor_transport, None, snapshot, on_mutation, where="raylane.options")
    if _ray.is_generator_method(method):
        check_generator(bound[1], found)
        if not _is_decorated(method):
            raise TypeError(
                f"raylane.options cannot publish the items of {bound[1]}, a generator without a "
                "decorator. Decorate it with raylane.method"
            )
    return MethodWithOptions(method, bound, found, ray_options)


def options_of_ray(method: Any, given: dict[str, Any]) -> MethodWithOptions | None:
    """Answer `actor.method.options(...)` for decorated methods with a transport; None leaves the answer to Ray."""
    if given.get("tensor_transport") is None or not _is_decorated(method):
        return None
    return options(method, **given)


def call_and_publish(actor: Any, name: str, publish: PublishOptions, *args: Any, **kwargs: Any) -> Any:
    """Call a method and publish its result; runs in the actor, called by Ray."""
    function: Callable[..., Any] = getattr(actor, name)
    if inspect.iscoroutinefunction(function):
        raise TypeError(f"raylane.options cannot call {name}, an async method. Decorate it with raylane.method")
    value = function(*args, **kwargs)
    return value if _ray.is_canceled() else PublishOnPickle(value, Publication(publish, anchored=True))


_ray.answer_options_first(options_of_ray)

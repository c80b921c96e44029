"""Checks of a call against the worker class, on the driver, before anything is sent. Pure; used by `WorkerGroup`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any


def check_worker_class(worker_class: object) -> None:
    """Raise TypeError unless `worker_class` is a plain class."""
    if not isinstance(worker_class, type):
        raise TypeError(
            f"worker_class must be a plain class, got {type(worker_class).__name__}. "
            "If it is decorated with @ray.remote, take the decorator off: the group makes the actors itself"
        )


def check_call(worker_class: type, method: str, num_positional: int, keywords: Iterable[str]) -> None:
    """Raise unless `worker_class` has this public method and it accepts these arguments.

    AttributeError if the method does not exist (the message suggests a similar name). TypeError if an argument is
    missing, unknown or given twice, or if the method is a coroutine or a generator, which has no single result.
    """
    function: Any = getattr(worker_class, method, None)
    if not callable(function) or method.startswith("_"):
        public = sorted(name for name in dir(worker_class) if not name.startswith("_"))
        methods = [name for name in public if callable(getattr(worker_class, name, None))]
        close = get_close_matches(method, methods, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise AttributeError(
            f"{worker_class.__name__} has no public method {method!r}{hint} It has: {', '.join(methods)}"
        )
    where = f"{worker_class.__name__}.{method}"
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{where} is asynchronous; workers of a group run plain methods. Make the method synchronous")
    if inspect.isgeneratorfunction(function):
        raise TypeError(f"{where} is a generator. Return a list instead")
    bound_to_self = not isinstance(inspect.getattr_static(worker_class, method), (staticmethod, classmethod))
    _bind(where, inspect.signature(function), [None] * (num_positional + bound_to_self), dict.fromkeys(keywords))


def check_constructor(worker_class: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError if the class cannot be constructed with these arguments."""
    _bind(worker_class.__name__, inspect.signature(worker_class), args, kwargs)


def _bind(where: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError if these arguments do not fit."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        # For `dta=` instead of `data=`, Python names only `data`, which is missing.
        unknown = [name for name in kwargs if name not in signature.parameters]
        close = {name: near for name in unknown for near in get_close_matches(name, list(signature.parameters), n=1)}
        meant = ", ".join(f"{name!r} (did you mean {near!r}?)" for name, near in close.items())
        hint = f". It has no argument {meant}" if meant else ""
        raise TypeError(f"{where}{signature}: {error}{hint}") from None

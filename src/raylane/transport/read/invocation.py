"""Recognition of the calls that Ray itself makes, as opposed to calls from Python code.

Only the call that Ray makes is published. The same method called from Python, inside the actor or on a plain instance,
is an ordinary method. The rule, tested with some 35 kinds of call: publish if the function that Ray reports as running,
looked up on the actor's class, is this very wrapper, and no outer wrapper has claimed the task.

Called by the wrappers in `calls` and by `reader`, which unpickles the arguments of such calls.
"""

from __future__ import annotations

import contextvars
import warnings
from collections.abc import Callable
from typing import Any

from raylane import _ray

_claimed: contextvars.ContextVar[bytes | None] = contextvars.ContextVar("raylane_claimed", default=None)
"""Task claimed by an outer wrapper of this context; still set in tasks and threads that outlive the wrapper."""
_running: set[bytes] = set()
"""Tasks of this process that a wrapper has claimed and not finished. set.add and set.discard are atomic."""
_targets: dict[tuple[Callable[..., Any], str], bool] = {}
"""Cache of `_is_target`, by wrapper and function name."""

WRAPPER_ATTRIBUTE = "__raylane_wrapper__"
"""Attribute of a wrapper that refers to the wrapper itself.

A decorator above it that copies attributes (functools.wraps) has the attribute too, but refers to another function.
"""


def claim(task_id: bytes) -> None:
    """Claim a task for the wrapper that runs it, so that wrappers called inside do not publish."""
    _claimed.set(task_id)
    _running.add(task_id)


def release(task_id: bytes) -> None:
    """End the claim on a task."""
    # Set to None instead of a reset by token: a generator may end in another context than the one it began in.
    _claimed.set(None)
    _running.discard(task_id)


def _is_target(wrapper: Callable[..., Any], name: str) -> bool:
    """Return True if Ray runs this wrapper under the function name it reports (`module.Class.method`)."""
    # Cached: the look-up walks Ray's function name and the class of the actor, on every call.
    is_target = _targets.get((wrapper, name))
    if is_target is None:
        last = name.rpartition(".")[2]
        if _ray.current_actor_id() is not None:
            target = _ray.actor_target(last)
            is_target = target is wrapper
            if not is_target and (reason := _why_by_ray(wrapper, target, name)) is not None:
                warnings.warn(reason, UserWarning, stacklevel=5)  # at the line that called the wrapper
        else:
            is_target = _is_task_function(wrapper, name, last)
        _targets[wrapper, name] = is_target
    return is_target


def _why_by_ray(wrapper: Callable[..., Any], target: Any, name: str) -> str | None:
    """Return why Ray carries the result of a wrapper that it does not call itself.

    None for a function, and for a method of the same actor under another name: an actor may use its own methods as
    plain ones. `target` is what Ray calls, under the name `name`.
    """
    method, called = wrapper.__qualname__, name.rpartition(".")[2]
    if getattr(target, WRAPPER_ATTRIBUTE, None) is wrapper:
        return (
            f"{method} has a decorator above raylane.method, which would get tickets instead of tensors, so its result "
            "goes through Ray's object store. Put @raylane.method on top"
        )
    hidden = called == wrapper.__name__  # an override or a class decorator has taken its place
    owner = method.rpartition(".")[0]
    if not owner or owner.endswith("<locals>") or (_is_inherited(wrapper.__module__, owner) and not hidden):
        return None
    remedy = f"Decorate {called} with raylane.method, or return raylane.put(...) from it"
    if name.startswith("ray."):  # an actor of Ray, such as a replica of Ray Serve, which nobody can decorate
        remedy = (
            f"Let {method} return raylane.put(...) without a decorator, and keep the ref until it was read, because "
            "Ray 2.60 can lose count of refs that Ray Serve returns"
        )
    return (
        f"{name} called {method}, a method with raylane.method that Ray did not call itself, so the tensors stay in "
        f"its result as usual, and pass through Ray's object store if {called} returns them. {remedy}"
    )


def _is_inherited(module: str, owner: str) -> bool:
    """Return True if the actor of this process inherits the class of this qualified name."""
    return any(
        (module, owner) == (base.__module__, base.__qualname__) for base in (_ray.actor_class() or object).__mro__
    )


def _is_task_function(wrapper: Callable[..., Any], name: str, last: str) -> bool:
    """Return True if `name` (`script.function`) is the name that Ray gives the wrapped function of a plain task."""
    qualified: str = wrapper.__qualname__
    if "<locals>" in qualified:  # Ray shortens such names, so only the last part can be compared
        return last == wrapper.__name__
    if not name.endswith(qualified):
        return False
    # A function of a driver script is in __main__, where Ray uses the name of the script's file instead.
    return wrapper.__module__ == "__main__" or name == f"{wrapper.__module__}.{qualified}"


def task_to_publish(wrapper: Callable[..., Any]) -> bytes | None:
    """Return the task id if Ray itself made this call and no outer wrapper has claimed it, else None. About 2 us."""
    identity = _ray.call_identity()
    if identity is None:
        return None
    name, task_id = identity
    # Both are needed: `_running` covers threads of the task, which have other contexts, and `_claimed` covers work
    # that was started inside the wrapper and goes on after its end.
    if task_id in _running or _claimed.get() == task_id or not _is_target(wrapper, name):
        return None
    return task_id


def unpickles_for_wrapper() -> bool:
    """Return True if this thread unpickles the arguments of a decorated method that Ray is about to call."""
    identity = _ray.call_identity()
    if identity is None:
        return False
    name, task_id = identity
    if task_id in _running:  # the method runs already, so this is some other unpickling
        return False
    target = _ray.actor_target(name.rpartition(".")[2])
    return target is not None and getattr(target, WRAPPER_ATTRIBUTE, None) is target

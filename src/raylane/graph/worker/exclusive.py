"""Mutual exclusion of a graph's methods and an actor's ordinary calls (`compile(exclusive=True)`).

While at least one exclusive graph runs in the actor, every method that Ray calls there takes the graph loop's lock.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable
from typing import Any

from raylane import _ray

_graphs = 0
"""Number of exclusive graphs in this process."""
_undo: Any = None
"""Function that removes the lock from ordinary calls."""
_lock = threading.Lock()  # guards both


def add_graph(instance: Any, exclusive: threading.RLock) -> None:
    """Count one more exclusive graph; with the first, ordinary calls begin to take the lock."""
    global _graphs, _undo
    with _lock:
        if not _graphs:
            _undo = _ray.wrap_actor_calls(instance, functools.partial(_holding, lock=exclusive))
        _graphs += 1


def remove_graph(instance: Any) -> None:
    """Count one exclusive graph less; with the last, ordinary calls no longer take the lock."""
    global _graphs, _undo
    with _lock:
        _graphs -= 1
        if not _graphs:
            undo, _undo = _undo, None
            undo()


def _holding(method: Callable[..., Any], lock: Any) -> Callable[..., Any]:
    """Return a method of the same kind that holds `lock` while it runs."""
    if isinstance(method, types.MethodType):  # a class method, which Ray calls without an instance
        return types.MethodType(_holding(method.__func__, lock), method.__self__)
    if inspect.isgeneratorfunction(method):

        @functools.wraps(method)
        def items(*args: Any, **kwargs: Any) -> Any:
            with lock:
                yield from method(*args, **kwargs)

        return items

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return method(*args, **kwargs)

    return call

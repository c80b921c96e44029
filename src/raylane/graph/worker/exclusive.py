"""Keeps a graph's methods and an actor's ordinary calls from running at the same time (`compile(exclusive=True)`).

While at least one exclusive graph lives in the actor, every method that Ray calls there takes the lane's lock first.
"""

from __future__ import annotations

import threading
from typing import Any

from raylane import _ray

_entered = 0
_undo: Any = None
_lock = threading.Lock()  # guards both


def enter(instance: Any, exclusive: threading.RLock) -> None:
    """One more exclusive graph."""
    global _entered, _undo
    with _lock:
        if not _entered:
            _undo = _ray.guard_actor_calls(instance, exclusive)
        _entered += 1


def leave(instance: Any) -> None:
    """One less; with the last, ordinary calls are as they were."""
    global _entered, _undo
    with _lock:
        _entered -= 1
        if not _entered:
            undo, _undo = _undo, None
            undo()

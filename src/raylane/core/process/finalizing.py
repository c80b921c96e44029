"""Finalizers: those that a forked child does not run, and what one may do to an object that has a lock."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

_Item = TypeVar("_Item")


def finalize_here(owner: object, function: Callable[..., object], *args: Any) -> weakref.finalize[..., Any]:
    """Call a function when an object is garbage, or when this process exits; not in children that are forked.

    What an object of the parent holds is the parent's.
    """
    return weakref.finalize(owner, _call_in, os.getpid(), function, *args)


def _call_in(pid: int, function: Callable[..., object], *args: Any) -> None:
    if os.getpid() == pid:
        function(*args)


def hand_over(item: _Item, inbox: deque[_Item], lock: threading.Lock, empty_inbox: Callable[[], object]) -> None:
    """Put something in a deque, from a finalizer, and call `empty_inbox` with the lock held if nobody holds it.

    Python may run a finalizer at any allocation, even in a thread that holds the lock: waiting would deadlock. Whoever
    holds the lock next calls `empty_inbox` first.
    """
    inbox.append(item)
    if lock.acquire(blocking=False):
        try:
            empty_inbox()
        finally:
            lock.release()

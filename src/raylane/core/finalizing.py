"""Finalizers that a forked child does not run: what an object of its parent holds is the parent's."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any


def finalize_here(owner: object, function: Callable[..., object], *args: Any) -> weakref.finalize[..., Any]:
    """Call a function when an object is garbage, or when this process exits; not in children that are forked."""
    return weakref.finalize(owner, _call_in, os.getpid(), function, *args)


def _call_in(pid: int, function: Callable[..., object], *args: Any) -> None:
    if os.getpid() == pid:
        function(*args)

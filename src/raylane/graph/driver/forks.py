"""Disown compiled graphs in forked children: whatever a child did with a graph would look like the parent's doing."""

from __future__ import annotations

import os
import weakref
from typing import Any

_registered: weakref.WeakSet[Any] = weakref.WeakSet()


def register(part: Any) -> None:
    """Call `disown` of this part of a graph in every child that is forked during its life."""
    _registered.add(part)


def _after_fork() -> None:
    for part in list(_registered):
        part.disown()


os.register_at_fork(after_in_child=_after_fork)

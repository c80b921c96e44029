"""Disown compiled graphs in forked children: whatever a child did with a graph would look like the parent's doing."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Disownable(Protocol):
    """Object that must be disowned in a forked child."""

    def disown(self) -> None:
        """Stop using everything that is shared with the parent process. Called in the child."""


_registered: weakref.WeakSet[Disownable] = weakref.WeakSet()


def register(graph: Disownable) -> None:
    """Disown this graph in every child that is forked during the graph's life."""
    _registered.add(graph)


def _after_fork() -> None:
    for graph in list(_registered):
        graph.disown()


os.register_at_fork(after_in_child=_after_fork)

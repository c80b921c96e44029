"""A forked child has copies of its parent's graphs and no part in them: what it did would look like the parent's."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Disownable(Protocol):
    """A graph, as far as forks are concerned."""

    def disown(self) -> None:
        """In the child: touch nothing that is shared with the parent from now on."""


_living: weakref.WeakSet[Disownable] = weakref.WeakSet()


def register(graph: Disownable) -> None:
    """Disown this graph in every child that is forked as long as it lives."""
    _living.add(graph)


def _after_fork() -> None:
    for graph in list(_living):
        graph.disown()


os.register_at_fork(after_in_child=_after_fork)

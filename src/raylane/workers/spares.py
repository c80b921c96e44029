"""Processes beside a group that wait to take the place of a worker that dies: starting one takes seconds.

A spare has started Python, torch and Ray, and holds no worker. It takes no resources of Ray: those of the worker that
died stay reserved in the placement group. Called by `group`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

ANSWER_S = 1.0
"""Seconds in which a spare answers before it is taken."""


class Spares:
    """A number of spares, which are replaced when they are taken."""

    def __init__(self, count: int) -> None:
        """Keep so many."""
        self._count = count
        self._seats: dict[Any, Any] = {}
        """Actors, and the call by which each tells where it is."""
        self._started = 0

    def fill(self, start: Callable[[int], Any]) -> None:
        """Start those that are missing: `start(number)` creates the actor of one without waiting."""
        while len(self._seats) < self._count:
            actor = start(self._started)
            self._started += 1
            self._seats[actor] = actor.take_seat.remote(-1)

    def take(self, node_id: str) -> Any | None:
        """Return a spare that is ready on this node; None if there is none. Forget those that died."""
        if not self._seats:
            return None
        ready, _ = ray.wait(list(self._seats.values()), num_returns=len(self._seats), timeout=0)
        for actor in [actor for actor, seat in self._seats.items() if seat in ready]:
            try:
                is_here = ray.get(actor.take_seat.remote(-1), timeout=ANSWER_S).node_id == node_id
            except RayError:  # it has died since
                del self._seats[actor]
                continue
            if is_here:
                del self._seats[actor]
                return actor
        return None

    def end(self) -> list[Any]:
        """Forget all spares; return their actors, which the caller ends."""
        actors = list(self._seats)
        self._seats.clear()
        return actors

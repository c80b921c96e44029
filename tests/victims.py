"""Actors for tests that kill them, started ahead: a new one is ready, or nearly, when the next test asks for it.

An actor takes one to three seconds to start, most of it imports of its process. Leak checks leave out the actors that
wait here (`waiting_ids`); the fixture `victims` of tests/conftest.py ends them with the module.
"""

from __future__ import annotations

from typing import Any


class Victims:
    """Waiting actors, one of each class and options that were asked for."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[Any, ...], Any] = {}

    def take(self, cls: type, **options: Any) -> Any:
        """Return an actor, which now belongs to the caller, and start its successor."""
        key = (cls, *sorted(options.items()))
        actor = self._waiting.pop(key, None) or self._start(cls, options)
        if "<locals>" not in cls.__qualname__:  # nobody asks a second time for a class that a test has defined
            self._waiting[key] = self._start(cls, options)
        return actor

    @staticmethod
    def _start(cls: type, options: dict[str, Any]) -> Any:
        import ray

        return ray.remote(**{"num_cpus": 0, **options})(cls).remote()

    def waiting_ids(self) -> frozenset[str]:
        """Return the ids of the actors that wait."""
        return frozenset(actor._actor_id.hex() for actor in self._waiting.values())

    def end(self) -> None:
        """Kill the actors that wait."""
        import ray

        for actor in self._waiting.values():
            ray.kill(actor)
        self._waiting.clear()


VICTIMS = Victims()

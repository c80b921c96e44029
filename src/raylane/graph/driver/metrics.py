"""Counters of graphs in `ray.util.metrics`, from where Ray exports them to Prometheus. Used by `CompiledGraph`.

Nothing is counted twice: the counters are those of `stats`, and a publication adds what is new since the one before.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from typing import Any

from ray.util import metrics

from raylane.graph.inspect.counters import COUNTERS, CounterKey, counters_of

TAGS = {"actor": ("graph", "actor"), "edge": ("graph", "edge"), "": ("graph",)}
"""Tag keys of a counter, by the tag of `CounterKey`."""


@functools.cache
def ray_counter(name: str, tag: str) -> Any:
    """Return Ray's counter of this name. One for each process: Ray would warn of a second one."""
    return metrics.Counter(name, COUNTERS[name], TAGS[tag])


class Publisher:
    """Publisher of one graph's counters. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _published
        self._published: dict[CounterKey, float] = {}
        """Value of each counter that was published."""

    def publish(self, graph: str, stats: Mapping[str, Any]) -> None:
        """Add to Ray's counters what `stats` has more than at the last publication. `graph` is the tag of all."""
        with self._lock:
            for key, value in counters_of(stats).items():
                new = value - self._published.get(key, 0)
                # Less than before if an actor did not answer: the next publication has its counters again.
                if new > 0:
                    ray_counter(key.counter, key.tag).inc(new, {"graph": graph, **key.tags})
                    self._published[key] = value

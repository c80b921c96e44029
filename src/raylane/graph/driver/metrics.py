"""Counters of graphs in `ray.util.metrics`, from where Ray exports them to Prometheus. Used by `CompiledGraph`.

Nothing is counted twice: the counters are those of `stats`, and a publication adds what is new since the one before.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from ray.util import metrics

COUNTERS = {
    "raylane_graph_executions_submitted": "Executions started.",
    "raylane_graph_executions_completed": "Executions of which every message was read.",
    "raylane_graph_waiting_seconds": "Seconds that an actor of the graph waited for inputs.",
    "raylane_graph_computing_seconds": "Seconds that an actor of the graph spent in methods.",
    "raylane_graph_sending_seconds": "Seconds that an actor of the graph spent sending results.",
    "raylane_graph_edge_messages": "Messages read from an edge.",
    "raylane_graph_edge_bytes": "Bytes read from an edge.",
}
"""Name and description of each counter."""
_SECONDS = {
    "wait_s": "raylane_graph_waiting_seconds",
    "compute_s": "raylane_graph_computing_seconds",
    "send_s": "raylane_graph_sending_seconds",
}


class CounterKey(NamedTuple):
    """Counter with its tag: the actor or the edge, or an empty tag for counters of the whole graph."""

    counter: str
    tag: str
    value: str

    @property
    def tags(self) -> dict[str, str]:
        """Tags as a dict."""
        return {self.tag: self.value} if self.tag else {}


def counters_of(stats: Mapping[str, Any]) -> dict[CounterKey, float]:
    """Return the counters in the result of `CompiledGraph.stats`. Seconds are summed over the calls of an actor."""
    counters: dict[CounterKey, float] = {
        CounterKey(f"raylane_graph_executions_{kind}", "", ""): count for kind, count in stats["executions"].items()
    }
    for call in stats["calls"].values():
        for field, counter in _SECONDS.items():
            key = CounterKey(counter, "actor", call["actor"])
            counters[key] = counters.get(key, 0.0) + call[field]
    for edge, numbers in stats["edges"].items():
        counters[CounterKey("raylane_graph_edge_messages", "edge", edge)] = numbers["count"]
        counters[CounterKey("raylane_graph_edge_bytes", "edge", edge)] = numbers["bytes"]
    return counters


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
        self._published: dict[tuple[CounterKey, int], float] = {}
        """Value that was published, by counter and the process that counts."""

    def publish(self, graph: str, stats: Mapping[str, Any], processes: Mapping[str, int]) -> None:
        """Add to Ray's counters what `stats` has more than at the last publication. `graph` is the tag of all.

        `processes` has the process that counts, by actor and edge: a new one has begun with 0.
        """
        with self._lock:
            for key, value in counters_of(stats).items():
                counted = key, processes.get(key.value, 0)
                new = value - self._published.get(counted, 0)
                # Less than before if an actor did not answer: the next publication has its counters again.
                if new > 0:
                    ray_counter(key.counter, key.tag).inc(new, {"graph": graph, **key.tags})
                    self._published[counted] = value

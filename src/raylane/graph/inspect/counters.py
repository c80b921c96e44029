"""Counters of a graph as flat numbers with tags, for systems that collect metrics. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

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

"""Counters of a graph, put together from the answers of its actors. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from raylane.graph.plan.ir import Plan


def graph_stats(plan: Plan, answers: dict[int, Any], collected: dict[int, tuple[int, int]]) -> dict[str, Any]:
    """Return `calls`, `edges` and `lent_bytes` as `CompiledGraph.stats` documents them.

    `answers` has the counters of each member that answered; `collected` maps an edge to the (messages, bytes) that the
    driver has read.
    """
    calls: dict[str, Any] = {}
    edges: dict[str, Any] = {}
    for edge in plan.edges:
        edges[edge_label(plan, edge.index)] = {
            "count": max(_received(edge.index, "count", answers, collected), default=0),
            "bytes": max(_received(edge.index, "bytes", answers, collected), default=0),
        }
    for member, answer in answers.items():
        for task, numbers in answer["tasks"].items():
            calls[plan.labels[task]] = {"actor": plan.members[member], **numbers}
    lent = {plan.members[member]: answer["lent_bytes"] for member, answer in answers.items()}
    return {"calls": calls, "edges": edges, "lent_bytes": lent}


def _received(edge: int, counter: str, answers: dict[int, Any], collected: dict[int, tuple[int, int]]) -> Iterable[int]:
    """Yield a counter of each reader of an edge. They are equal except for executions under way."""
    yield from (answer["received"][edge][counter] for answer in answers.values() if edge in answer["received"])
    if edge in collected:
        yield collected[edge][counter == "bytes"]


def edge_label(plan: Plan, edge: int) -> str:
    """Return a name such as `input -> Encoder` or `Encoder.forward -> Head, driver`."""
    found = plan.edges[edge]
    return f"{plan.source_label(found.value)} -> {', '.join(plan.members[reader] for reader in found.readers)}"

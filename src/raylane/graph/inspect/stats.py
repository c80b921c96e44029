"""Counters of a graph, put together from the answers of its actors, and in words where the time went. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raylane.graph.inspect.arrivals import Arrivals, CallRecord
from raylane.graph.plan.ir import Plan

WORTH_NAMING = 0.01
"""Least share of the time that is named in words."""


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
            "transport": edge.transport,
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
    planned = plan.edges[edge]
    return f"{plan.source_label(planned.value)} -> {', '.join(plan.members[reader] for reader in planned.readers)}"


def spent_of_answers(answers: Mapping[int, Any]) -> dict[int, Sequence[float]]:
    """Return the seconds that each actor waited, computed and sent since the graph was compiled, from its counters."""
    kinds = ("wait_s", "compute_s", "send_s")
    return {
        member: [sum(numbers[kind] for numbers in answer["tasks"].values()) for kind in kinds]
        for member, answer in answers.items()
    }


def spent_of_records(plan: Plan, calls: Iterable[CallRecord]) -> dict[int, Sequence[float]]:
    """Return the seconds that each actor waited, computed and sent in these calls."""
    spent: dict[int, Sequence[float]] = {}
    for task, _, ready_s, start_s, end_s, sent_s in calls:
        member = plan.tasks[task].member
        before = spent.get(member, (0.0, 0.0, 0.0))
        new = (max(0.0, start_s - ready_s), end_s - start_s, sent_s - end_s)
        spent[member] = [earlier + other for earlier, other in zip(before, new, strict=True)]
    return spent


def where_time_went(plan: Plan, spent: Mapping[int, Sequence[float]], arrivals: Arrivals) -> dict[str, str]:
    """Return for each actor in words where its time went.

    An example is `waited 93% of the time (for W#2 86%, for driver 7%), computed 6%, sent 1%`. `spent` has the seconds
    of each actor; `arrivals` the records of its last calls, which name the members that it waited for.
    """
    waits = arrivals.waits()
    words = {}
    for member in sorted(spent):
        name, total_s = plan.members[member], sum(spent[member])
        if not total_s:
            words[name] = "no call yet"
            continue
        waited, computed, sent = (seconds / total_s for seconds in spent[member])
        waits_of_member = waits.get(member, {})
        recorded_s = sum(waits_of_member.values()) or 1.0
        # A wait for the actor itself is a late wake-up or other work of the actor: nobody to name.
        shares = {other: waited * seconds / recorded_s for other, seconds in waits_of_member.items() if other != member}
        largest = sorted(shares.items(), key=lambda item: (-item[1], item[0]))
        named = [f"for {plan.members[other]} {share:.0%}" for other, share in largest if share >= WORTH_NAMING]
        waited_for = f" ({', '.join(named)})" if named else ""
        words[name] = f"waited {waited:.0%} of the time{waited_for}, computed {computed:.0%}, sent {sent:.0%}"
    return words

"""What can be seen of a graph that runs: its counters and its last executions, asked of every actor. Called by
`CompiledGraph`; the pictures themselves are made by `show`, `drawing` and `tracing`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from raylane.errors import GraphError
from raylane.graph.driver.deploy import Wiring
from raylane.graph.inspect.trace import chrome_trace
from raylane.graph.plan.ir import Plan


def ask_all(wiring: Wiring, word: str) -> tuple[dict[int, Any], list[str]]:
    """(member to answer, who did not answer in time or is dead)."""
    answers, silent = {}, []
    for member in range(1, len(wiring.plan.members)):
        try:
            answers[member] = wiring.ask(member, word)
        except GraphError:
            silent.append(wiring.hellos[member - 1].who)
    return answers, silent


def stats(plan: Plan, wiring: Wiring, driver: dict[str, Any], collected: dict[int, tuple[int, int]]) -> dict[str, Any]:
    """`CompiledGraph.stats` without its own part; `collected` is edge to (messages, bytes) that the driver read."""
    answers, silent = ask_all(wiring, "stats")
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
    lent["driver"] = wiring.lent_bytes()
    return {**driver, "calls": calls, "edges": edges, "lent_bytes": lent, "unanswered": silent}


def _received(edge: int, what: str, answers: dict[int, Any], collected: dict[int, tuple[int, int]]) -> Iterable[int]:
    """A number of every reader of an edge; they agree but for executions under way."""
    yield from (answer["received"][edge][what] for answer in answers.values() if edge in answer["received"])
    if edge in collected:
        yield collected[edge][what == "bytes"]


def edge_label(plan: Plan, edge: int) -> str:
    """`input -> Encoder`, `Encoder.forward -> Head, driver`."""
    found = plan.edges[edge]
    return f"{plan.source_label(found.value)} -> {', '.join(plan.members[reader] for reader in found.readers)}"


def write_trace(path: str | Path, wiring: Wiring, executions: list[tuple[int, float, float]]) -> list[str]:
    """Write the last executions as a Chrome/Perfetto trace; returns who did not answer."""
    answers, silent = ask_all(wiring, "trace")
    calls = [
        (task, execution, *(at_s - offset_s for at_s in times))
        for member, records in answers.items()
        for offset_s in [wiring.clock_offset_s(member)]
        for task, execution, *times in records
    ]
    pids = {member: hello.place.pid for member, hello in enumerate(wiring.hellos, 1)}
    trace = chrome_trace(wiring.plan, calls, executions, pids=pids)
    save_trace(path, trace)
    return silent


def save_trace(path: str | Path, trace: dict[str, Any]) -> None:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(trace))

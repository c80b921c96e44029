"""What a running graph says of itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import raylane

pytestmark = pytest.mark.usefixtures("clean")
Compile = Callable[..., Any]


@pytest.mark.claim("graphs", "counters are always on, also as Ray metrics, and in words where the time went")
def test_a_graph_shows_counts_draws_and_traces_itself(workers: list[Any], graph: Compile, tmp_path: Path) -> None:
    def write(x: Any) -> Any:
        made = raylane.bind(workers[0].echo, x)
        return raylane.MultiOutputNode([raylane.bind(worker.total, made) for worker in workers[1:3]])

    g = graph(write, max_inflight=3)
    value = np.ones(50_000)
    for _ in range(7):
        assert g.execute(value).get() == [50_000, 50_000]

    text = g.show()
    assert "graph of 3 actors, 3 calls, 4 edges; at most 3 executions in flight" in text
    assert text.count("shared memory") == 4

    found = g.stats()
    assert found["executions"] == {"submitted": 7, "completed": 7}
    assert {name: numbers["count"] for name, numbers in found["calls"].items()} == {
        "Worker#1.echo": 7,
        "Worker#2.total": 7,
        "Worker#3.total": 7,
    }
    assert all(numbers["compute_s"] >= 0 for numbers in found["calls"].values())
    carried = found["edges"]["Worker#1.echo -> Worker#2, Worker#3"]
    assert carried["count"] == 7
    assert carried["bytes"] >= 7 * value.nbytes
    assert found["unanswered"] == []

    g.draw(tmp_path / "graph.md")
    assert (tmp_path / "graph.md").read_text().startswith("```mermaid\n%% graph of ")
    assert g.trace(tmp_path / "run.json") == []
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert any("echo" in name for name in names)
    assert len({event["pid"] for event in events}) == 4


def test_a_busy_actor_does_not_answer_and_can_still_be_left(workers: list[Any], graph: Compile) -> None:
    a = workers[0]
    ray.get(a.hold_again.remote())
    g = graph(lambda x: raylane.bind(a.wait, x))
    result = g.execute(1)
    for _ in range(5):
        with pytest.raises(TimeoutError):
            g._connections.control.ask(1, "stats", timeout_s=0.01)
    ray.get(a.release.remote())
    assert result.get() == 1
    assert g.stats()["calls"]["Worker.wait"]["count"] == 1  # the right answer, not one of those given up


def test_a_graph_that_was_torn_down_still_has_its_counters(workers: list[Any], tmp_path: Path) -> None:
    with raylane.InputNode() as x:
        node = raylane.bind(workers[1].echo, raylane.bind(workers[0].echo, x))
    g = raylane.compile(node)
    g.execute(1).get()
    g.teardown()
    asked: list[Any] = []  # the actors would not answer, for five seconds each
    g._connections.control._send = lambda *order: asked.append(order)
    stats = g.stats()
    assert stats["executions"] == {"submitted": 1, "completed": 1}
    assert len(stats["unanswered"]) == 2
    assert len(g.trace(tmp_path / "run.json")) == 2
    assert not asked

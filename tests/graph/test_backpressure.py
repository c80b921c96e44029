"""Readers that keep all memory of a sender: who waits then, and who must not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from tests.graph.graph_actors import Worker

import raylane
from raylane.errors import GraphActorDiedError, GraphFullError, GraphPlanError, GraphTimeoutError

Compile = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("clean")
COUNT = 125_000
"""Numbers of an array of 1 MB."""


def exhaust(g: Any) -> tuple[list[Any], Any]:
    """Keep results until the actor has no memory for the next one, which is returned too."""
    kept = []
    while True:
        result = g.execute(COUNT)
        try:
            kept.append(result.get(timeout=1.5))
        except GraphTimeoutError:
            return kept, result


def test_lane_without_memory_serves_other_graphs(workers: list[Any], graph: Compile) -> None:
    full = graph(lambda x: raylane.bind(workers[0].ones, x), max_lent_bytes=8 << 20, timeout=120)
    other = graph(lambda x: raylane.bind(workers[0].echo, x))
    kept, waiting = exhaust(full)
    assert [other.execute(i).get(timeout=30) for i in range(20)] == list(range(20))
    assert full.stats()["unanswered"] == []  # and obeys orders
    assert not waiting.done()
    kept.clear()
    assert float(waiting.get(timeout=60).sum()) == COUNT
    del waiting
    assert float(full.execute(COUNT).get().sum()) == COUNT


def test_value_waiting_for_memory_arrives_as_it_was_returned(workers: list[Any], graph: Compile) -> None:
    """The method's array may be written to by other calls while its message waits."""
    worker = workers[0]
    full = graph(lambda x: raylane.bind(worker.shared_ones, x), max_lent_bytes=8 << 20, timeout=120)
    kept, waiting = exhaust(full)
    ray.get(worker.spoil.remote())
    kept.clear()
    assert float(waiting.get(timeout=60).sum()) == COUNT
    ray.get(worker.forget_shared.remote())


@pytest.mark.slow
def test_memory_that_does_not_come_back_names_its_holder(workers: list[Any], graph: Compile) -> None:
    full = graph(lambda x: raylane.bind(workers[0].ones, x), max_lent_bytes=8 << 20, timeout=2)
    kept: list[Any] = []

    def fill() -> None:
        while True:
            kept.append(full.execute(COUNT).get(timeout=60))

    with pytest.raises(GraphTimeoutError, match=r"driver .* holds \d+ bytes"):
        fill()
    kept.clear()
    assert float(full.execute(COUNT).get(timeout=60).sum()) == COUNT


@pytest.mark.slow
def test_execute_waiting_for_memory_ends_with_the_graph(ray_session: None, graph: Compile) -> None:
    doomed = ray.remote(num_cpus=0.1)(Worker).remote()
    g = graph(lambda x: raylane.bind(doomed.keep, x), max_lent_bytes=4 << 20, timeout=None)
    g.timeout_s = None
    g._connections.pool.timeout_s = None
    value = np.ones(COUNT)
    while g._connections.pool.leased_bytes() + (1 << 20) <= 4 << 20:
        g.execute(value).get()
    caught: list[BaseException] = []

    def submit() -> None:
        try:
            g.execute(value).get(timeout=60)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=submit, daemon=True)
    thread.start()
    ray.kill(doomed)
    thread.join(30)
    assert not thread.is_alive()
    assert isinstance(caught[0], GraphActorDiedError)


def test_nowait_and_asyncio_do_not_wait_for_memory(workers: list[Any], graph: Compile) -> None:
    worker = workers[0]
    g = graph(lambda x: raylane.bind(worker.keep, x), max_lent_bytes=3 << 20, timeout=60)
    value = np.ones(COUNT)
    assert [g.execute(value).get() for _ in range(2)] == [1, 2]
    assert g.execute_nowait(value).get() == 3
    with pytest.raises(GraphFullError, match="no memory for this input: readers keep arrays"):
        g.execute_nowait(value)

    async def main() -> int:
        waiting = asyncio.ensure_future(g.execute_async(value))
        for _ in range(10):  # the loop goes on
            await asyncio.sleep(0.001)
        assert not waiting.done()
        await asyncio.to_thread(lambda: ray.get(worker.drop.remote()))
        return await (await waiting)

    assert asyncio.run(main()) == 1
    ray.get(worker.drop.remote())


def test_trace_larger_than_what_edges_may_lend_is_written(workers: list[Any], graph: Compile, tmp_path: Path) -> None:
    g = graph(lambda x: raylane.bind(workers[0].echo, x), max_lent_bytes=100_000, max_inflight=8)
    made = [g.execute(i) for i in range(3000)]
    assert [result.get() for result in made] == list(range(3000))
    assert g.trace(tmp_path / "trace.json") == []
    assert g.execute(1).get() == 1


def test_channels_that_cannot_be_made_are_a_plan_error(workers: list[Any], graph: Compile) -> None:
    with pytest.raises(GraphPlanError, match=r"cannot create the channels of 2 edges .* Lower max_inflight"):
        graph(lambda x: raylane.bind(workers[0].echo, x), max_inflight=1 << 44)

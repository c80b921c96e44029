"""Graphs of many actors, and many graphs of two actors: all run, within 1,024 descriptors, and leave nothing behind."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from tests.graph.graph_actors import Worker

import raylane

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]
Eventually = Callable[..., None]
DESCRIPTORS = 1024
"""The usual `ulimit -n`."""
MADE: list[Any] = []
"""Actors of the test that runs."""


@pytest.fixture
def start(cluster: None) -> Iterator[Callable[[int], list[Any]]]:
    """Return a function that starts actors. They are killed after the test."""

    def start(count: int) -> list[Any]:
        MADE.extend(ray.remote(num_cpus=0)(Worker).remote() for _ in range(count))
        ray.get([worker.__ray_ready__.remote() for worker in MADE], timeout=300)
        return list(MADE)

    yield start
    for worker in MADE:
        ray.kill(worker)
    MADE.clear()


def limit_descriptors(_: Any = None) -> int:
    """Set the usual limit in this process. Return the number of descriptors that are open."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, hard))
    return open_descriptors()


def open_descriptors(_: Any = None) -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit_descriptors()
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def left(workers: list[Any]) -> list[str]:
    return [text for found in ray.get([worker.left.remote() for worker in workers], timeout=60) for text in found]


@pytest.mark.usefixtures("few_descriptors")
@pytest.mark.parametrize("count", [24, pytest.param(64, marks=pytest.mark.matrix)])
def test_scatter_and_gather_over_many_actors(start: Any, eventually: Eventually, count: int) -> None:
    workers = start(count)
    with raylane.InputNode() as x:
        parts = raylane.graph.scatter(x, len(workers))
        sums = [raylane.bind(workers[i].add, part, [i]) for i, part in enumerate(parts)]
        node = raylane.bind(workers[0].echo, raylane.graph.gather(sums))
    with raylane.compile(node, timeout=120) as g:
        for round in range(20):
            values = [round * 1000 + i for i in range(2 * count)]
            expected = [[*values[2 * i : 2 * i + 2], i] for i in range(count)]
            assert g.execute(values).get() == expected
        assert g.stats()["executions"] == {"submitted": 20, "completed": 20}
    eventually(lambda: not left(workers), within_s=30)


@pytest.mark.usefixtures("few_descriptors")
def test_1000_idle_graphs_share_two_actors(start: Any, eventually: Eventually) -> None:
    workers = start(2)
    ray.get([worker.__ray_call__.remote(limit_descriptors) for worker in workers])
    graphs: list[Any] = []
    try:
        compile_chain(workers, graphs)  # what a process holds once, not for each graph
        before = open_descriptors(), ray.get([worker.__ray_call__.remote(open_descriptors) for worker in workers])
        for _ in range(999):
            compile_chain(workers, graphs)
        after = open_descriptors(), ray.get([worker.__ray_call__.remote(open_descriptors) for worker in workers])
        # Ray opens connections of its own meanwhile.
        assert after[0] <= before[0] + 10
        assert all(now <= then + 10 for then, now in zip(before[1], after[1], strict=True))
        assert [graphs[500].execute(i).get() for i in range(100)] == [2 * i for i in range(100)]
        assert [graphs[i].execute(i).get() for i in range(0, 1000, 50)] == [2 * i for i in range(0, 1000, 50)]
    finally:
        for g in graphs:
            g.teardown()
        graphs.clear()
    eventually(lambda: not left(workers), within_s=30)


def compile_chain(workers: list[Any], graphs: list[Any]) -> None:
    """Compile a graph that doubles its input."""
    with raylane.InputNode() as x:
        graphs.append(raylane.compile(raylane.bind(workers[1].add, raylane.bind(workers[0].echo, x), x)))

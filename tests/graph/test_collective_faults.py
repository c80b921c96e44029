"""Collectives when an actor raises, dies, hangs, or is on another host."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from tests.graph.graph_actors import Worker
from tests.graph.hosts import connections, start, wait_until_gone

import raylane
from raylane import MultiOutputNode, bind
from raylane.errors import (
    GraphActorDiedError,
    GraphClosedError,
    GraphTimeoutError,
)
from raylane.graph import allgather, allreduce

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]


@pytest.fixture
def three() -> Iterator[list[Any]]:
    """Start three actors that Ray restarts, and check that no graph has left anything in those that live."""
    made = [ray.remote(num_cpus=0, max_restarts=-1)(Worker).remote() for _ in range(3)]
    ray.get([worker.__ray_ready__.remote() for worker in made])
    yield made
    wait_until_gone(made, connections())
    for worker in made:
        ray.kill(worker)
    made.clear()


def _reduced(workers: list[Any], method: str, **options: Any) -> Any:
    """Compile a sum over all actors of what this method returns."""
    with raylane.InputNode() as x:
        node = MultiOutputNode(allreduce.bind([bind(getattr(worker, method), x) for worker in workers]))
    return raylane.compile(node, **options)


def _check(g: Any, count: int = 3) -> None:
    assert [one.tolist() for one in g.execute(torch.ones(2)).get()] == [[count] * 2] * count


@pytest.mark.claim("graphs", "an error in a collective reaches all actors; a death ends the graph, and none waits on")
@pytest.mark.processes
def test_an_actor_that_dies_ends_the_graph_alone(three: list[Any]) -> None:
    g = _reduced(three, "wait")
    ray.get([worker.release.remote() for worker in three[:2]])
    result = g.execute(torch.ones(2))  # two have given their share and wait for the third
    os.kill(ray.get(three[2].pid.remote()), signal.SIGKILL)
    with pytest.raises(GraphActorDiedError, match="Worker"):
        result.get(timeout=5)
    assert ray.get([worker.add.remote(1, 1) for worker in three[:2]], timeout=30) == [2, 2]
    with g.recompile() as again:  # waits until the third one is alive again
        ray.get([worker.release.remote() for worker in three])
        _check(again)


@pytest.mark.claim("graphs", "an error in a collective reaches all actors; a death ends the graph, and none waits on")
def test_an_error_of_one_actor_reaches_all(three: list[Any]) -> None:
    with raylane.InputNode() as x:
        given = [bind(three[0].echo, x), bind(three[1].fail, x), bind(three[2].echo, x)]
        reduced = allreduce.bind(given)
        after = [bind(worker.echo, one) for worker, one in zip(three, reduced, strict=True)]
        alone = bind(three[0].add, x, 1)
    # No failed value is dropped: the call of the first actor, which has its own value, fails too.
    with raylane.compile(after[0]) as g, pytest.raises(ValueError, match="cannot do"):
        g.execute(torch.ones(2)).get()
    with raylane.compile(alone) as g:
        result = g.execute(torch.ones(2))
        assert result.get().tolist() == [2, 2]
        assert g.drain(30)
        assert len(result.leaf_errors) > 0


def test_a_late_actor_is_named_and_nothing_is_lost(three: list[Any]) -> None:
    with _reduced(three, "wait", timeout=30) as g:
        ray.get([worker.release.remote() for worker in three[:2]])
        result = g.execute(torch.ones(2))
        with pytest.raises(GraphTimeoutError, match=r"waiting for .*Worker#3\.allreduce\.sum"):
            result.get(timeout=0.2)
        ray.get(three[2].release.remote())
        assert [one.tolist() for one in result.get()] == [[3, 3]] * 3


def test_teardown_during_a_collective_leaves_nothing(three: list[Any]) -> None:
    g = _reduced(three, "wait")
    ray.get([worker.release.remote() for worker in three[:2]])
    result = g.execute(torch.ones(100_000))
    g.teardown(timeout=1)
    with pytest.raises(GraphClosedError):
        result.get()
    ray.get(three[2].release.remote())


def test_large_tensors_with_several_executions_in_flight(three: list[Any]) -> None:
    with _reduced(three, "echo", max_inflight=4) as g:
        results = [g.execute(torch.full((50_000,), float(i))) for i in range(20)]
        for i, result in enumerate(results):
            assert all((one == 3 * i).all() for one in result.get())


def test_actors_on_several_hosts(ray_session: None) -> None:
    before = connections()
    workers = start(["", "b", "b", "c"])
    with raylane.InputNode() as x:
        given = [bind(worker.echo, x) for worker in workers]
        node = MultiOutputNode([*allreduce.bind(given, op="avg"), *allgather.bind(given)])
    with raylane.compile(node) as g:
        for size in (3, 100_000):
            found = g.execute(torch.ones(size)).get()
            assert all(torch.equal(one, torch.ones(size)) for one in found[:4])
            assert all(torch.equal(one, torch.ones(4 * size)) for one in found[4:])
    wait_until_gone(workers, before)
    for worker in workers:
        ray.kill(worker)

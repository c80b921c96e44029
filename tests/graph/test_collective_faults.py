"""Collectives when an actor raises, dies, hangs, or is on another host."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
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
    GraphDeadlockError,
    GraphPlanError,
    GraphTimeoutError,
    GraphValueError,
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


@pytest.fixture(scope="module")
def pair_and_one(ray_session: None) -> Iterator[list[Any]]:
    """Start three actors for all tests that leave them healthy."""
    made = [ray.remote(num_cpus=0)(Worker).remote() for _ in range(3)]
    ray.get([worker.__ray_ready__.remote() for worker in made])
    yield made
    for worker in made:
        ray.kill(worker)


def _reduced(workers: list[Any], method: str, **options: Any) -> Any:
    """Compile a sum over all actors of what this method returns."""
    with raylane.InputNode() as x:
        node = MultiOutputNode(allreduce.bind([bind(getattr(worker, method), x) for worker in workers]))
    return raylane.compile(node, **options)


def _check(g: Any, count: int = 3) -> None:
    assert [one.tolist() for one in g.execute(torch.ones(2)).get()] == [[count] * 2] * count


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
    with _reduced(three, "wait", timeout_s=30) as g:
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


def test_ended_graphs_close_the_stores_of_their_groups(
    pair_and_one: list[Any], eventually: Callable[..., None]
) -> None:
    def sockets() -> int:
        found = 0
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed since the folder was listed
                found += os.readlink(f"/proc/self/fd/{name}").startswith("socket")
        return found

    def count() -> list[int]:
        return [ray.get(worker.__ray_call__.remote(lambda _: sockets())) for worker in pair_and_one]

    pickled = [ray.get(worker.__ray_call__.remote(lambda _: gc.disable())) for worker in pair_and_one]
    assert pickled == [None] * 3
    before: list[int] = []
    for _ in range(3):
        with raylane.InputNode() as x:
            given = [bind(worker.echo, x) for worker in pair_and_one]
            node = MultiOutputNode(allreduce.bind(given, transport="gloo"))
        with raylane.compile(node) as g:
            assert [one.tolist() for one in g.execute(torch.ones(2)).get()] == [[3, 3]] * 3
        before = before or count()
    eventually(lambda: all(now <= then for now, then in zip(count(), before, strict=True)), within_s=30)
    ray.get([worker.__ray_call__.remote(lambda _: gc.enable()) for worker in pair_and_one])


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


# Process groups: an actor that is killed or late has told the others that it will take part


def _meeting(workers: list[Any], **options: Any) -> Any:
    """Compile a sum through a process group, in which the third actor waits before it meets the others."""
    with raylane.InputNode() as x:
        given = [bind(worker.echo, x) for worker in workers]
        held = bind(workers[2].wait, x)
        node = MultiOutputNode([*allreduce.bind(given, transport="gloo"), held])
    return raylane.compile(node, overlap=True, **options)


@pytest.mark.processes
def test_a_member_of_a_process_group_dies(three: list[Any]) -> None:
    g = _meeting(three)
    result = g.execute(torch.ones(2))
    os.kill(ray.get(three[2].pid.remote()), signal.SIGKILL)
    with pytest.raises(GraphActorDiedError, match="Worker"):
        result.get(timeout=5)
    assert ray.get([worker.add.remote(1, 1) for worker in three[:2]], timeout=30) == [2, 2]
    with g.recompile() as again:
        ray.get(three[2].release.remote())
        for _ in range(3):
            assert [one.tolist() for one in again.execute(torch.ones(2)).get()[:3]] == [[3, 3]] * 3


def test_teardown_frees_the_members_of_a_process_group(three: list[Any]) -> None:
    g = _meeting(three)
    result = g.execute(torch.ones(2))
    g.teardown(timeout=1)
    with pytest.raises(GraphClosedError):
        result.get()
    ray.get(three[2].release.remote())


def _fail_once(module: str, name: str, after: bool) -> Callable[[Any], None]:
    """Return a function that makes a function of a module raise MemoryError once, in the actor that calls it."""

    def patch(instance: Any) -> None:
        import importlib

        home = importlib.import_module(module)
        function = getattr(home, name)

        def failing(*args: Any) -> Any:
            if after and threading.current_thread().name != "raylane-collective":
                return function(*args)
            setattr(home, name, function)
            raise MemoryError("injected")

        setattr(home, name, failing)

    return patch


IN_GROUP, IN_SHARES = "raylane.graph.worker.process_groups", "raylane.graph.values.shares"


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    ("module", "name", "text"),
    [
        (IN_GROUP, "_as_torch", "injected"),
        (IN_GROUP, "cut", "injected"),
        (IN_SHARES, "_received", "could not be unpickled"),
    ],
    ids=["before the exchange", "after the exchange", "instead of the exchange"],
)
@pytest.mark.parametrize("is_open", [True, False])
def test_group_member_that_fails_keeps_nobody_waiting(
    pair_and_one: list[Any], module: str, name: str, text: str, rank: int, is_open: bool
) -> None:
    workers = pair_and_one
    with raylane.InputNode() as x:
        given = [bind(worker.echo, x) for worker in workers]
        both = [*allreduce.bind(given, transport="gloo"), *allgather.bind(given, transport="gloo")]
    with raylane.compile(MultiOutputNode(both), timeout_s=60) as g:
        for _ in range(is_open):
            assert len(g.execute(torch.ones(2)).get()) == 6
        if name == "_received" and not is_open:  # nobody knows the address of the others yet
            return
        ray.get(workers[rank].__ray_call__.remote(_fail_once(module, name, name == "cut")))
        with pytest.raises((MemoryError, GraphValueError), match=text):
            g.execute(torch.ones(2)).get(timeout=20)
        assert g.drain(20), "an actor still waits for the one that has failed"
        for _ in range(2):
            assert [one.tolist() for one in g.execute(torch.ones(2)).get(timeout=20)] == [[3] * 2] * 3 + [[1] * 6] * 3


def test_an_error_does_not_reach_the_process_group(three: list[Any]) -> None:
    with raylane.InputNode() as x:
        given = [bind(worker.fail_unless, x[i]) for i, worker in enumerate(three)]
        node = MultiOutputNode(allreduce.bind(given, transport="gloo"))
    with raylane.compile(node) as g:
        for last in (torch.tensor(1.0), torch.tensor(-1.0), torch.ones(1), torch.tensor(1.0)):
            result = g.execute(torch.tensor(1.0), torch.tensor(1.0), last)
            if last.shape or last < 0:
                with pytest.raises(ValueError, match=r"cannot do|equal shapes"):
                    result.get()
            else:
                assert result.get() == [3, 3, 3]


def test_members_that_meet_in_different_orders_are_refused(three: list[Any]) -> None:
    a, b, _ = three
    with raylane.InputNode() as x:
        given = [bind(a.echo, x), bind(b.echo, x)]
        first, second = (allreduce.bind(given, op=op, transport="gloo") for op in ("sum", "max"))
        node = MultiOutputNode([*first, *second])
    with pytest.raises(GraphDeadlockError, match="then meets the others in the collective"):
        raylane.compile(node, order={a: [given[0], second[0], first[0]]})
    with pytest.raises(GraphPlanError, match=r"transport 'nccl': .* sees no GPU.*num_gpus=1"):
        raylane.compile(MultiOutputNode(allreduce.bind(given, transport="nccl")))

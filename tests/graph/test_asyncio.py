"""Graphs under asyncio: awaiting, mixing with threads, several loops, asyncio actors."""

from __future__ import annotations

import asyncio
import collections
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import ray
from tests.graph.graph_actors import AsyncWorker

import raylane
from raylane.core.signals import wake
from raylane.errors import GraphPlanError, GraphTimeoutError

pytestmark = pytest.mark.usefixtures("clean")
Compile = Callable[..., Any]


@pytest.mark.claim("graphs", "asyncio awaits results by an eventfd, or by a thread where the kernel forbids that")
def test_await_in_any_order_and_again(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(workers[0].echo, x), max_inflight=4)

    async def use() -> list[Any]:
        made = [g.execute(i) for i in range(4)]
        return [await made[i] for i in (2, 0, 3, 1, 2)]

    assert asyncio.run(use()) == [2, 0, 3, 1, 2]
    assert asyncio.run(use()) == [2, 0, 3, 1, 2]  # another loop


def test_many_tasks_wait_for_a_place_without_blocking_the_loop(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(workers[1].echo, raylane.bind(workers[0].echo, x)), max_inflight=2)
    beats = 0

    async def call(i: int) -> Any:
        return await (await g.execute_async(i))

    async def use() -> list[Any]:
        nonlocal beats

        async def beat() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0)

        beating = asyncio.create_task(beat())
        found = await asyncio.gather(*(call(i) for i in range(200)))
        beating.cancel()
        return found

    assert asyncio.run(use()) == list(range(200))
    assert beats > 1


@pytest.mark.claim("graphs", "threads and asyncio tasks may use one graph at the same time")
def test_threads_and_tasks_share_a_graph(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(workers[0].echo, x), max_inflight=3)
    wrong: list[Any] = []

    def from_thread() -> None:
        wrong.extend(i for i in range(200) if g.execute(i).get(timeout=30) != i)

    async def from_loop() -> None:
        for i in range(200):
            if await (await g.execute_async(-i)) != -i:
                wrong.append(-i)

    threads = [threading.Thread(target=from_thread) for _ in range(2)]
    threads.append(threading.Thread(target=lambda: asyncio.run(from_loop())))
    for thread in threads:
        thread.start()
    asyncio.run(from_loop())  # two loops at once
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_graphs_of_two_loops_share_an_eventfd(workers: list[Any], graph: Compile) -> None:
    graphs = [graph(lambda x, a=a: raylane.bind(a.echo, x)) for a in workers[:2]]
    wrong: list[Any] = []

    async def use(g: Any) -> None:
        # With a sleep between, so that each loop sleeps in its selector while the other one resets the eventfd.
        for i in range(300):
            if await g.execute(i) != i:
                wrong.append(i)
            await asyncio.sleep(0)

    threads = [threading.Thread(target=lambda g=g: asyncio.run(use(g))) for g in graphs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def test_a_loop_awaits_many_graphs_and_then_watches_none(workers: list[Any], graph: Compile) -> None:
    async def use() -> list[int]:
        loop: Any = asyncio.get_running_loop()
        graphs = [graph(lambda x, i=i: raylane.bind(workers[i % 2].add, x, i)) for i in range(20)]
        for round in range(3):
            found = await asyncio.gather(*(g.execute(round) for g in graphs))
        for g in graphs:
            await asyncio.to_thread(g.teardown)
        os.eventfd_write(wake.own(), 1)
        while wake.own() in loop._selector.get_map():
            await asyncio.sleep(0.001)
        return found

    assert asyncio.run(asyncio.wait_for(use(), 60)) == [2 + i for i in range(20)]


def test_a_result_of_a_thread_is_awaited(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(workers[0].echo, x))
    result = g.execute("made outside")

    async def use() -> Any:
        return await result

    assert asyncio.run(use()) == "made outside"


def test_await_times_out_and_loses_nothing(workers: list[Any], graph: Compile) -> None:
    a = workers[0]
    ray.get(a.hold_again.remote())
    g = graph(lambda x: raylane.bind(a.wait, x), timeout=0.1)

    async def use() -> Any:
        result = g.execute("late")
        with pytest.raises(GraphTimeoutError, match="await it again"):
            await result
        task = asyncio.create_task(_of(result))
        task.cancel()  # a cancelled waiter is no harm either
        a.release.remote()
        while not result.done():
            await asyncio.sleep(0.01)
        return await result

    assert asyncio.run(use()) == "late"


async def _of(awaitable: Any) -> Any:
    return await awaitable


@pytest.mark.claim("graphs", "asyncio awaits results by an eventfd, or by a thread where the kernel forbids that")
def test_without_pidfd_getfd_a_thread_waits(
    workers: list[Any], graph: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wake, "own", lambda: 10**6)  # a descriptor that nobody can fetch
    g = graph(lambda x: raylane.bind(workers[0].echo, x))
    assert not g._collector.bridge.active

    async def use() -> Any:
        return [await g.execute(i) for i in range(3)]

    assert asyncio.run(use()) == [0, 1, 2]


def test_graph_compiled_while_its_lane_is_busy_wakes_asyncio(workers: list[Any], graph: Compile) -> None:
    other = graph(lambda x: raylane.bind(workers[0].wait, x))
    running = other.execute(1)
    g = graph(lambda x: raylane.bind(workers[0].echo, x))
    assert g._collector.bridge.active
    ray.get(workers[0].release.remote())
    assert running.get() == 1
    ray.get(workers[0].hold_again.remote())

    async def use() -> Any:
        return [await g.execute(i) for i in range(3)]

    assert asyncio.run(use()) == [0, 1, 2]


def test_errors_are_raised_by_await(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(workers[0].fail, x))

    async def use() -> None:
        with pytest.raises(ValueError, match="cannot do 3"):
            await g.execute(3)

    asyncio.run(use())


@pytest.mark.claim("graphs", "unmodified Ray actors take part in a graph, with ordinary and coroutine methods")
def test_coroutine_methods_run_on_their_actors_loop(ray_session: None, graph: Compile) -> None:
    actor = ray.remote(num_cpus=0.1)(AsyncWorker).remote()
    with raylane.InputNode() as x:
        node = raylane.MultiOutputNode([raylane.bind(actor.echo, x), raylane.bind(actor.loop_id, x)])
        failing = raylane.bind(actor.fail, x)
    with raylane.compile(node) as g:
        result = g.execute(5)
        assert result.get() == [5, ray.get(actor.loop_id.remote())]
        assert isinstance(result.leaf_errors[0].cause, KeyError)
    with pytest.raises(GraphPlanError, match=r"exclusive=True: .* is an asyncio actor"):
        raylane.compile(failing, exclusive=True)
    ray.kill(actor)


def test_execute_async_pickles_its_argument_once(workers: list[Any], graph: Compile) -> None:
    pickled: collections.Counter[int] = collections.Counter()

    class Counted:
        def __init__(self, number: int) -> None:
            self.number = number

        def __reduce__(self) -> Any:
            pickled[self.number] += 1
            return int, (self.number,)

    g = graph(lambda x: raylane.bind(workers[0].echo, x), max_inflight=2)

    async def run(number: int) -> int:
        return int(await (await g.execute_async(Counted(number))))

    async def main() -> list[int]:
        return await asyncio.gather(*(run(number) for number in range(60)))

    assert sorted(asyncio.run(main())) == list(range(60))
    assert set(pickled.values()) == {1}

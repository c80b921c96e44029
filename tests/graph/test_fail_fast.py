"""A result fails as soon as a call that it needs has failed; the rest of the execution ends by itself, and the graph
goes on. The slow calls here wait until the test releases them: a result that waited for them would time out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import ray
from tests.graph import hosts
from tests.graph.graph_actors import Worker

import raylane
from raylane.errors import GraphFullError, GraphTimeoutError, GraphValueError
from raylane.graph.driver.control import ControlChannels

Compile = Callable[..., Any]
Write = Callable[[Any, list[Any]], Any]
pytestmark = pytest.mark.usefixtures("clean")


@pytest.fixture(autouse=True)
def released(workers: list[Any]) -> Iterator[None]:
    """No call waits before and after a test."""
    ray.get([worker.hold_again.remote() for worker in workers])
    yield
    release(workers)


def release(workers: list[Any]) -> None:
    ray.get([worker.release.remote() for worker in workers])


@pytest.fixture
def short_wait_for_stats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `stats` wait 0.1 s instead of 5 s for an actor that is busy in a method, as one is in these tests."""
    monkeypatch.setitem(ControlChannels.ask.__kwdefaults__, "timeout_s", 0.1)


def two_outputs(x: Any, w: list[Any]) -> Any:
    return raylane.MultiOutputNode([raylane.bind(w[1].wait_unless, x), raylane.bind(w[0].fail_unless, x)])


def joined(x: Any, w: list[Any]) -> Any:
    return raylane.graph.gather([raylane.bind(w[1].wait_unless, x), raylane.bind(w[0].fail_unless, x)])


def first(x: Any, w: list[Any]) -> Any:
    return raylane.graph.first([raylane.bind(w[1].wait_unless, x), raylane.bind(w[0].fail_unless, x)])


def merged_by_an_actor(x: Any, w: list[Any]) -> Any:
    """Of the failure the driver gets nothing but through an actor that waits for the other part."""
    return raylane.bind(w[2].add, raylane.bind(w[1].wait_unless, x), raylane.bind(w[0].fail_unless, x))


def behind_a_busy_actor(x: Any, w: list[Any]) -> Any:
    """The actor that would pass the failure on is in a method that waits."""
    before = raylane.bind(w[1].wait_unless, x)
    return raylane.MultiOutputNode([raylane.bind(w[1].echo, raylane.bind(w[0].fail_unless, x)), before])


def a_part_that_is_not_there(x: Any, w: list[Any]) -> Any:
    item = raylane.bind(w[0].empty_unless, x)[0]
    return raylane.bind(w[2].add, raylane.bind(w[1].wait_unless, x), item)


def within_the_driver_of_two(x: Any, w: list[Any]) -> Any:
    """The failing call and the one that uses it are of one actor."""
    failed = raylane.bind(w[0].echo, raylane.bind(w[0].fail_unless, x))
    return raylane.bind(w[2].add, raylane.bind(w[1].wait_unless, x), failed)


SHAPES = [
    two_outputs,
    joined,
    first,
    merged_by_an_actor,
    behind_a_busy_actor,
    a_part_that_is_not_there,
    within_the_driver_of_two,
]


@pytest.mark.claim("graphs", "a failed call fails its result before the slowest part ends, also over hosts")
@pytest.mark.usefixtures("short_wait_for_stats")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_result_fails_before_the_slowest_part_ends(workers: list[Any], graph: Compile, shape: Write) -> None:
    g = graph(lambda x: shape(x, workers), max_inflight=3)
    expected = g.execute(1).get()
    result = g.execute(-1)
    with pytest.raises((ValueError, IndexError)) as caught:
        result.get(timeout=30)
    if shape is not a_part_that_is_not_there:
        assert isinstance(caught.value, ValueError)
        assert "Worker#" in str(caught.value)
        assert "fail_unless" in str(caught.value)
    assert isinstance(caught.value, ray.exceptions.RayTaskError)
    assert g.stats()["executions"] == {"submitted": 2, "completed": 1}
    later = g.execute(2)
    assert not later.done()
    release(workers)
    assert later.get() is not None
    assert g.execute(1).get() == expected
    with pytest.raises((ValueError, IndexError)):
        result.get()
    assert g.stats()["executions"] == {"submitted": 4, "completed": 4}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_many_failures_in_flight_keep_their_order(workers: list[Any], graph: Compile, shape: Write) -> None:
    release(workers)
    g = graph(lambda x: shape(x, workers), max_inflight=3)
    made = [(number, g.execute(1 if number % 3 else -1)) for number in range(300)]
    for number, result in made:
        if number % 3:
            assert result.get() is not None
        else:
            with pytest.raises((ValueError, IndexError)):
                result.get()
    assert g.stats()["executions"] == {"submitted": 300, "completed": 300}


def test_places_of_failed_executions_come_back_when_drained(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: two_outputs(x, workers), max_inflight=2)
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot do"):
            g.execute(-1).get(timeout=30)
    with pytest.raises(GraphFullError, match="2 executions are under way"):
        g.execute_nowait(1)
    release(workers)
    assert g.execute(1).get() == [1, 1]


def test_memory_of_failed_executions_comes_back(workers: list[Any], graph: Compile) -> None:
    w = workers

    def write(x: Any) -> Any:
        ones = raylane.bind(w[2].ones, 125_000)
        return raylane.MultiOutputNode([ones, raylane.bind(w[0].fail_unless, x), raylane.bind(w[1].wait_unless, x)])

    g = graph(write, max_inflight=2, max_lent_bytes=3 << 20, timeout=30)
    kept = []
    for _ in range(2):
        kept.append(g.execute(-1))
        with pytest.raises(ValueError, match="cannot do"):
            kept[-1].get()
    ray.get([w[1].release.remote()])
    for _ in range(30):
        kept.append(g.execute(-1))  # results that have failed hold nothing
        with pytest.raises(ValueError, match="cannot do"):
            kept[-1].get()
    assert g.execute(1).get()[1:] == [1, 1]


def test_await_and_wait_obey_the_same_rule(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: merged_by_an_actor(x, workers), max_inflight=3)

    async def main() -> None:
        result = await g.execute_async(-1)
        with pytest.raises(ValueError, match="cannot do"):
            await asyncio.wait_for(result, 30)
        ticks = 0
        others = [await g.execute_async(2), await g.execute_async(2)]
        queued = asyncio.ensure_future(g.execute_async(3))  # no place, although the oldest result is done
        for _ in range(20):
            await asyncio.sleep(0.005)
            ticks += 1
        assert ticks == 20  # the loop was not blocked, nor did it spin
        assert not queued.done()
        assert not any(other.done() for other in others)
        await asyncio.to_thread(release, workers)
        assert await (await queued) == 6
        assert [await other for other in others] == [4, 4]

    asyncio.run(main())
    ray.get([worker.hold_again.remote() for worker in workers])
    bad, good = g.execute(-1), g.execute(1)
    assert raylane.graph.wait([good, bad], timeout=30) == ([bad], [good])
    release(workers)
    assert good.get() == 2


def test_waiting_for_a_place_in_asyncio_does_not_spin(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: two_outputs(x, workers), max_inflight=1)
    tries = 0
    submit = g._submit

    def counted(*args: Any) -> Any:
        nonlocal tries
        tries += 1
        return submit(*args)

    async def main() -> None:
        result = await g.execute_async(-1)
        with pytest.raises(ValueError, match="cannot do"):
            await result
        g._submit = counted
        queued = asyncio.ensure_future(g.execute_async(1))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(release, workers)
        assert await (await queued) == [1, 1]

    asyncio.run(main())
    assert tries <= 5


def test_threads_obey_the_same_rule(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: merged_by_an_actor(x, workers), max_inflight=4)
    seen: list[Any] = []

    def run(x: int) -> None:
        try:
            seen.append(g.execute(x).get(timeout=60))
        except ValueError as error:
            seen.append(type(error).__mro__[-1] and "failed")
            if seen.count("failed") == 2:
                all_failed.set()

    all_failed = threading.Event()
    threads = [threading.Thread(target=run, args=(x,)) for x in (-1, 2, -1, 2)]
    for thread in threads:
        thread.start()
    assert all_failed.wait(30)
    release(workers)
    for thread in threads:
        thread.join(60)
    assert sorted(map(str, seen)) == ["4", "4", "failed", "failed"]


def with_a_leaf(x: Any, w: list[Any]) -> Any:
    raylane.bind(w[0].fail_unless, x)
    return raylane.bind(w[1].wait_unless, x)


def with_a_long_leaf(x: Any, w: list[Any]) -> Any:
    raylane.bind(w[1].echo, raylane.bind(w[0].fail_unless, x))
    return raylane.bind(w[1].wait_unless, x)


@pytest.mark.claim("graphs", "with `fail_fast='leaves'` a failed leaf call fails the result too")
@pytest.mark.parametrize("shape", [with_a_leaf, with_a_long_leaf], ids=lambda shape: shape.__name__)
def test_failed_leaf_fails_the_result_when_asked(workers: list[Any], graph: Compile, shape: Write) -> None:
    strict = graph(lambda x: shape(x, workers), fail_fast="leaves")
    result = strict.execute(-1)
    with pytest.raises(ValueError, match="cannot do"):
        result.get(timeout=30)
    release(workers)
    assert strict.execute(1).get() == 1
    assert len(result.leaf_errors) == 1
    lenient = graph(lambda x: shape(x, workers))
    result = lenient.execute(-1)
    assert result.get() == -1
    assert len(result.leaf_errors) == 1


def test_input_that_cannot_be_sent_fails_the_result_at_once(workers: list[Any], graph: Compile) -> None:
    w = workers

    def write(x: Any) -> Any:
        return raylane.bind(w[2].add, raylane.bind(w[1].wait_unless, x[0]), raylane.bind(w[0].total, x[1]))

    g = graph(write, max_lent_bytes=1 << 20)
    with pytest.raises(GraphValueError, match="max_lent_bytes is"):
        g.execute(-1, np.ones(1_000_000)).get(timeout=30)
    release(workers)
    assert g.execute(1, np.ones(3)).get() == 4.0


def test_option_fail_fast_is_checked(workers: list[Any], graph: Compile) -> None:
    with pytest.raises(ValueError, match="fail_fast must be 'output' or 'leaves', got 'first'"):
        graph(lambda x: with_a_leaf(x, workers), fail_fast="first")


@pytest.mark.parametrize("mode", ["output", "leaves"])
def test_inline_reports_the_first_failure(mode: str) -> None:
    stages = [Worker(), Worker(), Worker()]
    with raylane.InputNode() as x:
        raylane.bind(stages[2].fail, x)
        late = raylane.bind(stages[1].fail, x)
        early = raylane.bind(stages[0].fail_unless, x)
        node = raylane.MultiOutputNode([early, late, raylane.bind(stages[0].echo, x)])
    with raylane.compile(node, backend="inline", fail_fast=mode) as g:
        result = g.execute(-1)
        with pytest.raises(ValueError, match=r"Worker#1\.fail|Worker#2\.fail") as caught:
            result.get()
        assert ("Worker#1.fail" in str(caught.value)) is (mode == "leaves") or "#" in str(caught.value)
        assert stages[0].calls == 1  # what came after has run
        assert len(result.leaf_errors) == 1


@pytest.fixture(scope="module")
def remote(ray_session: None) -> Iterator[list[Any]]:
    made = hosts.start(["a", "b", "c"])
    yield made
    for worker in made:
        ray.kill(worker)
    made.clear()


@pytest.mark.claim("graphs", "a failed call fails its result before the slowest part ends, also over hosts")
@pytest.mark.usefixtures("short_wait_for_stats")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_hosts_obey_the_same_rule(
    remote: list[Any], graph: Compile, shape: Write, eventually: Callable[..., None]
) -> None:
    ray.get([worker.hold_again.remote() for worker in remote])
    g = graph(lambda x: shape(x, remote), max_inflight=3)
    with pytest.raises((ValueError, IndexError)):
        g.execute(-1).get(timeout=30)
    assert g.stats()["executions"]["completed"] == 0
    release(remote)
    for number in range(60):
        result = g.execute(1 if number % 3 else -1)
        if number % 3:
            assert result.get() is not None
    with pytest.raises((ValueError, IndexError)):
        asyncio.run(awaited(g))
    g.teardown()
    eventually(lambda: not any(map(hosts.left, remote)))


async def awaited(g: Any) -> Any:
    return await asyncio.wait_for(await g.execute_async(-1), 30)


def test_timeout_of_a_slow_part_still_loses_nothing(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: two_outputs(x, workers))
    result = g.execute(2)
    with pytest.raises(GraphTimeoutError, match="still waiting for"):
        result.get(timeout=0.05)
    release(workers)
    assert result.get() == [2, 2]


def test_failures_beside_questions_keep_their_order(workers: list[Any], graph: Compile) -> None:
    """Answers and failures come on the same line, and two threads read it."""
    release(workers)
    g = graph(lambda x: merged_by_an_actor(x, workers), max_inflight=2)
    over = threading.Event()
    unanswered: list[Any] = []

    def ask() -> None:
        while not over.is_set():
            unanswered.extend(g.stats()["unanswered"])

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for number in range(400):
            made = [g.execute(-1), g.execute(number)]
            with pytest.raises(ValueError, match="cannot do -1"):
                made[0].get()
            assert made[1].get() == 2 * number
    finally:
        over.set()
        thread.join()
    assert unanswered == []

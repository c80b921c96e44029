"""Executions with a deadline of their own, and executions that are cancelled."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import ray

import raylane
from raylane.core.deadline import Deadline
from raylane.core.memory.segment import Segment
from raylane.core.signals import semaphore
from raylane.errors import GraphCancelledError, GraphPlanError, GraphTimeoutError
from raylane.graph.channels.deadlines import ExecutionDeadlines
from raylane.graph.driver import collect

Compile = Callable[..., Any]
Eventually = Callable[..., None]


@pytest.fixture
def held(workers: list[Any], clean: None) -> Any:
    """Return the workers, of which the first waits in `wait_unless` until `release`."""
    ray.get([worker.__ray_call__.remote(lambda self: self.__init__()) for worker in workers])
    yield workers
    ray.get([worker.release.remote() for worker in workers])


def chain(graph: Compile, workers: list[Any], **options: Any) -> Any:
    """Compile a wait of the first worker, and two calls of the second that count."""
    return graph(
        lambda x: raylane.bind(workers[1].echo, raylane.bind(workers[1].echo, raylane.bind(workers[0].wait_unless, x))),
        **{"timeout": 60, **options},
    )


def count(worker: Any) -> int:
    return int(ray.get(worker.count.remote(), timeout=60))


def until_waiting(worker: Any, eventually: Eventually) -> None:
    """Wait until the method `wait_unless` of a worker runs."""
    eventually(lambda: ray.get(worker.started_waits.remote(), timeout=60), within_s=60)


def test_deadlines_refuse_only_their_own_execution() -> None:
    segment = Segment.make(ExecutionDeadlines.size_of(2))
    segment.close_fd()
    deadlines = ExecutionDeadlines(segment, 2)
    assert not deadlines.used
    assert deadlines.refusal(0, "A.f") is None
    deadlines.set(0, time.monotonic() + 60)
    assert deadlines.used
    assert deadlines.refusal(0, "A.f") is None
    deadlines.set(0, time.monotonic())
    assert "execution 0 did not end within its timeout_s: A.f had not begun" in str(deadlines.refusal(0, "A.f"))
    assert deadlines.refusal(2, "A.f") is None  # has the same slot
    deadlines.cancel(1)
    error = deadlines.refusal(1, "A.f")
    assert isinstance(error, GraphCancelledError)
    assert error.fields == {"execution": 1}
    deadlines.set(1, 1e300)
    assert deadlines.refusal(1, "A.f") is None
    deadlines.clear(3)
    assert deadlines.refusal(1, "A.f") is None
    deadlines.set(1 << 20, 0.0)
    assert isinstance(deadlines.refusal(1 << 20, "A.f"), GraphTimeoutError)


@pytest.mark.claim("graphs", "an execution may have a deadline: then its calls that have not begun are skipped")
def test_execute_fails_at_its_deadline_and_skips_later_calls(
    held: list[Any], graph: Compile, eventually: Eventually
) -> None:
    g = chain(graph, held, max_inflight=4)
    assert g.execute(1, timeout_s=60).get() == 1
    running = g.execute(0)
    until_waiting(held[0], eventually)
    late = [g.execute(i, timeout_s=0.05) for i in (0, 1)]
    following = g.execute(1)
    for result in late:
        with pytest.raises(
            GraphTimeoutError, match=r"did not end within its timeout_s of 0\.05 s: still waiting"
        ) as caught:
            result.get()
        assert caught.value.fields["execution"] == result.number
        assert result.done()
    with pytest.raises(GraphTimeoutError, match=r"within 0\.01 s"):  # waits for the method that runs
        following.get(timeout=0.01)
    ray.get(held[0].release.remote())
    assert (running.get(), following.get()) == (0, 1)
    assert count(held[1]) == 6
    assert g.stats()["executions"] == {"submitted": 5, "completed": 5}
    assert [g.execute(1).get() for _ in range(4)] == [1] * 4


@pytest.mark.claim("graphs", "`result.cancel()` skips the calls of an execution that have not begun")
def test_cancel_skips_calls_that_have_not_begun(held: list[Any], graph: Compile, eventually: Eventually) -> None:
    g = chain(graph, held, max_inflight=3)
    cancelled, queued, following = g.execute(0), g.execute(1), g.execute(1)
    until_waiting(held[0], eventually)
    assert cancelled.cancel()
    assert queued.cancel()
    for result in (cancelled, queued):
        with pytest.raises(GraphCancelledError, match=f"execution {result.number} was cancelled"):
            result.get()
        assert not result.cancel()
    assert not following.done()
    ray.get(held[0].release.remote())
    assert following.get() == 1
    assert not following.cancel()
    assert following.get() == 1
    assert count(held[1]) == 2
    assert [g.execute(1).get() for _ in range(4)] == [1] * 4


def test_cancel_returns_false_if_the_value_has_arrived(held: list[Any], graph: Compile, eventually: Eventually) -> None:
    g = chain(graph, held)
    result = g.execute(1)
    eventually(lambda: all(call["count"] for call in g.stats()["calls"].values()), within_s=60)  # sent, and not read
    assert not result.cancel()
    assert result.get() == 1


def test_cancel_wakes_a_thread_that_waits(held: list[Any], graph: Compile) -> None:
    g = chain(graph, held)
    result = g.execute(0)
    errors = []

    def wait() -> None:
        try:
            result.get()
        except GraphCancelledError as error:
            errors.append(error)

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert result.cancel()
    for thread in threads:
        thread.join(30)
    assert len(errors) == 2
    ray.get(held[0].release.remote())
    assert g.execute(1).get() == 1


def test_execute_async_with_deadline_and_cancel(held: list[Any], graph: Compile, eventually: Eventually) -> None:
    g = chain(graph, held, max_inflight=2)

    async def use() -> None:
        running = await g.execute_async(0)
        await asyncio.to_thread(until_waiting, held[0], eventually)
        result = await g.execute_async(1, timeout_s=0.05)
        with pytest.raises(GraphTimeoutError, match=r"its timeout_s of 0\.05 s"):
            await result
        waiting = asyncio.ensure_future(_value(running))
        await asyncio.sleep(0)
        assert running.cancel()
        with pytest.raises(GraphCancelledError):
            await waiting
        # Both executions are in flight until the method returns.
        with pytest.raises(GraphTimeoutError, match=r"under way for 0\.05 s.*Nothing was started"):
            await g.execute_async(1, timeout_s=0.05)
        with pytest.raises(GraphTimeoutError, match=r"under way for 0\.05 s.*Nothing was started"):
            g.execute(1, timeout_s=0.05)
        await asyncio.to_thread(lambda: ray.get(held[0].release.remote()))
        assert await (await g.execute_async(1, timeout_s=60)) == 1

    asyncio.run(use())
    assert count(held[1]) == 2


async def _value(result: Any) -> Any:
    return await result


def test_expired_executions_leave_no_deadline_behind(held: list[Any], graph: Compile) -> None:
    g = chain(graph, held, max_inflight=2)
    for _ in range(10):
        assert g.execute(1, timeout_s=60).get() == 1
        assert g.execute(1).get() == 1
    assert not g._collector.expiring
    done, pending = raylane.graph.wait([g.execute(0, timeout_s=0.05)])
    assert len(done) == 1
    assert not pending
    assert not g._collector.expiring


def test_deadline_wakes_the_thread_that_reads(
    held: list[Any], graph: Compile, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = chain(graph, held, max_inflight=2)
    reader = threading.Thread(target=g.execute(0).get)
    reader.start()
    eventually(lambda: g._collector._section.locked)  # until the first execution is done
    posts: list[int] = []
    monkeypatch.setattr(collect, "post", lambda address: (posts.append(address), semaphore.post(address)))
    result = g.execute(1, timeout_s=0.05)
    assert posts == [g._collector.doorbell.address]
    with pytest.raises(GraphTimeoutError, match=r"its timeout_s of 0\.05 s"):
        result.get()
    ray.get(held[0].release.remote())
    reader.join(60)


def test_execute_accepts_a_deadline_in_the_far_future(held: list[Any], graph: Compile) -> None:
    g = chain(graph, held)
    assert [g.execute(1, timeout_s=timeout_s).get() for timeout_s in (1e9, 1e12)] == [1, 1]


def test_late_report_lets_no_thread_spin(held: list[Any], graph: Compile) -> None:
    g = chain(graph, held)
    assert g.execute(1).get() == 1
    g._executions.early_failures.append((0, b""))  # of an execution that has ended
    g._collector.notify()
    checks: list[None] = []
    assert not g._collector.collect_until(lambda: checks.append(None), Deadline(0.2))
    assert len(checks) < 10
    assert g.execute(1).get() == 1


def test_compile_refuses_an_input_called_timeout_s(workers: list[Any], graph: Compile) -> None:
    with pytest.raises(GraphPlanError, match="an input cannot have the name timeout_s"):
        graph(lambda x: raylane.bind(workers[0].add, x[0], x.timeout_s))


def test_inline_graph_has_no_deadlines() -> None:
    class Adder:
        def add(self, x: int) -> int:
            return x + 1

    with raylane.InputNode() as x:
        node = raylane.bind(Adder().add, x)
    with raylane.compile(node, backend="inline") as g:
        result = g.execute(1, timeout_s=0.0)
        assert result.get() == 2
        assert not result.cancel()

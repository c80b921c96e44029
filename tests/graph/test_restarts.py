"""Graphs whose actors Ray restarts: `recompile` under load, after a death for good, and while an actor is busy."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import ray
from tests.graph.graph_actors import Worker

import raylane
from raylane.errors import GraphActorDiedError, GraphClosedError, GraphTimeoutError

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.usefixtures("cluster")]
Eventually = Callable[..., None]
MADE: list[Any] = []
"""Actors of the test that runs."""


@pytest.fixture
def start(cluster: None) -> Any:
    """Return a function that starts actors with these numbers of restarts. They are killed after the test."""

    def start(*restarts: int) -> list[Any]:
        MADE.extend(ray.remote(num_cpus=0)(Worker).options(max_restarts=each).remote() for each in restarts)
        ray.get([worker.__ray_ready__.remote() for worker in MADE], timeout=60)
        return list(MADE)

    yield start
    for worker in MADE:
        ray.kill(worker)
    MADE.clear()


def chain(workers: list[Any], **options: Any) -> Any:
    with raylane.InputNode() as x:
        node: Any = x
        for worker in workers:
            node = raylane.bind(worker.add, node, 1)
    return raylane.compile(node, **options)


class Load(threading.Thread):
    """Thread that executes a graph back to back and checks each result, until the graph fails or `stop` is set."""

    def __init__(self, graph: Any) -> None:
        super().__init__()
        self.graph = graph
        self.stop = threading.Event()
        self.completed = 0
        self.wrong: list[Any] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        pending = []
        try:
            while not self.stop.is_set():
                pending.append(self.graph.execute(self.completed + len(pending)))
                while len(pending) == self.graph.max_inflight:
                    value = pending.pop(0).get(timeout=60)
                    if value != self.completed + 3:
                        self.wrong.append((self.completed, value))
                    self.completed += 1
        except BaseException as error:
            self.error = error
        # The result that was under way must fail as well, and not stay pending.
        for result in pending:
            try:
                result.get(timeout=60)
            except GraphActorDiedError:
                continue
            except BaseException as error:
                self.wrong.append(error)


def started_load(graph: Any, eventually: Eventually) -> Load:
    """Return a running load that has completed a hundred executions."""
    load = Load(graph)
    load.start()
    eventually(lambda: load.completed > 100, within_s=60)
    return load


def kill(worker: Any) -> None:
    os.kill(ray.get(worker.pid.remote(), timeout=60), signal.SIGKILL)


@pytest.mark.claim("graphs", "`recompile` waits for actors that Ray restarts, and compiles the same nodes again")
def test_recompile_after_restarts_under_load(start: Any, eventually: Eventually) -> None:
    workers = start(-1, -1, -1)
    g = chain(workers, max_inflight=2, timeout=60)
    for _ in range(3):
        load = started_load(g, eventually)
        kill(workers[1])
        load.join(30)
        assert not load.is_alive()
        assert isinstance(load.error, GraphActorDiedError), load.error
        assert "call graph.recompile()" in str(load.error)
        assert load.error.fields["actor"] == workers[1]._actor_id.hex()
        assert not load.wrong
        g = g.recompile()
        assert [g.execute(i).get() for i in range(5)] == [i + 3 for i in range(5)]
    load = started_load(g, eventually)
    load.stop.set()
    load.join(30)
    assert (load.error, load.wrong) == (None, [])
    g.teardown()
    del load, g
    eventually(lambda: not any(ray.get([worker.left.remote() for worker in workers])))


def test_recompile_names_an_actor_that_is_dead_for_good(start: Any, eventually: Eventually) -> None:
    workers = start(-1, 0, -1)
    with chain(workers, timeout=30) as g:
        assert g.execute(1).get() == 4
        kill(workers[1])
        with pytest.raises(GraphActorDiedError, match=r"Worker#2 is dead, and Ray does not restart it") as caught:
            g.recompile()
        assert caught.value.fields["actor"] == workers[1]._actor_id.hex()
    eventually(lambda: not any(ray.get([workers[i].left.remote() for i in (0, 2)])))


def test_recompile_tears_a_running_graph_down_first(start: Any, eventually: Eventually) -> None:
    workers = start(0, 0)
    with raylane.InputNode() as x:
        node = raylane.bind(workers[1].add, raylane.bind(workers[0].wait, x), 1)
    old = raylane.compile(node, max_inflight=3, timeout=60, exclusive=False, max_lent_bytes=1 << 20)
    pending = old.execute(1)
    ray.get(workers[0].release.remote())
    eventually(lambda: old.stats()["calls"]["Worker#1.wait"]["count"])
    with old.recompile() as new:
        assert new.execute(1).get() == 2
        assert (new.max_inflight, new.timeout_s, new.show()) == (3, 60, old.show())
        with pytest.raises(GraphClosedError, match="torn down"):
            old.execute(1)
        assert pending.done()
    eventually(lambda: not any(ray.get([worker.left.remote() for worker in workers])))


def test_recompile_gives_up_on_a_busy_actor_and_works_later(start: Any, eventually: Eventually) -> None:
    workers = start(0, 0)
    # Compiled before the actor is busy: an ordinary call cannot end its wait, because the actor runs one at a time.
    release = raylane.compile(raylane.bind(workers[0].release))
    with chain(workers, timeout=1) as g:
        busy = workers[0].wait.remote()
        with pytest.raises(GraphTimeoutError, match="Worker#1 did not answer within 1 s"):
            g.recompile()
        release.execute().get()
        release.teardown()
        ray.get(busy, timeout=30)
        with g.recompile() as again:
            assert again.execute(0).get() == 2
    eventually(lambda: not any(ray.get([worker.left.remote() for worker in workers])))

"""Actors shared by the graph tests, and a check that each test leaves them and the driver as they were.

Starting an actor costs seconds. A test that ends an actor, or changes settings of its threads, starts its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from tests.graph.graph_actors import Worker

from raylane.core.deadline import Deadline
from raylane.testing.leaks import leaks, snapshot

COMPILE_S = 120.0
"""Seconds in which actors must answer while a graph is compiled."""


@pytest.fixture(scope="session")
def session_workers(ray_session: None) -> Iterator[list[Any]]:
    """Start the four actors of the test session. They take no logical CPU from later tests."""
    actor = ray.remote(num_cpus=0)(Worker)
    made = [actor.remote() for _ in range(4)]
    ray.get([worker.__ray_ready__.remote() for worker in made])
    yield made
    for worker in made:
        ray.kill(worker)
    made.clear()


@pytest.fixture(scope="module")
def workers(session_workers: list[Any]) -> list[Any]:
    """Return four plain actors, with the attributes of new ones at the start of each module."""
    ray.get([worker.__ray_call__.remote(lambda self: self.__init__()) for worker in session_workers], timeout=60)
    return session_workers


@pytest.fixture
def clean(workers: list[Any]) -> Iterator[None]:
    """Check after the test that no graph has left anything in an actor or in this process."""
    before = snapshot()
    yield
    left = leaks(before, within_s=20)
    assert not left, f"left behind: {left}"
    deadline = time.monotonic() + 60
    while any(found := ray.get([worker.left.remote() for worker in workers])):
        assert time.monotonic() < deadline, f"left in the actors: {found}"
        time.sleep(0.05)


@pytest.fixture
def graph() -> Iterator[Callable[..., Any]]:
    """Return a function that compiles what its argument binds, `graph(lambda x: ..., **options)`.

    The graphs are torn down after the test.
    """
    import raylane

    made: list[Any] = []

    def compile(write: Callable[[Any], Any], **options: Any) -> Any:
        with raylane.InputNode() as x:
            node = write(x)
        with pytest.MonkeyPatch.context() as patch:
            # A short `timeout` of a test is for its executions: on a busy machine actors answer later.
            patch.setattr("raylane.graph.driver.deploy.Deadline", lambda _: Deadline(COMPILE_S))
            made.append(raylane.compile(node, **options))
        return made[-1]

    yield compile
    for found in made:
        found.teardown()
    made.clear()

"""Graphs over several (pretended) hosts whose actors or driver are killed, or do not answer any more."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from tests.graph import hosts
from tests.graph.drivers import start_driver
from tests.process_tools import stop

import raylane
from raylane.errors import GraphActorDiedError, GraphTimeoutError

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("cluster")]
Eventually = Callable[..., None]


@pytest.fixture
def workers(cluster: None) -> Iterator[list[Any]]:
    """Two actors of this test's own, each on another host: it may kill them."""
    before = hosts.connections()
    made = hosts.start(["a", "b"])
    yield made
    for worker in made:
        ray.kill(worker)
    made.clear()
    deadline = time.monotonic() + 60
    while hosts.connections() > before:
        assert time.monotonic() < deadline, "connections are left"
        time.sleep(0.05)


def chain(workers: list[Any], *methods: str, **options: Any) -> Any:
    with raylane.InputNode() as x:
        node: Any = x
        for worker, method in zip(workers, methods, strict=True):
            node = raylane.bind(getattr(worker, method), node)
    return raylane.compile(node, **options)


def test_killed_actor_on_another_host_ends_the_graph_soon(workers: list[Any], eventually: Eventually) -> None:
    a, b = workers
    g = chain([a, b], "wait", "echo")
    made = [g.execute(i) for i in range(2)]
    began = time.monotonic()
    os.kill(ray.get(b.pid.remote()), signal.SIGKILL)
    for result in made:
        with pytest.raises(GraphActorDiedError, match="its other actors keep running") as caught:
            result.get(timeout=30)
        assert caught.value.fields["actor"] == b._actor_id.hex()
    assert time.monotonic() - began < 10  # of which the kernel and this machine's load take most
    ray.get(a.release.remote())  # it now sends to somebody who is gone, and must not wait for that
    g.teardown()
    eventually(lambda: not hosts.left(a))
    with chain([a], "echo") as again:
        assert again.execute(5).get() == 5


@pytest.mark.slow
def test_timeout_names_the_peer_that_did_not_answer(workers: list[Any], eventually: Eventually) -> None:
    """A process that is stopped is not dead. Here the connection from one actor to another breaks."""
    a, b = workers
    g = chain([a, b], "echo", "echo", timeout=1.5)
    pid = ray.get(b.pid.remote())
    assert g.execute(1).get() == 1
    stop(pid)
    try:
        ray.get(a.__ray_call__.remote(hosts.cut_links_to, 2))
        with pytest.raises(GraphTimeoutError, match=r"the connection from Worker#1 .* to Worker#2 .* broke: "):
            g.execute(2).get(timeout=30)
    finally:
        os.kill(pid, signal.SIGCONT)
    g.teardown()
    eventually(lambda: not any(map(hosts.left, (a, b))))


@pytest.fixture
def detached(cluster: None) -> Iterator[tuple[str, list[Any]]]:
    """Two detached actors on a host each, which outlive any driver, and their namespace."""
    namespace = uuid.uuid4().hex
    made = hosts.start(["a", "b"], names=["one", "two"], namespace=namespace, lifetime="detached")
    yield namespace, made
    for worker in made:
        ray.kill(worker)
    made.clear()


@pytest.mark.slow
def test_actors_leave_a_graph_whose_remote_driver_was_killed(detached: Any, eventually: Eventually) -> None:
    namespace, workers = detached
    driver = start_driver(namespace, "echo", "echo", check="result.get()", end="time.sleep(600)", RAYLANE_HOST="driver")
    assert all(map(hosts.left, workers))
    driver.kill()
    driver.communicate()
    eventually(lambda: not any(map(hosts.left, workers)), within_s=5)
    with chain(workers, "echo", "echo") as g:  # and serve the next one
        assert g.execute(1).get() == 1
    driver = start_driver(namespace, "echo", "wait", RAYLANE_HOST="driver")
    said, _ = driver.communicate(timeout=60)
    assert driver.returncode == 0, said
    assert not said.strip()
    ray.get(workers[1].release.remote())
    eventually(lambda: not any(map(hosts.left, workers)))

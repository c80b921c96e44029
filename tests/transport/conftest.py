"""Fixtures: a listener without Ray, and actors that the tests of one file share."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.transport.servers import Server


@pytest.fixture
def server() -> Iterator[Server]:
    """Run a listener in this process; check that its thread ends with the test."""
    before = set(threading.enumerate())  # an earlier test may have opened the endpoint of this process
    server = Server()
    yield server
    server.listener.close()
    assert not [t for t in set(threading.enumerate()) - before if t.name == "raylane-listener"]


@pytest.fixture(scope="module")
def crew(request: pytest.FixtureRequest, ray_session: None) -> Iterator[Any]:
    """Make the actors that a file's class Crew starts: starting one costs seconds."""
    from raylane.testing.leaks import leaks, snapshot

    before = snapshot()
    crew = request.module.Crew()
    yield crew
    vars(crew).clear()  # the fixture itself outlives this
    for item in request.session.items:  # and so do the arguments of the last test, among them handles of actors
        if isinstance(item, pytest.Function) and item.module is request.module and item.funcargs:
            item.funcargs.clear()
    assert not leaks(before, within_s=20)


@pytest.fixture
def tidy(crew: Any, cluster: None, eventually: Any) -> Iterator[None]:
    """Check that the makers of the crew hold nothing afterwards, and no process of theirs is new."""
    import ray

    yield
    # If a call was cancelled after it had ended, `ray.get` raises from a frame that the error itself refers to. This
    # cycle holds the ref, and with it the result, until the garbage collector runs.
    gc.collect()
    for maker in crew.makers():
        eventually(lambda maker=maker: ray.get(maker.stats.remote())["entries"] == 0, within_s=20)

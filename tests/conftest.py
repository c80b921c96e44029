"""Fixtures for all tests: one Ray cluster per session, started on first use, and a check for leaks.

Selects the fast tests: those that use neither Ray nor child processes, and are not marked `slow`. A fast test that
starts a process anyway fails.
"""

from __future__ import annotations

import gc
import multiprocessing.process
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any, NoReturn

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # One test process per core: more threads in each would only compete. torch reads this when it is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault(
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
)  # Ray's default setting prints a warning at every start
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Ray starts workers at niceness 15: beside three computing processes, an actor took 100 s to start instead of 3.
os.environ.setdefault("RAY_worker_niceness", "0")


# The marks that keep a test out of the fast ones. `ray` is set here, from the fixtures; the others by the tests.
NOT_FAST = ("ray", "processes", "slow", "gpu")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by `-m`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that use the session's Ray as `ray`, and those that are quick and self-contained as `fast`."""
    for item in items:
        if "ray_session" in getattr(item, "fixturenames", ()):
            item.add_marker("ray")
        if not any(item.get_closest_marker(name) for name in NOT_FAST):
            item.add_marker("fast")


def pytest_collection_finish() -> None:
    """Take the modules imported so far out of garbage collection.

    They are 400,000 objects that stay until the end. Without them, each of the many `gc.collect()` of the leak checks
    takes milliseconds instead of 0.25 s.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Make a fast test fail where it, or one of its fixtures, starts Ray or a child process."""
    if item.get_closest_marker("fast") is None:
        return (yield)

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        pytest.fail(
            f"{item.nodeid} counts as fast, but starts Ray or a child process. "
            "Request the fixture `ray_session`, or mark the test `processes`."
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", refuse)
        patch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
        patch.setattr(os, "fork", refuse)
        if "ray" in sys.modules:
            patch.setattr("ray.init", refuse)
        return (yield)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Start a local Ray with 8 logical CPUs: more than the machine has, because actors in tests mostly wait."""
    import ray

    ray.init(address="local", num_cpus=8, include_dashboard=False, object_store_memory=1 << 30, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def cluster(ray_session: None) -> Iterator[None]:
    """Provide the session's Ray; fail if the test leaves an actor, thread, descriptor, segment or published value."""
    from raylane.testing.leaks import leaks, snapshot

    before = snapshot()
    yield
    left = leaks(before, within_s=20)
    assert not left, f"left behind: {left}"


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Return a function that polls a condition until a deadline, and fails with the last answer."""
    import time

    def wait(condition: Callable[[], object], within_s: float = 10.0) -> None:
        deadline = time.monotonic() + within_s
        while not (answer := condition()):
            assert time.monotonic() < deadline, f"still {answer!r} after {within_s} s"
            time.sleep(0.02)

    return wait

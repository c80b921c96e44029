"""Fixtures for all tests: one Ray cluster per session, started on first use, and a check for leaks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

os.environ.setdefault(
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
)  # Ray's default setting prints a warning at every start
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Ray starts workers at niceness 15: beside three computing processes, an actor took 100 s to start instead of 3.
os.environ.setdefault("RAY_worker_niceness", "0")


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Start a local Ray with 8 logical CPUs: more than the machine has, because actors in tests mostly wait."""
    import ray

    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=1 << 30, log_to_driver=False)
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

"""What every test shares: one Ray for the session, started on first use, and a check that nothing is left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # the default warns at every start
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A local Ray with 8 logical CPUs (more than the machine has: actors here wait more than they compute)."""
    import ray

    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=1 << 30, log_to_driver=False)
    yield
    ray.shutdown()

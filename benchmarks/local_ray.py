"""The Ray in which benchmarks run: started for them, or a running cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import ray

from raylane.core.process.environment import AT_NORMAL_PRIORITY, variables


@contextlib.contextmanager
def local_ray(address: str | None = None, num_cpus: int | None = None) -> Iterator[None]:
    """Provide Ray for the `with` block, with workers at niceness 0: at Ray's 15, a busy neighbour starves them.

    Without an address it is the cluster of RAY_ADDRESS, if that is set, or a new one.
    """
    with variables(AT_NORMAL_PRIORITY, keep=True):
        ray.init(
            address=address,
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="warning",
        )
    try:
        yield
    finally:
        ray.shutdown()

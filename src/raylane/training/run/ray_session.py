"""Connection of a training run to Ray: the caller's, a running cluster, or a local one that ends with the run.

`cluster.address` decides, and if it is null the environment variable RAY_ADDRESS. Called by the trainers.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from raylane.errors import ConfigError
from raylane.training.config.schema import ClusterConfig

_CONNECT_TIMEOUT_S = 15.0
"""Time in seconds in which a Ray cluster must accept a connection."""


@contextmanager
def connect(cluster: ClusterConfig) -> Iterator[None]:
    """Provide an initialised Ray during the `with` block; a Ray that the caller has initialised is left as it is.

    Raises ConfigError if nothing answers at the address, or if it is the address of a Ray client server.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # without it Ray prints a warning at every start
    # An address from the environment is read here, so that both sources get the same checks.
    source = "cluster.address" if cluster.address is not None else "RAY_ADDRESS"
    address = cluster.address or os.environ.get("RAY_ADDRESS") or "local"
    level = logging.WARNING
    if address == "local":
        # Ray counts logical CPUs. With fewer cores than workers the run is slow, but it must not wait forever.
        needed_cpus = cluster.num_workers * cluster.cpus_per_worker
        cpus = max(needed_cpus, os.cpu_count() or 1)
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, logging_level=level)
    else:
        if address.startswith("ray://"):
            raise ConfigError(
                f"{source}={address} is the address of a Ray client server, through which tensors would be copied "
                "twice. Start the command on a node of the cluster (`ray job submit`, see docs/howto/cluster.md) with "
                f"{source}=auto"
            )
        host, colon, port = address.rpartition(":")
        if colon and port.isdecimal():  # unlike "auto"
            # Ray itself would try for minutes.
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
            except (OSError, OverflowError) as error:
                raise _unreachable(address, source, error) from error
        try:
            ray.init(address=address, logging_level=level)
        except (ConnectionError, ValueError) as error:  # "auto" without a cluster, a text that is no address
            raise _unreachable(address, source, error) from error
    try:
        yield
    finally:
        ray.shutdown()


def _unreachable(address: str, source: str, error: Exception) -> ConfigError:
    remedy = "correct cluster.address, or set it to local"
    if source == "RAY_ADDRESS":
        remedy = "correct RAY_ADDRESS, or unset it"
    return ConfigError(
        f"the Ray cluster at {source}={address} cannot be reached: {error}. Start it (`ray start --head`), {remedy} to "
        "run on this machine alone"
    )

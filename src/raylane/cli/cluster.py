"""Connection of a command to a running Ray cluster."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from typing import Any

import ray

from raylane.errors import ConfigError
from raylane.training.run.ray_session import start_ray


def add_address(parser: argparse.ArgumentParser) -> None:
    """Add --address."""
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="the Ray cluster (default: RAY_ADDRESS, else the one of this host)"
    )


@contextlib.contextmanager
def connected(address: str | None, default: str | None = "auto", **options: Any) -> Iterator[None]:
    """Connect to a cluster for the `with` block, unless this process is connected. ConfigError if there is none.

    Without an address here and in RAY_ADDRESS, `default` is that of ray.init, which takes the options too.
    """
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or default
    try:
        start_ray(address, log_to_driver=False, logging_level="warning", **options)
    except (OSError, ValueError) as error:
        remedy = "" if isinstance(error, PermissionError) else ". Name a running one with --address or RAY_ADDRESS"
        raise ConfigError(f"could not connect to a Ray cluster at {address}: {error}{remedy}") from error
    try:
        yield
    finally:
        ray.shutdown()

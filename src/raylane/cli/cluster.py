"""Connection of a command to a running Ray cluster."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator

import ray

from raylane.core.process.reachable import check_reachable
from raylane.errors import ConfigError


def add_address(parser: argparse.ArgumentParser) -> None:
    """Add --address."""
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="the Ray cluster (default: RAY_ADDRESS, else the one of this host)"
    )


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connect to a cluster for the `with` block, unless this process is connected. ConfigError if there is none."""
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        check_reachable(address)
        ray.init(address=address, log_to_driver=False, logging_level="warning")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"could not connect to a Ray cluster at {address}: {error}. Name a running one with --address"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()

"""Helpers of drivers that run on the head of `tests.networks.Hosts`.

A driver prints `said: ...` for its test to check, and `ask: ...` for things that only the test can do, such as cutting
a cable; the test answers each of those with one line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray


def connect(address: str, **options: Any) -> None:
    """Connect to the cluster, of which `address` is the first node's."""
    ray.init(address=f"{address}:6399", log_to_driver=False, logging_level="error", **options)
    until(lambda: sum(node["Alive"] for node in ray.nodes()) == 4, "the other nodes", 60)


class Placeholder:
    """Actor that takes the CPUs of a node."""

    def ready(self) -> None: ...


def occupy(*resources: str) -> list[Any]:
    """Take all CPUs of nodes, so that others are used; return the actors that hold them."""
    actor = ray.remote(num_cpus=2)(Placeholder)
    actors = [actor.options(resources={name: 0.1}).remote() for name in resources]
    ray.get([placeholder.ready.remote() for placeholder in actors], timeout=60)
    return actors


def say(text: str) -> None:
    print(f"said: {text}", flush=True)


def ask(text: str) -> None:
    print(f"ask: {text}", flush=True)
    sys.stdin.readline()


def until(condition: Callable[[], bool], what: str, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.02)


def cable_bytes() -> tuple[int, int]:
    """Return the bytes that this host has received and sent by its cable."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if "eth0" in line)
    figures = line.split(":")[1].split()
    return int(figures[0]), int(figures[8])


def node_of(resource: str) -> str:
    return next(str(node["NodeID"]) for node in ray.nodes() if resource in node["Resources"])

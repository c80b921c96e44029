"""Actors on pretended hosts (RAYLANE_HOST): what they share with each other and the driver is the network alone. And
what tests of hops want to know and to break, in any process of a graph."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import ray
from tests.graph.graph_actors import Worker

from raylane.graph.worker import loop as lane


def start(on: list[str], names: list[str] | None = None, **options: Any) -> list[Any]:
    """One actor for each of these hosts; with names for Ray if they are given."""
    actor = ray.remote(num_cpus=0.1)(Worker)
    made = []
    for index, host in enumerate(on):
        named = {} if names is None else {"name": names[index]}
        made.append(actor.options(runtime_env={"env_vars": {"RAYLANE_HOST": host}}, **named, **options).remote())
    ray.get([worker.__ray_ready__.remote() for worker in made])
    return made


def connections() -> int:
    """Connections to listeners of raylane on this machine (they are Unix sockets here); the listeners not counted."""
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    return sum("@raylane-" in line and line.split()[5] == "03" for line in lines)


def left(worker: Any) -> list[str]:
    """What graphs have left in an actor, besides its doorbell and its listener, which serves any number of graphs."""
    return [found for found in ray.get(worker.left.remote(), timeout=30) if found != "raylane-listener"]


def wait_until_gone(workers: list[Any], connections_before: int, within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while any(found := [*map(left, workers), connections() - connections_before]):
        assert time.monotonic() < deadline, f"left behind: {found}"
        time.sleep(0.05)


def _stations() -> list[Any]:
    return [residence._station for residence in lane.lane()._residences if residence._station is not None]


def cut_hops(instance: Any) -> int:
    """Run in an actor: break every connection that leaves it."""
    hops = [hop for station in _stations() for hop in station.hops.values()]
    for hop in hops:
        hop.cut()
    return len(hops)


def cut_inbound(instance: Any) -> int:
    """Run in an actor: break every connection that arrives there."""
    inbound = [found for station in _stations() for found in station._inbounds.values()]
    for found in inbound:
        if (sock := found._socket) is not None:
            import contextlib
            import socket

            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
    return len(inbound)


def reconnections(instance: Any) -> int:
    return sum(hop.reconnections for station in _stations() for hop in station.hops.values())

"""Actors on pretended hosts (RAYLANE_HOST), which share only the network, and functions that cut their connections."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import ray
from tests.graph.graph_actors import Worker
from tests.process_tools import descendants, sockets

from raylane.graph.channels.peer_network import PeerNetwork
from raylane.graph.worker.loop import graph_loop


def start(on: list[str], names: list[str] | None = None, **options: Any) -> list[Any]:
    """Start one actor on each of these hosts, with Ray names if they are given."""
    actor = ray.remote(num_cpus=0.1)(Worker)
    made = []
    for index, host in enumerate(on):
        named = {} if names is None else {"name": names[index]}
        made.append(actor.options(runtime_env={"env_vars": {"RAYLANE_HOST": host}}, **named, **options).remote())
    ray.get([worker.__ray_ready__.remote() for worker in made])
    return made


def connections() -> int:
    """Count the connections to listeners of raylane, Unix sockets here, that this test process and its actors have."""
    ours = sockets(descendants())
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return sum("@raylane-" in line[-1] and line[5] == "03" and line[6] in ours for line in lines)


def left(worker: Any) -> list[str]:
    """Return what graphs have left in an actor, except its doorbell and its listener, which serve later graphs."""
    return [found for found in ray.get(worker.left.remote(), timeout=30) if found != "raylane-listener"]


def wait_until_gone(workers: list[Any], connections_before: int, within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while any(found := [*map(left, workers), max(0, connections() - connections_before)]):
        assert time.monotonic() < deadline, f"left behind: {found}"
        time.sleep(0.05)


def _networks() -> list[PeerNetwork]:
    return [session.network for session in graph_loop().sessions if session.network is not None]  # type: ignore[attr-defined]


def cut_links(instance: Any) -> int:
    """Break every connection that leaves this actor. Runs in the actor."""
    links = [link for network in _networks() for link in network.links.values()]
    for link in links:
        link.cut()
    return len(links)


def cut_links_to(instance: Any, member: int) -> int:
    """Break the connections from this actor to a member of its graphs. Runs in the actor."""
    links = [link for network in _networks() for link in network.links.values() if link.member == member]
    for link in links:
        link.cut()
    return len(links)


def cut_inbound(instance: Any, member: int) -> int:
    """Break the connections that arrive at this actor from a member of its graphs. Runs in the actor."""
    receivers = [
        receiver for network in _networks() for (to, _), receiver in network._receivers.items() if to == member
    ]
    for receiver in receivers:
        receiver.close()
    return len(receivers)

"""Cost of one execution of a graph over many hosts, simulated from recorded costs of single operations. Pure.

The routes are pure (`graph.plan.routing`), and the cost of each operation is measured on one machine; so the cost of a
graph over 512 hosts can be computed without these. The simulation follows one small input of the driver to every actor,
and one small result of each actor back:

    driver   encode -> send to its relays, one after the other          relay    receive -> write the ring of its host
    driver   for each result: receive from a link -> read the ring               -> send to its own relays

A process does one operation at a time. Methods take no time: the figures are the overhead alone. `python -m
benchmarks.studies.graph_scale` prints the figures of docs/design/scaling.md.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass, replace

from raylane.graph.plan import routing
from raylane.graph.plan.ir import DRIVER
from raylane.graph.plan.routing import Route, Routes

ENCODE_US = 2.0
"""Encode a dict of three small items.

This and the following four: medians of 15 rounds on the 2-core x86-64 VM of docs/design/log.md, Python 3.11.7,
2026-11-22, in one process at full speed (no reader asleep), with the classes that graphs use.
"""
RING_WRITE_US, EACH_READER_US = 1.2, 0.46
"""Write a small message into a ring, and post semaphore and doorbell of one reader (1.6 us for one, 4.9 for eight)."""
LINK_SEND_US = 13.2
"""Send a small frame over a link (`PeerLink.send`), on a TCP connection of the loopback interface."""
RECEIVE_US = 8.4
"""Receive a small frame in a receiver's thread, without the write into the ring."""
READ_US = 2.3
"""Read and unpickle a small message from a ring."""
HOP_US = 15.0
"""Time of a frame between send and receipt: the wire and the wake-up of the receiver.

Half of an echo over TCP between network namespaces (83 us, docs/design/log.md of 2026-11-20), less the operations
above. A real network adds its latency at each level.
"""


@dataclass(frozen=True)
class Cost:
    """Cost of one execution."""

    sends: int
    """Frames that the driver sends."""
    submit_us: float
    """CPU time of the driver until all inputs are sent: no other execution can be submitted meanwhile."""
    arrival_us: float
    """Time until the last actor can read the input."""
    collect_us: float
    """CPU time of the driver for receiving and reading one result of each actor."""
    levels: int
    """Links in sequence from the driver to the last host."""


def hosts_of(actors: int, hosts: int) -> list[int]:
    """Return the host of each member. Host 0 is the driver's own; the actors fill the others evenly."""
    return [0, *(1 + actor * hosts // actors for actor in range(actors))]


def broadcast(actors: int, hosts: int, *, relays: bool = True, tree: bool = True) -> Route:
    """Return the route of an input to all actors.

    Without `tree` the driver sends to each host itself; without `relays` even to each actor.
    """
    places = hosts_of(actors, hosts) if relays else list(range(actors + 1))
    found = routing.route(0, DRIVER, range(1, actors + 1), places)
    if tree and relays:
        return found
    return replace(found, relays=tuple(replace(relay, source=DRIVER, level=1) for relay in found.relays))


def simulate(route: Route) -> Cost:
    """Return the cost of one execution whose input takes this route."""
    sent: collections.Counter[int] = collections.Counter()
    ready = {DRIVER: ENCODE_US}
    """Time at which each sender can begin to send."""
    for relay in route.relays:  # a relay stands behind the one that sends to it
        sent[relay.source] += 1
        arrived = ready[relay.source] + sent[relay.source] * LINK_SEND_US + HOP_US
        ready[relay.member] = arrived + RECEIVE_US + RING_WRITE_US + EACH_READER_US * len(relay.readers)
    results = sum(len(relay.readers) for relay in route.relays)
    return Cost(
        sends=sent[DRIVER],
        submit_us=ENCODE_US + sent[DRIVER] * LINK_SEND_US,
        arrival_us=max(ready.values()),
        collect_us=results * (RECEIVE_US + RING_WRITE_US + EACH_READER_US + READ_US),
        levels=max((relay.level for relay in route.relays), default=0),
    )


def driver_links(actors: int, hosts: int) -> tuple[int, int]:
    """Return (links that the driver opens, links that it accepts) for a graph of one input and a result of each actor.

    Each accepted link has a receiver's thread in the driver.
    """
    places = hosts_of(actors, hosts)
    members = range(1, actors + 1)
    found = Routes(
        edges=(
            routing.route(0, DRIVER, members, places),
            *(routing.route(member, member, (DRIVER,), places) for member in members),
        ),
        orders=tuple(routing.route(0, DRIVER, (member,), places, control=True) for member in members),
        reports=tuple(routing.route(0, member, (DRIVER,), places, control=True) for member in members),
    )
    return sum(link[0] == DRIVER for link in found.links), sum(link[1] == DRIVER for link in found.links)


def table(actors: int, hosts: int) -> str:
    """Return the costs with and without relays and tree, as a table in Markdown."""
    ways = {
        "one frame for each actor": broadcast(actors, hosts, relays=False),
        "one frame for each host, all from the driver": broadcast(actors, hosts, tree=False),
        "one frame for each host, down the tree (as built)": broadcast(actors, hosts),
    }
    lines = [
        "| input of the driver | frames sent by the driver | driver busy | last actor has it after | levels |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, route in ways.items():
        cost = simulate(route)
        lines.append(
            f"| {name} | {cost.sends:,} | {cost.submit_us / 1000:.2f} ms | {cost.arrival_us / 1000:.2f} ms | "
            f"{cost.levels} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the figures for 4,096 actors on 512 hosts."""
    actors, hosts = 4096, 512
    opened, accepted = driver_links(actors, hosts)
    print(table(actors, hosts))
    print(f"\nresults: {simulate(broadcast(actors, hosts)).collect_us / 1000:.1f} ms of the driver's time")
    print(f"links of the driver: {opened:,} opened, {accepted:,} accepted")


if __name__ == "__main__":
    main()

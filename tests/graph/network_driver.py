"""The driver of `tests/graph/test_networks.py`; it runs on the head of `tests.networks.Hosts`."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import numpy as np
import ray
from tests.graph.graph_actors import Worker
from tests.network_drivers import ask, connect, say

import raylane
from raylane.core.process.place import here
from raylane.errors import GraphActorDiedError, GraphTimeoutError


def place(instance: Any) -> Any:
    return here()


def die(instance: Any) -> None:
    os.kill(os.getpid(), 9)


def pull_for_a_while() -> None:
    time.sleep(0.3)  # while the graph runs
    ask("cut")
    time.sleep(0.7)
    ask("restore")


def measure(actor: Any) -> None:
    """An echo of a small dict on an actor of another node, by graph and by call."""
    with raylane.InputNode() as x:
        node = raylane.bind(actor.echo, x)
    with raylane.compile(node) as g:
        ways = {"graph": lambda: g.execute({"step": 1}).get(), "call": lambda: ray.get(actor.echo.remote({"step": 1}))}
        for name, way in ways.items():
            taken = []
            for _ in range(300):
                began = time.perf_counter()
                way()
                taken.append(time.perf_counter() - began)
            say(f"echo by {name}: p50 {sorted(taken)[150] * 1e6:.0f} us, p99 {sorted(taken)[297] * 1e6:.0f} us")


def main(address: str) -> None:
    connect(address)
    actor = ray.remote(num_cpus=0.1)(Worker)
    # Of the nodes it is "one" whose cable the test can cut.
    near, one, two, too = (actor.options(resources={name: 0.1}).remote() for name in ("head", "two", "one", "one"))
    places = ray.get([worker.__ray_call__.remote(place) for worker in (near, one, two, too)])
    assert len({found.pid_namespace for found in (*places, here())}) == 3
    assert len({found.net_namespace for found in (*places, here())}) == 3
    with raylane.InputNode() as x:
        passed = raylane.bind(two.echo, raylane.bind(one.echo, x))
        node = raylane.MultiOutputNode(
            [passed, raylane.bind(near.total, passed), raylane.bind(too.total, passed), raylane.bind(one.total, passed)]
        )
    g = raylane.compile(node, max_inflight=3, timeout=30)
    for line in g.show().splitlines():
        say(line)

    def run(count: int) -> None:
        for i in range(count):
            data = np.full((5, 20_000, 300_000)[i % 3], float(i))
            echoed, *sums = g.execute(data).get()
            assert (echoed == data).all()
            assert sums == [data.sum()] * 3

    run(30)
    measure(one)
    pull = threading.Thread(target=pull_for_a_while)
    pull.start()
    while pull.is_alive():
        run(3)
    run(3)
    say("went on")
    two.__ray_call__.remote(die)
    began = time.monotonic()
    try:
        while True:
            g.execute(np.ones(5)).get()
    except GraphActorDiedError as error:
        named = error.fields["actor"]
        say(f"died, seen after {time.monotonic() - began:.2f} s")
    assert named == two._actor_id.hex()
    g.teardown()
    with raylane.InputNode() as x:
        node = raylane.bind(too.add, raylane.bind(one.add, x, 1), 1)
    with raylane.compile(node, timeout=2) as again:
        assert again.execute(1).get() == 3
        ask("cut")
        began = time.monotonic()
        try:
            again.execute(2).get(timeout=60)
        except GraphTimeoutError as error:
            say(f"lost, seen after {time.monotonic() - began:.1f} s: {error}")
        ask("restore")
    say("done")


if __name__ == "__main__":
    main(sys.argv[1])

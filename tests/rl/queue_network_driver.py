"""The driver of `test_queue_networks`, run inside the head's namespace: a producer on one host, consumers on others.

It prints `said: ...` for the test to check.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import Any

import ray
import torch
from tests.network_drivers import cable_bytes, connect, node_of, say

from raylane.errors import QueueLostError
from raylane.rl import TrajectoryQueue
from raylane.testing.leaks import leaks, snapshot

ELEMENTS = 250_000
NBYTES = 8 * ELEMENTS
"""Bytes of an item."""


class Member:
    def __init__(self, queue: TrajectoryQueue) -> None:
        self.queue = queue
        self.batch: Any = None

    def put(self, numbers: list[int]) -> None:
        for number in numbers:
            self.queue.put({"number": number, "tokens": torch.full((ELEMENTS,), number)}, versions=((number, 1),))
        self.queue.flush()

    def take(self, count: int, acknowledge: bool = True) -> list[int]:
        """Return the numbers of items."""
        self.batch = self.queue.take(count, timeout=30)
        for value in self.batch.items:
            assert set(value["tokens"].tolist()) == {value["number"]}
        if acknowledge:
            self.batch.acknowledge()
        return [value["number"] for value in self.batch.items]

    def open(self, tickets: Any) -> str:
        """Read items that another process has taken; return the error."""
        try:
            self.queue.open(tickets)
        except QueueLostError as error:
            return str(error)
        return ""

    def pid(self) -> int:
        return os.getpid()

    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def member(queue: TrajectoryQueue, host: str) -> Any:
    return ray.remote(num_cpus=0)(Member).options(resources={host: 0.1}).remote(queue)


def payloads_go_straight(queue: TrajectoryQueue) -> None:
    """Send tickets only from the driver's host, where the queue's actor is."""
    producer, consumer = member(queue, "one"), member(queue, "two")
    ray.get([producer.pid.remote(), consumer.pid.remote()], timeout=60)
    before = cable_bytes()[1]
    taking = consumer.take.remote(10)
    ray.get(producer.put.remote(list(range(10))), timeout=60)
    assert ray.get(taking, timeout=60) == list(range(10))
    share = (cable_bytes()[1] - before) / (10 * NBYTES)
    say(f"{share:.3f} of the payloads left the driver's host")
    assert share < 0.1
    say("straight")


def consumer_dies(queue: TrajectoryQueue) -> None:
    """Hand the items of a dead consumer of another host on to one of this host."""
    producer, consumer, other = member(queue, "one"), member(queue, "two"), member(queue, "head")
    ray.get(producer.put.remote([1, 2, 3]), timeout=60)
    assert ray.get(consumer.take.remote(2, False), timeout=60) == [1, 2]
    consumer.end.remote()
    assert ray.get(other.take.remote(3), timeout=60) == [1, 2, 3]
    assert queue.stats().returned == 2
    say("handed on")


def memory_dies(queue: TrajectoryQueue) -> None:
    """Tell a consumer of another host that the actor that held its items has died; keep the items of other hosts."""
    producer, near, consumer = member(queue, "one"), member(queue, "head"), member(queue, "two")
    ray.get(producer.put.remote([1, 2]), timeout=60)
    ray.get(near.put.remote([3]), timeout=60)
    tickets = queue.take_tickets(3)
    hosts = ray.get(queue._actor.hosts.remote())
    ray.kill(hosts[node_of("one")])
    error = ray.get(consumer.open.remote(tickets), timeout=60)
    say(error)
    assert error.startswith(f"2 items on node {node_of('one')} are lost: ")
    assert queue.stats().lost == 2
    queue.give_back(tickets)
    assert ray.get(near.take.remote(1), timeout=60) == [3]
    again = member(queue, "one")
    ray.get(again.put.remote([4]), timeout=60)
    assert ray.get(consumer.take.remote(1), timeout=60) == [4]
    say("told")


def main(address: str) -> None:
    connect(address)
    before = snapshot()
    for act in (payloads_go_straight, consumer_dies, memory_dies):
        act(TrajectoryQueue(max_bytes=64 << 20))
    gc.collect()
    left = leaks(before, within_s=20)
    assert not left, left
    say("done")


if __name__ == "__main__":
    main(sys.argv[1])

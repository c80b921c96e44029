"""Producers and consumers of a queue in actors of a real Ray, and their deaths."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import pytest
import ray
import torch

from raylane.errors import GraphValueError, QueueClosedError, QueueError, QueueLostError, QueueTimeoutError
from raylane.rl import TrajectoryQueue
from raylane.rl.queue import calls
from raylane.rl.queue.handle import WINDOW_BYTES

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


class Member:
    """Producer and consumer."""

    def __init__(self, queue: TrajectoryQueue) -> None:
        self.queue = queue
        self.batch: Any = None

    def put(self, numbers: list[int], elements: int = 100, group: Hashable = None, flush: bool = True) -> None:
        for number in numbers:
            value = {"number": number, "tokens": torch.full((elements,), number)}
            self.queue.put(value, group=group, versions=((number, 3),), timeout=30)
        if flush:
            self.queue.flush(timeout=30)

    def take(self, count: int, copy: bool = True) -> list[int]:
        self.batch = self.queue.take(count, copy=copy, timeout=30)
        for value in self.batch.items:
            assert set(value["tokens"].tolist()) == {value["number"]}
        return [value["number"] for value in self.batch.items]

    def acknowledge(self) -> None:
        self.batch.acknowledge()
        self.batch = None

    async def consume(self, count: int) -> tuple[list[int], int]:
        """Return the numbers of all items, and the growth of this process in bytes."""
        numbers, before = [], 0
        async for batch in self.queue.batches(count, at_least=1):
            numbers += [value["number"] for value in batch.items]
            before = before or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return numbers, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024

    def pid(self) -> int:
        return os.getpid()


def member(queue: TrajectoryQueue) -> Any:
    return ray.remote(num_cpus=0)(Member).remote(queue)


def kill(actor: Any) -> None:
    os.kill(ray.get(actor.pid.remote()), signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.pid.remote(), timeout=30)


def numbers(queue: TrajectoryQueue, count: int) -> list[int]:
    batch = queue.take(count, timeout=30)
    batch.acknowledge()
    return [value["number"] for value in batch.items]


def test_items_go_from_producers_to_consumers() -> None:
    queue = TrajectoryQueue(max_items=64)
    producers, consumers = [member(queue) for _ in range(2)], [member(queue) for _ in range(2)]
    consuming = [consumer.consume.remote(16) for consumer in consumers]
    ray.get([producer.put.remote(list(range(i, 400, 2))) for i, producer in enumerate(producers)], timeout=60)
    queue.close()
    taken = [number for found, _ in ray.get(consuming, timeout=60) for number in found]
    assert sorted(taken) == list(range(400))
    stats = queue.stats()
    assert (stats.put, stats.done, stats.lost, stats.returned) == (400, 400, 0, 0)
    assert stats.tokens == dict.fromkeys(range(400), 3)


def test_full_queue_makes_its_producer_wait(eventually: Callable[..., None]) -> None:
    queue = TrajectoryQueue(max_items=4)
    queue.put_many(range(6))
    eventually(lambda: queue.stats().ready == 4)
    with pytest.raises(QueueTimeoutError, match=r"after 0.2 s the queue is full. Take from it, or raise the timeout"):
        queue.flush(timeout=0.2)
    first = queue.take(4)
    assert first.items == [0, 1, 2, 3]
    assert queue.stats().ready == 0
    first.acknowledge()
    queue.flush(timeout=30)
    queue.take(2).acknowledge()


def test_values_of_a_stream_come_one_by_one() -> None:
    queue = TrajectoryQueue()
    taken: list[int] = []

    def stream() -> Iterator[torch.Tensor]:
        for number in range(3):
            yield torch.full((1000,), number)
            # The value before has passed, and the next one is not made yet.
            batch = queue.take(1, timeout=30)
            taken.append(int(batch.items[0][0]))
            batch.acknowledge()

    queue.put_many(stream())
    assert taken == [0, 1, 2]


def test_one_call_puts_more_than_the_window() -> None:
    queue = TrajectoryQueue()
    queue.put_many([torch.full((WINDOW_BYTES // 32,), i) for i in range(12)], timeout=30)
    batch = queue.take(12, copy=False, timeout=30)
    assert [int(value[-1]) for value in batch.items] == list(range(12))


def test_take_says_how_many_are_missing() -> None:
    queue = TrajectoryQueue()
    queue.put("one")
    queue.flush()
    with pytest.raises(QueueTimeoutError, match=r"after 0.2 s 1 of 2 groups are there"):
        queue.take(2, timeout=0.2)
    assert queue.take(2, at_least=1, copy=False).items == ["one"]
    with pytest.raises(ValueError, match="at_least must be from 1 to count=2, got 3"):
        queue.take(2, at_least=3)


@contextlib.contextmanager
def stopped(actor: Any) -> Iterator[None]:
    pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=30)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_stalled_queue_leases_nothing_to_lost_calls(
    monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    monkeypatch.setattr(calls, "MARGIN_S", 0.0)
    queue, other = TrajectoryQueue(), TrajectoryQueue()
    other._actor = queue._actor
    queue.put_many(range(3))
    queue.flush()

    async def first() -> Any:
        return await anext(queue.batches(2))

    async def cancelled() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(first(), 0.2)

    with stopped(queue._actor):
        with pytest.raises(QueueTimeoutError, match=r"the queue did not answer within 0.2 s"):
            queue.take(2, timeout=0.2)
        asyncio.run(cancelled())
        previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            queue.take(2, timeout=60)
        signal.signal(signal.SIGALRM, previous)
        with pytest.raises(QueueTimeoutError):  # joining
            other.put(3, timeout=0.2)
    eventually(lambda: queue.stats().ready == 3)
    assert queue.take(3, timeout=30).items == [0, 1, 2]
    del other
    hosts = ray.get(queue._actor.__ray_call__.remote(lambda actor: actor._host_of.keys() - actor._ended), timeout=30)
    assert hosts == {queue._member.number}  # type: ignore[union-attr]


def test_cancelled_batches_lose_nothing_and_end_at_once() -> None:
    queue = TrajectoryQueue()

    async def wait_in_vain() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(queue.batches(1)), 0.2)

    runner = threading.Thread(target=asyncio.run, args=(wait_in_vain(),), daemon=True)
    runner.start()
    runner.join(20)
    assert not runner.is_alive()
    queue.put("x")
    assert queue.take(1, timeout=30).items == ["x"]

    async def late() -> None:
        await anext(queue.batches(1, timeout=0.1))

    with pytest.raises(QueueTimeoutError, match=r"after 0.1 s 0 of 1 groups are there"):
        asyncio.run(late())


BAD_ITEMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "group": ({"group_size": 2}, {"group": [1]}),
    "group-object": ({}, {"group": object()}),
    "versions": ({"max_lag": 2}, {"versions": (7, 8)}),
    "versions-text": ({"order": "newest"}, {"versions": (("a", 1),)}),
}


@pytest.mark.parametrize("case", BAD_ITEMS)
def test_bad_item_fails_alone(case: str) -> None:
    options, bad = BAD_ITEMS[case]
    queue = TrajectoryQueue(**options)
    with pytest.raises(ValueError, match=case.partition("-")[0]):
        queue.put("bad", **bad)
    for _ in range(options.get("group_size", 1)):
        queue.put("good", group="g")
    assert set(queue.take(1, timeout=30).items) == {"good"}


def test_calls_with_wrong_values_are_refused() -> None:
    queue = TrajectoryQueue()
    for call, text in (
        (lambda: queue.take(1.5), "count must be an integer of at least 1, got 1.5"),
        (lambda: queue.take(0), "count must be an integer of at least 1, got 0"),
        (lambda: queue.take(4097), "4097 groups are never there at once: the queue has max_items=4096"),
        (lambda: queue.set_version(None), "version must be an integer of at least 0, got None"),
        (lambda: TrajectoryQueue(max_items=2.5), "max_items must be an integer of at least 1, got 2.5"),
    ):
        with pytest.raises(ValueError, match=text):
            call()


def test_closed_queue_is_emptied_and_takes_nothing() -> None:
    queue = TrajectoryQueue(group_size=2)
    other = member(queue)
    queue.put_many(["a", "b", "c"], group="g")
    queue.close()

    async def all_items() -> list[Any]:
        return [batch.groups async for batch in queue.batches(4)]

    assert asyncio.run(all_items()) == [[["a", "b"]]]
    queue.put("late", group="g")
    with pytest.raises(QueueClosedError, match="the queue is closed: the item is not in it"):
        queue.flush()
    with pytest.raises(ray.exceptions.RayTaskError, match="the queue is closed"):
        ray.get(other.put.remote([1], group="g"))


def test_group_must_fit_the_queue() -> None:
    grouped = TrajectoryQueue(group_size=2)
    with pytest.raises(ValueError, match="a queue of group_size=2 needs the group of each item"):
        grouped.put("a")
    with pytest.raises(ValueError, match="versions must have one entry for each of 2 values, got 1"):
        grouped.put_many(["a", "b"], group="g", versions=[()])


def test_ref_inside_is_refused() -> None:
    queue = TrajectoryQueue()
    with pytest.raises(GraphValueError, match="ObjectRef"):
        queue.put({"ref": ray.put(1)})


def test_loop_that_fails_gives_its_batch_back(eventually: Callable[..., None]) -> None:
    queue = TrajectoryQueue()
    queue.put_many(range(3))
    queue.flush()

    async def fail() -> None:
        async for batch in queue.batches(2):
            raise KeyError(batch.items[1])

    with pytest.raises(KeyError):
        asyncio.run(fail())
    gc.collect()  # the generator
    eventually(lambda: queue.stats().ready == 3)
    assert queue.take(3).items == [0, 1, 2]


def test_dead_producers_lose_nothing_and_are_named(eventually: Callable[..., None]) -> None:
    queue = TrajectoryQueue()
    producer, other = member(queue), member(queue)
    ray.get(other.put.remote([7]))
    ray.get(producer.put.remote([1, 2, 3], 500_000))
    kill(producer)
    assert sorted(numbers(queue, 4)) == [1, 2, 3, 7]
    kill(other)
    eventually(lambda: queue.stats().ended_producers == 2)
    with pytest.raises(QueueTimeoutError, match="0 of 1 groups are there, and all 2 processes that have put"):
        queue.take(1, timeout=0.2)


def test_queue_without_members_keeps_its_items(eventually: Callable[..., None]) -> None:
    queue = TrajectoryQueue()
    producer = member(queue)
    ray.get(producer.put.remote([1, 2]))
    kill(producer)
    assert numbers(queue, 1) == [1]  # by the only member
    (host,) = ray.get(queue._actor.hosts.remote()).values()
    ray.kill(host)  # which is watched again
    eventually(lambda: queue.stats().lost == 1)


@pytest.mark.claim("GRPO", "a dead consumer of the queue loses nothing")
def test_dead_consumer_hands_its_items_on() -> None:
    queue = TrajectoryQueue()
    queue.put_many({"number": i, "tokens": torch.tensor([i])} for i in range(4))
    queue.flush()
    consumer = member(queue)
    assert ray.get(consumer.take.remote(2)) == [0, 1]
    kill(consumer)
    assert numbers(queue, 4) == [0, 1, 2, 3]
    assert queue.stats().returned == 2


def test_at_most_once_loses_what_a_dead_consumer_had(eventually: Callable[..., None]) -> None:
    queue = TrajectoryQueue(delivery="at_most_once")
    queue.put_many({"number": i, "tokens": torch.tensor([i])} for i in range(4))
    queue.flush()
    consumer = member(queue)
    assert ray.get(consumer.take.remote(2, False)) == [0, 1]
    kill(consumer)
    eventually(lambda: queue.stats().lost == 2)
    assert numbers(queue, 2) == [2, 3]


def test_memory_of_old_items_is_written_again() -> None:
    queue = TrajectoryQueue(max_bytes=8 << 20)
    producer, consumer = member(queue), member(queue)
    consuming = consumer.consume.remote(4)
    ray.get(producer.put.remote(list(range(600)), 50_000), timeout=60)
    queue.close()
    found, grown = ray.get(consuming, timeout=60)
    assert found == list(range(600))
    assert grown < 60 << 20  # of 240 MB that have passed; the first use of torch takes up to 40


@pytest.mark.slow
def test_five_gigabytes_pass_beside_the_driver() -> None:
    queue = TrajectoryQueue(max_bytes=256 << 20)
    elements, count = 1 << 19, 1280  # 4 MiB each
    producers, consumers = [member(queue) for _ in range(2)], [member(queue) for _ in range(2)]
    ray.get([consumer.pid.remote() for consumer in consumers], timeout=60)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    consuming = [consumer.consume.remote(4) for consumer in consumers]
    halves = [list(range(i, count, 2)) for i in range(2)]
    putting = [producer.put.remote(half, elements) for producer, half in zip(producers, halves, strict=True)]
    most = 0
    while len(ray.wait(putting, num_returns=2, timeout=0.2)[0]) < 2:
        most = max(most, queue.stats().nbytes)
    ray.get(putting, timeout=60)
    queue.close()
    results = ray.get(consuming, timeout=60)
    assert sorted(number for taken, _ in results for number in taken) == list(range(count))
    assert 0 < most <= queue.options.max_bytes
    # Of 5 GiB. A producer may keep free memory up to its half of the queue while the other one fills all of it.
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 32 << 20
    assert all(grown < queue.options.max_bytes * 3 // 2 + (32 << 20) for _, grown in results)


def test_tickets_are_opened_by_other_processes() -> None:
    queue = TrajectoryQueue()
    queue.put_many(torch.full((3,), i) for i in range(4))
    queue.flush()
    tickets = queue.take_tickets(4)

    @ray.remote(num_cpus=0)
    def total(queue: TrajectoryQueue, tickets: Any) -> int:
        with pytest.raises(
            QueueError, match=r"acknowledge has no effect on the items \[1, 2, 3, 4\]: this handle has not"
        ):
            queue.acknowledge(tickets)
        return int(sum(value.sum() for group in queue.open(tickets) for value in group))

    assert ray.get(total.remote(queue, tickets), timeout=30) == 18
    queue.acknowledge(tickets)


def test_forked_child_is_refused() -> None:
    queue = TrajectoryQueue()
    queue.put("parent")
    queue.flush()
    assert queue._member is not None
    queue._member.pid += 1  # as it would be in a child
    for call in (lambda: queue.put("child"), lambda: queue.take(1)):
        with pytest.raises(QueueError, match=r"was forked from process .* with the method spawn"):
            call()
    queue._member.pid -= 1
    assert queue.take(1).groups == [["parent"]]


def test_dead_queue_is_told_to_everybody() -> None:
    queue = TrajectoryQueue()
    queue.put(1)
    queue.flush()
    ray.kill(queue._actor)
    with pytest.raises(QueueLostError, match=r"(?s)the actor of the queue has ended: .* Make a new queue"):
        queue.take(2)  # waits for the second item
    with pytest.raises(QueueLostError):
        queue.put(2)


def test_dead_host_actor_is_told_and_replaced(eventually: Callable[..., None]) -> None:
    queue = TrajectoryQueue()
    queue.put(1)
    queue.flush()
    (host,) = ray.get(queue._actor.hosts.remote()).values()
    tickets = queue.take_tickets(1)
    ray.kill(host)
    eventually(lambda: queue.stats().lost == 1)
    with pytest.raises(QueueLostError, match="the actor that held the queue's memory on this host has died"):
        queue.take(1)
    queue.acknowledge(tickets)  # by the new member, which does not have them
    producer = member(queue)
    ray.get(producer.put.remote([5]), timeout=60)
    assert numbers(queue, 1) == [5]
    queue.put({"number": 6})
    assert numbers(queue, 1) == [6]

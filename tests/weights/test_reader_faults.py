"""Readers that come and go while a trainer publishes all the time: those that stay miss no version."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import ray
import torch
from tests.process_tools import stop

from raylane import weights
from raylane.errors import WeightsError
from raylane.testing.leaks import descriptors
from raylane.weights.service.actors import actor_names
from raylane.weights.state.readers import LEASE_S

pytestmark = pytest.mark.faults
COUNT, ROWS = 8, 20_000
WAIT_S = 30.0
"""Seconds within which all readers that live must have a version."""


class Trainer:
    """One rank that publishes again and again, each time when all readers have the version before."""

    def __init__(self) -> None:
        self.tensors = {f"w{i}": torch.zeros(ROWS) for i in range(COUNT)}
        self.publisher = weights.Publisher("policy", self.tensors, max_lag=2)
        self.ended = threading.Event()

    def run(self) -> tuple[int, float]:
        """Publish until `end`. Return the number of versions, and the longest wait for readers in seconds."""
        number, longest_s = 0, 0.0
        while not self.ended.is_set():
            number = self.publish(number + 1)
            began_s = time.monotonic()
            self.publisher.wait(number, readers="all", timeout=WAIT_S)
            longest_s = max(longest_s, time.monotonic() - began_s)
        return number, longest_s

    def publish(self, step: int) -> int:
        for tensor in self.tensors.values():
            tensor.fill_(step)
        return self.publisher.publish(step, timeout=WAIT_S)

    def wait(self, number: int, timeout: float) -> None:
        self.publisher.wait(number, timeout=timeout)

    def end(self) -> None:
        self.ended.set()


class Reader:
    """Reader that takes one version after the other."""

    def __init__(self, apply: str = "copy") -> None:
        self.apply = apply
        self.join()

    def join(self) -> None:
        self.tensors = {f"w{i}": torch.zeros(ROWS) for i in range(COUNT)}
        self.subscriber = weights.Subscriber("policy", self.tensors, apply=self.apply)
        self.ended = threading.Event()

    def run(self) -> list[int]:
        """Take versions until `end` or a timeout; return their numbers."""
        numbers: list[int] = []
        while not self.ended.is_set():
            with contextlib.suppress(WeightsError):  # of the last wait, which no version ends
                numbers.append(self.update(self.subscriber.version + 1, 1.0))
        return numbers

    def update(self, at_least: int = 1, timeout: float = WAIT_S) -> int:
        update = self.subscriber.wait_for(at_least, timeout=timeout)
        values = {float(value) for tensor in self.tensors.values() for value in tensor.unique()}
        assert values == {update.step}, f"a mix of versions: {values}"
        return update.version

    def pid(self) -> int:
        return os.getpid()

    def end(self) -> None:
        """Close the reader when it has taken a version, or drop it."""
        self.ended.set()

    def close(self) -> None:
        self.subscriber.close()

    def drop(self) -> None:
        del self.subscriber


def start(kind: type, *args: Any) -> Any:
    return ray.remote(num_cpus=0, max_concurrency=3)(kind).remote(*args)


def come_and_go(reader: Any, running: Any, how: str, chance: random.Random) -> Any:
    """Let a reader take versions for a moment, and end it. Return a reader that has joined instead."""
    pid = ray.get(reader.pid.remote(), timeout=60)
    time.sleep(chance.random() * 0.1)  # the moment of the end, not a wait
    if how == "kill":
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(running, timeout=60)
        return start(Reader)
    ray.get(reader.end.remote(), timeout=60)
    ray.get(running, timeout=60)
    ray.get(getattr(reader, how).remote(), timeout=60)
    ray.get(reader.join.remote(), timeout=60)
    return reader


def labels() -> set[str]:
    return {info.label for info in weights.readers("policy")}


def churn(joins: int, side_by_side: int, eventually: Callable[..., None]) -> None:
    """Let so many readers end, and others join, beside two that stay; they are killed, closed or dropped by chance."""
    before = set(descriptors())  # of graphs of earlier tests
    chance, ends = random.Random(0), ("kill", "close", "drop")
    trainer, steady = start(Trainer), [start(Reader, apply) for apply in ("copy", "swap")]
    ray.get([reader.pid.remote() for reader in steady], timeout=60)
    publishing, taking = trainer.run.remote(), [reader.run.remote() for reader in steady]
    stay = labels()
    assert len(stay) == 2
    began_s, readers = time.monotonic(), [start(Reader) for _ in range(side_by_side)]
    calls = [reader.run.remote() for reader in readers]
    for number in range(joins):
        place = number % side_by_side
        readers[place] = come_and_go(readers[place], calls[place], chance.choice(ends), chance)
        calls[place] = readers[place].run.remote()
    seconds = time.monotonic() - began_s
    for reader in readers:
        ray.kill(reader)
    eventually(lambda: labels() == stay)
    ray.get(trainer.end.remote())
    published, longest_s = ray.get(publishing, timeout=60)
    ray.get([reader.end.remote() for reader in steady])
    for numbers in ray.get(taking, timeout=60):
        assert numbers == list(range(1, published + 1)), "a version was missed"
    assert {(info.version, info.lag, info.lease) for info in weights.readers("policy")} == {(published, 0, "held")}
    print(f"\n{joins} ends and joins in {seconds:.1f} s, {published} versions; longest wait {longest_s:.2f} s")
    for actor in (trainer, *steady):
        ray.kill(actor)
    eventually(lambda: not weights.readers("policy"))
    weights.drop("policy")
    eventually(lambda: not actor_names(""))
    assert not set(descriptors()) - before


@pytest.mark.claim("weights", "readers come and go while updates run, and the others lose no version")
@pytest.mark.slow
@pytest.mark.parametrize(("joins", "side_by_side"), [(12, 4), pytest.param(50, 6, marks=pytest.mark.matrix)])
def test_readers_come_and_go(cluster: None, eventually: Callable[..., None], joins: int, side_by_side: int) -> None:
    churn(joins, side_by_side, eventually)


def kill_actors(kind: str) -> None:
    for name in actor_names(kind):
        ray.kill(ray.get_actor(name, "raylane-weights"))


@pytest.mark.claim("weights", "publishers wait for readers with a live lease only (death of a host: fakes only)")
@pytest.mark.slow
def test_leases_outlast_keeper_and_catalogue(cluster: None, eventually: Callable[..., None]) -> None:
    trainer, readers = start(Trainer), [start(Reader) for _ in range(2)]
    pids = ray.get([reader.pid.remote() for reader in readers], timeout=60)

    def leases() -> dict[int, str]:
        return {int(info.label.split()[-2]): info.lease for info in weights.readers("policy")}

    eventually(lambda: leases() == dict.fromkeys(pids, "held"), 30)
    kill_actors("keeper")
    eventually(lambda: "unseen" in leases().values(), 30)
    eventually(lambda: leases() == dict.fromkeys(pids, "held"), 60)
    kill_actors("catalogue")
    eventually(lambda: len(actor_names("catalogue")) == 0, 30)
    # The new catalogue knows neither rank nor reader before it has asked the keeper.
    eventually(lambda: names_of_readers() == {"policy"}, 30)
    eventually(lambda: leases() == dict.fromkeys(pids, "held"), 30)
    number = ray.get(trainer.publish.remote(1), timeout=60)
    assert [ray.get(reader.update.remote(), timeout=60) for reader in readers] == [number] * 2
    # A reader that is killed is noticed by the keeper that did not see it join.
    os.kill(pids[0], signal.SIGKILL)
    eventually(lambda: leases() == {pids[1]: "held"}, 30)
    number = ray.get(trainer.publish.remote(2), timeout=60)
    with pytest.raises(WeightsError, match=rf"of 1 readers of 'policy', \['\S+ {pids[1]} \w+'\] have not taken"):
        ray.get(trainer.wait.remote(number, 0.2), timeout=60)
    for actor in (trainer, *readers):
        ray.kill(actor)
    weights.drop("policy")


def names_of_readers() -> set[str]:
    return {info.name for info in weights.readers()}


@pytest.mark.claim("weights", "publishers wait for readers with a live lease only (death of a host: fakes only)")
@pytest.mark.slow
def test_reader_of_a_silent_host_is_not_waited_for(cluster: None, eventually: Callable[..., None]) -> None:
    trainer, reader = start(Trainer), start(Reader)
    number = ray.get(trainer.publish.remote(1), timeout=60)
    eventually(lambda: [info.lease for info in weights.readers("policy")] == ["held"], 30)
    (name,) = actor_names("keeper")
    keeper = ray.get_actor(name, "raylane-weights")
    (pid,) = {ray.get(keeper.__ray_call__.remote(lambda _: os.getpid()), timeout=60)}
    stop(pid)
    try:
        ray.get(trainer.wait.remote(number, 3 * LEASE_S), timeout=4 * LEASE_S)
        assert [info.lease for info in weights.readers("policy")] == ["expired"]
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: [info.lease for info in weights.readers("policy")] == ["held"], 30)
    assert ray.get(reader.update.remote(), timeout=60) == number
    ray.get([trainer.publish.remote(step) for step in (2, 3, 4)], timeout=60)
    (info,) = weights.readers("policy")
    assert (info.version, info.lag, info.too_far) == (number, 3, True)
    for actor in (trainer, reader):
        ray.kill(actor)
    weights.drop("policy")

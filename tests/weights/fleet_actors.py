"""Trainers and readers of fleets, which tests of fleets start."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ray
import torch

from raylane import weights
from raylane.errors import WeightsError

WAIT_S = 60
Start = Callable[..., Any]


class Trainer:
    """Publishes tensors that are full of the number of their version, under several names."""

    def __init__(self, *names: str, keep: int = 3) -> None:
        self.tensors = {name: torch.zeros(1000) for name in names}
        self.publishers = {
            name: weights.Publisher(name, {"w": tensor}, keep=keep) for name, tensor in self.tensors.items()
        }

    def publish(self, value: int) -> list[int]:
        for tensor in self.tensors.values():
            tensor.fill_(value)
        return [publisher.publish(value, timeout=20) for publisher in self.publishers.values()]


class Reader:
    """Serves on a thread, a step every few milliseconds, and answers with what a step computes with."""

    def __init__(self, *names: str) -> None:
        self.tensors = {name: torch.zeros(1000) for name in names}
        subscribers = [weights.Subscriber(name, {"w": tensor}, apply="swap") for name, tensor in self.tensors.items()]
        self.reader = weights.FleetReader(subscribers, timeout=20)
        self.stepping = threading.Lock()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        while not self.ended.wait(0.002):
            with self.stepping:
                self.reader.idle(0.02)

    def answer(self) -> tuple[dict[str, int], set[float]]:
        """Return the versions of a step, and what its tensors are full of."""
        with self.stepping:
            versions = self.reader.step()
            return versions, {value for tensor in self.tensors.values() for value in tensor.unique().tolist()}

    def begin_long_step(self) -> None:
        self.stepping.acquire()

    def end_long_step(self) -> None:
        self.stepping.release()

    def fail_to_prepare(self) -> None:
        def fetch(*_: Any, **__: Any) -> int:
            raise WeightsError("no memory for it")

        next(iter(self.reader._subscribers.values())).fetch = fetch  # type: ignore[method-assign]

    def prepare_slowly(self) -> None:
        """Let the next preparation wait until `end_preparation`."""
        self.prepared = threading.Event()
        subscriber = next(iter(self.reader._subscribers.values()))
        fetch = subscriber.fetch

        def fetch_slowly(*args: Any, **options: Any) -> Any:
            assert self.prepared.wait(WAIT_S)
            return fetch(*args, **options)

        subscriber.fetch = fetch_slowly  # type: ignore[method-assign]

    def end_preparation(self) -> None:
        self.prepared.set()

    def answered_s(self) -> float:
        """Return when the report was sent that was answered last."""
        return self.reader._answered_s

    def pid(self) -> int:
        return os.getpid()

    def label(self) -> str:
        return self.reader._key.label

    def close(self) -> None:
        self.ended.set()
        self.thread.join()
        self.reader.close()


@contextlib.contextmanager
def started() -> Iterator[Start]:
    """Give a function that starts an actor. Afterwards all actors end, and the names are dropped."""
    actors, names = [], set()

    def start_actor(kind: type, *args: Any) -> Any:
        names.update(args)
        actors.append(ray.remote(num_cpus=0, max_concurrency=4)(kind).remote(*args))
        return actors[-1]

    try:
        yield start_actor
    finally:
        for actor in actors:
            ray.kill(actor)
        for name in names:
            weights.drop(name)


def answers(readers: list[Any]) -> list[tuple[dict[str, int], set[float]]]:
    found: list[Any] = ray.get([reader.answer.remote() for reader in readers], timeout=WAIT_S)
    return found


def serving_version_1(start: Start, count: int) -> tuple[Any, list[Any], weights.Fleet]:
    """Return a trainer and so many readers of "policy" that serve its version 1, and their fleet."""
    trainer, readers = start(Trainer, "policy"), [start(Reader, "policy") for _ in range(count)]
    fleet = weights.Fleet("policy")
    ray.get(trainer.publish.remote(1))
    fleet.switch(1, readers=count)
    return trainer, readers, fleet

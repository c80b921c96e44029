"""Trainers and readers of weights, which tests start in actors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import ray
import torch
from torch.nn import Linear, Sequential

from raylane import weights


def model(dtype: torch.dtype = torch.float32) -> Sequential:
    torch.manual_seed(0)
    made = Sequential(Linear(24, 36), Linear(36, 24))
    made.register_buffer("scale", torch.arange(4))
    return made.to(dtype)


class Trainer:
    """One rank, which holds an equal part of the rows of every matrix, and everything else whole."""

    def __init__(self, rank: int, world: int, name: str = "policy", keep: int = 2, delta: str = "auto") -> None:
        whole = model().state_dict()
        self.tensors = {key: t.chunk(world)[rank].clone() if t.dim() == 2 else t.clone() for key, t in whole.items()}

        def place(_: str, tensor: torch.Tensor) -> weights.Part | None:
            return weights.Part.even(tensor, 0, rank, world) if tensor.dim() == 2 else None

        options = {"rank": rank, "world": world, "keep": keep, "delta": delta}
        self.publisher = weights.Publisher(name, self.tensors, places=place, **options)

    def publish(self, step: int, timeout: float = 20) -> int:
        for tensor in self.tensors.values():
            tensor.fill_(step)
        return self.publisher.publish(step, timeout=timeout)

    def publish_beside(self, step: int) -> int:
        for tensor in self.tensors.values():
            tensor.fill_(step)
        return self.publisher.publish_async(step).result(20)

    def wait(self, version: int, timeout: float) -> None:
        self.publisher.wait(version, timeout=timeout)

    def pid(self) -> int:
        return os.getpid()


class Reader:
    def __init__(self, apply: str = "copy", dtype: str = "float32", name: str = "policy") -> None:
        self.model = model(getattr(torch, dtype))
        self.subscriber = weights.Subscriber(name, self.model, apply=apply)

    def update(self, at_least: int = 1, timeout: float = 20) -> tuple[int, set[float]]:
        update = self.subscriber.wait_for(at_least, timeout=timeout)
        self.subscriber.check()
        return update.version, self.values()

    async def update_async(self) -> tuple[int, set[float]]:
        update = await self.subscriber.update_async(timeout=20)
        return update.version, self.values()

    def values(self) -> set[float]:
        return {float(value) for tensor in self.model.state_dict().values() for value in tensor.unique()}

    def close(self) -> None:
        self.subscriber.close()

    def pid(self) -> int:
        return os.getpid()


Start = Callable[..., Any]


@contextlib.contextmanager
def started() -> Iterator[Start]:
    """Give a function that starts an actor. Afterwards all actors end, and the name is dropped."""
    actors = []

    def start_actor(kind: type, *args: Any, **options: Any) -> Any:
        actors.append(ray.remote(num_cpus=0, **options)(kind).remote(*args))
        return actors[-1]

    try:
        yield start_actor
    finally:
        for actor in actors:
            ray.kill(actor)
        weights.drop("policy")


def publish(trainers: list[Any], step: int) -> int:
    (number,) = set(ray.get([trainer.publish.remote(step) for trainer in trainers]))
    return number

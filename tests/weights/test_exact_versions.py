"""Exactly this version, and versions that are held beyond `keep`: publishers and readers in actors of a real Ray."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch
from torch.nn import Linear

from raylane import weights
from raylane.errors import WeightsTimeoutError, WeightsVersionError
from raylane.weights.service.client import all_memory

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("weights_service")]
Start = Callable[..., Any]
NUMBERS = 1 << 20
"""Numbers of a tensor: of 4 MiB, so that memory that is given back can be seen."""


class Trainer:
    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.tensors = {"w": torch.zeros(NUMBERS // world)}
        options: Any = {
            "rank": rank,
            "keep": 3,
            "world": world,
            "places": {"w": weights.Part((NUMBERS,), (rank * NUMBERS // world,))},
        }
        self.publisher = weights.Publisher("policy", self.tensors, **options)

    def publish(self, step: int) -> int:
        self.tensors["w"].fill_(step)
        return self.publisher.publish(step, timeout=20)

    def hold(self, version: int) -> None:
        self.publisher.hold(version)

    def release(self, version: int) -> None:
        self.publisher.release(version)


class Reader:
    def __init__(self, apply: str) -> None:
        self.tensors = {"w": torch.zeros(NUMBERS)}
        self.subscriber = weights.Subscriber("policy", self.tensors, apply=apply)

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Return the version that a method returned, and the values of the tensors."""
        done = getattr(self.subscriber, method)(*args, timeout=options.pop("timeout", 20), **options)
        return getattr(done, "version", done), sorted(set(self.tensors["w"].tolist()))


@pytest.fixture
def start(cluster: None) -> Iterator[Start]:
    """Return a function that starts an actor. Afterwards all actors end, and the names are dropped."""
    actors = []

    def start_actor(kind: type, *args: Any) -> Any:
        actors.append(ray.remote(num_cpus=0)(kind).remote(*args))
        return actors[-1]

    yield start_actor
    for actor in actors:
        ray.kill(actor)
    weights.drop("policy")


@pytest.mark.claim("weights", "a reader takes exactly the version that it asks for, or learns which are there")
@pytest.mark.parametrize("apply", ["copy", "swap", "map"])
def test_reader_takes_exactly_this_version_while_it_is_held(start: Start, apply: str) -> None:
    trainers = [start(Trainer, rank, 2) for rank in range(2)]
    reader = start(Reader, apply)

    def publish(step: int) -> None:
        assert set(ray.get([trainer.publish.remote(step) for trainer in trainers])) == {step}

    def call(method: str, *args: Any, **options: Any) -> Any:
        return ray.get(reader.call.remote(method, *args, **options), timeout=60)

    publish(1)
    ray.get(trainers[0].hold.remote(1))
    for step in range(2, 6):
        publish(step)
    assert [(info.number, info.held) for info in weights.versions("policy")] == [
        (1, True),
        (3, False),
        (4, False),
        (5, False),
    ]
    assert call("update", version=1) == (1, [1.0])
    assert call("update") == (5, [5.0])
    # Prefetched is another one than the update asks for, and the other way round.
    assert call("prefetch", 1, exact=True)[0] == 1
    assert call("update", version=5) == (5, [5.0])
    assert call("prefetch", 1, exact=True)[0] == 1
    assert call("update", version=1) == (1, [1.0])
    with pytest.raises(
        WeightsVersionError, match=r"version 2 of 'policy' cannot be taken: there are 1, 3, 4, 5\. Take one"
    ):
        call("update", version=2)
    with pytest.raises(WeightsTimeoutError, match="version 6 of 'policy' is not there: no rank has begun it"):
        call("wait_for", 6, exact=True, timeout=0.2)
    coming = reader.call.remote("wait_for", 6, exact=True)
    publish(6)
    assert ray.get(coming, timeout=60) == (6, [6.0])
    assert call("update", version=1) == (1, [1.0])
    ray.get(trainers[1].release.remote(1))
    assert call("update") == (6, [6.0]), "a mapped version is in use until then"
    for step in (7, 8):
        publish(step)
    with pytest.raises(WeightsVersionError, match="there are 6, 7, 8"):
        call("update", version=1)
    with pytest.raises(WeightsVersionError, match="version 1 of 'policy' cannot be held: there are 6, 7, 8"):
        ray.get(trainers[0].hold.remote(1))
    assert call("update") == (8, [8.0])


@pytest.mark.parametrize("options", [{"version": 0}, {"version": 1.5}, {"version": True}])
def test_numbers_of_versions_are_checked(start: Start, options: dict[str, Any]) -> None:
    reader = weights.Subscriber("policy", {"w": torch.zeros(2)})
    with pytest.raises(ValueError, match="version must be"):
        reader.update(**options, timeout=1)
    reader.close()


def test_memory_of_released_versions_is_given_back(start: Start, eventually: Callable[..., None]) -> None:
    trainer = start(Trainer)
    nbytes = NUMBERS * 4

    def taken() -> int:
        return sum(taken for _, name, taken in all_memory(10) if name == "policy")

    for step in range(1, 6):
        ray.get(trainer.publish.remote(step))
        if step < 4:
            ray.get(trainer.hold.remote(step))
    assert 5 * nbytes <= taken() < 6 * nbytes, "keep, and three that are held"
    for step in range(1, 4):
        ray.get(trainer.release.remote(step))
    for step in range(6, 9):
        ray.get(trainer.publish.remote(step))
    eventually(lambda: taken() < 4 * nbytes)
    reader = weights.Subscriber("policy", {"w": torch.zeros(NUMBERS)})
    assert reader.update(timeout=20).version == 8
    reader.close()


def test_engine_takes_exactly_this_version(start: Start) -> None:
    trainer, model = start(Trainer), Linear(1, NUMBERS, bias=False)
    mapping = weights.Mapping.record(lambda tensors: [model.weight.data.view(-1).copy_(each) for _, each in tensors])
    attachment = weights.attach(model, "policy", mapping=mapping)
    ray.get(trainer.publish.remote(1))
    ray.get(trainer.hold.remote(1))
    for step in range(2, 6):
        ray.get(trainer.publish.remote(step))
    assert attachment.update().version == 5
    assert attachment.update(version=1).version == 1
    assert set(model.weight.flatten().tolist()) == {1.0}
    with pytest.raises(ValueError, match=re.escape("at_least=2 says nothing beside version=1")):
        attachment.update(at_least=2, version=1)
    with pytest.raises(WeightsVersionError, match="there are 1, 3, 4, 5"):
        attachment.update(version=2)
    attachment.close()

"""The driver of `test_verify_networks`, run inside the head's namespace: a trainer on one host, readers on the head's.

It prints `said: ...` for the test to check.
"""

from __future__ import annotations

import sys
from typing import Any

import ray
import torch
from tests.network_drivers import connect, say
from tests.weights.spread_network_driver import leave_nothing

from raylane import weights
from raylane.errors import WeightsInvalidError, WeightsMismatchError
from raylane.testing.leaks import snapshot

SHAPE = (6000, 1000)
"""Shape of a tensor of float32 in six chunks, of which a reader of a third of the rows needs two or three."""


class Trainer:
    def __init__(self) -> None:
        self.tensors = {"w": torch.randn(SHAPE), "b": torch.randn(1000)}
        self.publisher = weights.Publisher("policy", self.tensors, keep=3, digests=True)

    def publish(self, step: int) -> int:
        self.tensors["w"].add_(1)
        return self.publisher.publish(step, timeout=30)


class Reader:
    """Reader of the whole tensors, or of a part of `w` in another dtype."""

    def __init__(self, part: int | None, verify: str | None) -> None:
        rows = slice(None) if part is None else slice(part * 2000, part * 2000 + 2000)
        dtype = torch.float32 if part is None else torch.bfloat16
        self.tensors = {"w": torch.zeros(SHAPE, dtype=dtype)[rows].clone(), "b": torch.zeros(1000)}
        places = None if part is None else {"w": weights.Part(SHAPE, (part * 2000, 0))}
        self.subscriber = weights.Subscriber("policy", self.tensors, places=places, verify=verify)

    def update(self, at_least: int) -> int:
        return self.subscriber.wait_for(at_least, timeout=40).version

    def verify(self) -> int:
        return self.subscriber.verify(timeout=40)

    def take_changed(self, at_least: int) -> Any:
        """Take a version of which a bit has changed on its way here; return what a verification finds."""
        assert self.subscriber.prefetch(at_least, timeout=40) == at_least
        assert self.subscriber._prefetched is not None
        (slot,) = self.subscriber._prefetched.slots
        slot.memory()[100] ^= 4  # in the copy of this host, which the trainer's host does not see
        assert self.subscriber.update(timeout=40).version == at_least
        try:
            return self.verify()
        except WeightsMismatchError as error:
            try:
                self.subscriber.check()
            except WeightsInvalidError:
                return error.fields


class Scene:
    KINDS = ((None, "each"), (0, "each"), (2, "each"), (1, None), (None, None))

    def __init__(self) -> None:
        self.trainer = ray.remote(num_cpus=0)(Trainer).options(resources={"one": 0.1}).remote()
        make = ray.remote(num_cpus=0)(Reader).options(resources={"head": 0.1})
        self.readers = [make.remote(*kind) for kind in self.KINDS]


def verified(scene: Scene) -> None:
    for step in (1, 2):
        number = ray.get(scene.trainer.publish.remote(step))
        assert ray.get([reader.update.remote(number) for reader in scene.readers]) == [number] * len(scene.readers)
    # The readers without `verify` have brought the chunks of their own parts only.
    assert ray.get([reader.verify.remote() for reader in scene.readers]) == [number] * len(scene.readers)
    say("verified on another host")


def changed_in_transit(scene: Scene) -> None:
    number = ray.get(scene.trainer.publish.remote(3))
    found = ray.get(scene.readers[-1].take_changed.remote(number))
    assert found == {"version": number, "loaded": [], "slots": ["w"]}, found
    say("change in transit found")


def main(address: str) -> None:
    connect(address)
    before = snapshot()
    scene = Scene()
    verified(scene)
    changed_in_transit(scene)
    leave_nothing(scene, before)


if __name__ == "__main__":
    main(sys.argv[1])

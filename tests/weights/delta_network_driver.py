"""The driver of `test_weights_delta`, run inside the head's namespace: a trainer on one host, a reader on the head's.

It prints `said: ...` for the test to check, and `ask: ...` for changes of the cable of the trainer's host.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import ray
import torch
from tests.network_drivers import ask, cable_bytes, connect, say, until
from tests.weights.spread_network_driver import kill_keeper, leave_nothing

from raylane import weights
from raylane.errors import WeightsError
from raylane.testing.leaks import snapshot

COUNT = 5
SIZE = 4_000_000
NBYTES = COUNT * SIZE * 2
MOST_SHARE = 0.035
"""Largest share of the bytes of a version that may leave the trainer's host where 1% of its elements have changed."""
ANCHOR_EVERY = 7


def empty() -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.zeros(SIZE, dtype=torch.bfloat16) for i in range(COUNT)} | {"steps": torch.zeros(3)}


class Trainer:
    def __init__(self) -> None:
        self.chance = np.random.default_rng(0)
        self.tensors = empty()
        self.publisher = weights.Publisher("policy", self.tensors, delta="always", anchor_every=ANCHOR_EVERY)

    def publish(self, step: int) -> int:
        """Change the bits of 1% of all elements, NaNs among the results, and publish."""
        self.tensors["steps"].fill_(step)
        for i in range(COUNT):
            bits = self.tensors[f"w{i}"].view(torch.int16).numpy()
            places = self.chance.choice(SIZE, SIZE // 100, replace=False)
            bits[places] ^= self.chance.integers(1, 1 << 15, len(places), dtype=np.int16)
        return self.publisher.publish(step, timeout=30)

    def bits(self) -> list[np.ndarray]:
        return [tensor.view(torch.uint8).numpy() for tensor in self.tensors.values()]

    def sent(self) -> int:
        """Return the bytes that have left this host by its cable."""
        return cable_bytes()[1]


class Reader:
    def __init__(self) -> None:
        self.tensors = empty()
        self.subscriber = weights.Subscriber("policy", self.tensors)

    def update(self, at_least: int, timeout: float = 40) -> Any:
        """Return the version, or the name of the error."""
        try:
            return self.subscriber.wait_for(at_least, timeout=timeout).version
        except WeightsError as error:
            return type(error).__name__

    def bits(self) -> list[np.ndarray]:
        return [tensor.view(torch.uint8).numpy() for tensor in self.tensors.values()]


class Scene:
    def __init__(self) -> None:
        self.trainer = ray.remote(num_cpus=0)(Trainer).options(resources={"one": 0.1}).remote()
        self.reader = ray.remote(num_cpus=0)(Reader).options(resources={"head": 0.1}).remote()
        self.step = 0

    def publish(self) -> int:
        self.step += 1
        number: int = ray.get(self.trainer.publish.remote(self.step))
        return number

    def sent(self) -> int:
        return int(ray.get(self.trainer.sent.remote()))

    def is_equal(self) -> bool:
        both = ray.get([self.trainer.bits.remote(), self.reader.bits.remote()])
        return all(np.array_equal(a, b) for a, b in zip(*both, strict=True))

    def update(self) -> tuple[float, dict[str, int]]:
        """Publish and update; return the share of the version that left the trainer's host, and the copied bytes.

        These are empty if the reader got an error.
        """
        before = self.sent()
        number = self.publish()
        found = ray.get(self.reader.update.remote(number))
        share = (self.sent() - before) / NBYTES
        if isinstance(found, str):
            say(f"no update: {found}")
            return share, {}
        info = weights.versions("policy")[-1]
        assert found == info.number == number
        assert not info.mismatches
        assert self.is_equal(), "other bits than the trainer's"
        return share, info.copied_bytes


def small_share(scene: Scene) -> None:
    """The first version comes whole, later ones as changed elements, every seventh whole again."""
    shares = []
    for _ in range(ANCHOR_EVERY + 2):
        share, copied = scene.update()
        shares.append(f"{share:.4f}")
        if scene.step in (1, ANCHOR_EVERY):
            assert copied.keys() == {"dense"}
        else:
            assert copied.keys() == {"delta"}
            assert share < MOST_SHARE
    say(f"shares of the version: {shares}")
    say("small share")


def missed_version(scene: Scene) -> None:
    scene.publish()
    share, copied = scene.update()
    assert copied.keys() == {"dense"}, copied
    share, copied = scene.update()
    assert copied.keys() == {"delta"}, copied
    assert share < MOST_SHARE
    say("missed version")


def keeper_dies(scene: Scene, host: str) -> None:
    """In the middle of an update. The reader has a whole version or the one before, and goes on."""
    before, number = scene.sent(), scene.publish()
    call = scene.reader.update.remote(number, 20)
    until(lambda: scene.sent() > before + NBYTES // 1000, "the patches come")
    kill_keeper(host)
    found = ray.get(call)
    say(f"keeper of {host} killed: {found}")
    if found == number:
        assert scene.is_equal()
    else:
        assert found in ("WeightsLostError", "WeightsTimeoutError")
    recovers(scene)
    say(f"keeper of {host} killed")


def recovers(scene: Scene) -> None:
    """Publish and update until an update is a delta again."""
    deadline = time.monotonic() + 60
    while True:
        try:
            if "delta" in scene.update()[1]:
                return
        except WeightsError as error:
            say(f"not yet: {error}")
        assert time.monotonic() < deadline, "no delta comes any more"


def main(address: str) -> None:
    connect(address)
    before = snapshot()
    ask("gigabit")
    scene = Scene()
    small_share(scene)
    missed_version(scene)
    ask("slow")  # so that a death finds patches on their way
    recovers(scene)
    keeper_dies(scene, "head")
    keeper_dies(scene, "one")
    ask("calm")
    leave_nothing(scene, before)


if __name__ == "__main__":
    main(sys.argv[1])

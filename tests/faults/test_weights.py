"""Kills of ranks, readers, keeper and catalogue at random moments of publications and updates."""

from __future__ import annotations

import contextlib
import os
import random
import time
from typing import Any

import pytest
import ray
import torch

from raylane import weights
from raylane.errors import WeightsError

KILLS = int(os.environ.get("RAYLANE_KILLS", "4"))
"""Number of kills: an hour of them is for `make faults`, not for continuous integration."""
COUNT, ROWS = 10, 40_000


class Rank:
    def __init__(self, rank: int) -> None:
        self.tensors = {f"w{i}": torch.zeros(ROWS) for i in range(COUNT)}
        self.publisher = weights.Publisher(
            "policy", self.tensors, rank=rank, world=2, places=lambda _, tensor: weights.Part.even(tensor, 0, rank, 2)
        )

    def run(self, step: int) -> int:
        for tensor in self.tensors.values():
            tensor.fill_(step)
        return self.publisher.publish(step, timeout=5)


class Reader:
    def __init__(self) -> None:
        self.tensors = {f"w{i}": torch.zeros(2 * ROWS) for i in range(COUNT)}
        self.subscriber = weights.Subscriber("policy", self.tensors)

    def run(self, _: int) -> int:
        update = self.subscriber.update(timeout=5)
        values = {float(value) for tensor in self.tensors.values() for value in tensor.unique()}
        assert values == {update.step}, f"a mix of versions: {values}"
        return update.version


@pytest.mark.slow
@pytest.mark.faults
def test_kills_mix_no_versions_and_keep_nobody_waiting(cluster: None) -> None:
    chance, step = random.Random(0), 0
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1}
    ranks = [ray.remote(**options)(Rank).remote(rank) for rank in range(2)]
    readers = [ray.remote(**options)(Reader).remote() for _ in range(2)]
    failures = (ray.exceptions.RayActorError, WeightsError)
    for kind in [("rank", "reader", "keeper", "catalogue")[i % 4] for i in range(KILLS)]:
        step += 1
        calls = [actor.run.remote(step) for actor in (*ranks, *readers)]
        time.sleep(chance.random() * 0.02)  # the moment of the kill, not a wait
        if kind in ("rank", "reader"):
            ray.kill(chance.choice(ranks if kind == "rank" else readers), no_restart=False)
        else:
            for actor in ray.util.list_named_actors(all_namespaces=True):
                if actor["name"].startswith(kind):
                    ray.kill(ray.get_actor(actor["name"], actor["namespace"]))
        for call in calls:
            with contextlib.suppress(*failures):
                ray.get(call, timeout=60)
        deadline = time.monotonic() + 60
        while True:
            step += 1
            try:
                numbers = set(ray.get([rank.run.remote(step) for rank in ranks], timeout=30))
                assert set(ray.get([reader.run.remote(step) for reader in readers], timeout=30)) == numbers
                break
            except failures as error:
                if time.monotonic() > deadline:
                    pytest.fail(f"after the kill of a {kind}: {error}")
    for actor in (*ranks, *readers):
        ray.kill(actor)
    weights.drop("policy")

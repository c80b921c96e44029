"""Kills of ranks, readers, keepers, catalogue and driver at random moments of publications and updates."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import ray
import torch

from raylane import weights
from raylane.errors import WeightsError
from raylane.weights.service.actors import actor_names

KILLS = int(os.environ.get("RAYLANE_KILLS", "5"))
"""Number of kills: hundreds of them are for `make faults`, not for continuous integration."""
KINDS = ("rank", "reader", "keeper", "catalogue")
DRIVER_EVERY = 20
"""One of so many kills is that of a driver, which takes seconds: its job ends."""
COUNT, ROWS = 10, 40_000
FAILURES = (ray.exceptions.RayActorError, WeightsError)


class Rank:
    """One of two ranks; each has half of every tensor."""

    def __init__(self, rank: int) -> None:
        self.tensors = {f"w{i}": torch.zeros(ROWS) for i in range(COUNT)}
        self.publisher = weights.Publisher(
            "policy", self.tensors, rank=rank, world=2, places=lambda _, tensor: weights.Part.even(tensor, 0, rank, 2)
        )

    def run(self, step: int) -> int:
        for tensor in self.tensors.values():
            tensor.fill_(step)
        return self.publisher.publish(step, timeout=5)

    def pid(self) -> int:
        return os.getpid()


class Reader:
    def __init__(self, apply: str) -> None:
        self.tensors = {f"w{i}": torch.zeros(2 * ROWS) for i in range(COUNT)}
        self.subscriber = weights.Subscriber("policy", self.tensors, apply=apply)

    def run(self, _: int) -> int:
        """Update, and return the version; also after an error, the tensors hold one version."""
        try:
            update = self.subscriber.update(timeout=5)
        except WeightsError:
            self.values()
            raise
        assert self.values() == {update.step}
        return update.version

    def values(self) -> set[float]:
        self.subscriber.check()
        values = {float(value) for tensor in self.tensors.values() for value in tensor.unique()}
        assert len(values) == 1, f"a mix of versions: {values}"
        return values

    def pid(self) -> int:
        return os.getpid()


class Trial:
    """Two ranks and two readers of one job, which come back when they are killed."""

    def __init__(self) -> None:
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1}
        self.ranks = [ray.remote(**options)(Rank).remote(rank) for rank in range(2)]
        self.readers = [ray.remote(**options)(Reader).remote(apply) for apply in ("copy", "swap")]
        self.step = 0

    def begin(self) -> list[Any]:
        """Let all ranks publish and all readers update at the same time."""
        self.step += 1
        return [actor.run.remote(self.step) for actor in (*self.ranks, *self.readers)]

    def recover(self) -> None:
        """Publish and update until all readers have the version that was published last."""
        deadline = time.monotonic() + 60
        while True:
            self.step += 1
            try:
                numbers = set(ray.get([rank.run.remote(self.step) for rank in self.ranks], timeout=30))
                if set(ray.get([reader.run.remote(self.step) for reader in self.readers], timeout=30)) == numbers:
                    return
            except FAILURES as error:
                if time.monotonic() > deadline:
                    pytest.fail(f"no update works any more: {error}")


def kill(kind: str, trial: Trial, chance: random.Random) -> None:
    if kind in ("rank", "reader"):
        victim = chance.choice(trial.ranks if kind == "rank" else trial.readers)
        with contextlib.suppress(ray.exceptions.RayActorError, ProcessLookupError):
            os.kill(PIDS[victim], signal.SIGKILL)
        return
    for actor in actor_names(kind):
        with contextlib.suppress(ValueError):  # it has ended meanwhile
            ray.kill(ray.get_actor(actor, "raylane-weights"))


PIDS: dict[Any, int] = {}
"""Process of each actor, looked up before the trial: a call of a busy actor would wait."""


def kill_driver(chance: random.Random, eventually: Callable[..., None]) -> None:
    """Kill a driver with ranks and readers of its own, at times its catalogue too; nothing of its job is left."""
    before = {*actor_names("catalogue"), *actor_names("keeper")}
    address = ray.get_runtime_context().gcs_address
    words = [sys.executable, "-m", "tests.weights.test_kills", address]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as driver:
        assert driver.stdout is not None
        said = [next(driver.stdout, "")]
        while said[-1] and "running" not in said[-1]:
            said.append(next(driver.stdout, ""))
        assert said[-1], "".join(said)
        time.sleep(chance.random() * 0.1)  # the moment of the kill, not a wait
        driver.kill()
        if chance.random() < 0.5:
            for name in {*actor_names("catalogue")} - before:
                with contextlib.suppress(ValueError):
                    ray.kill(ray.get_actor(name, "raylane-weights"))
        driver.wait(30)
    eventually(lambda: {*actor_names("catalogue"), *actor_names("keeper")} <= before, within_s=60)


def run_driver(address: str) -> None:
    ray.init(address=address, log_to_driver=False, logging_level="error")
    trial = Trial()
    trial.recover()
    print("running", flush=True)
    while True:
        ray.get(trial.begin())


@pytest.mark.claim("weights", "no death of a rank, reader, keeper or driver mixes versions or makes others wait on")
@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(120 + 10 * KILLS)
def test_kills_mix_no_versions_and_keep_nobody_waiting(cluster: None, eventually: Callable[..., None]) -> None:
    chance, trial, counts = random.Random(0), Trial(), Counter[str]()
    trial.recover()
    for number in range(KILLS):
        kind = "driver" if number % DRIVER_EVERY == len(KINDS) else KINDS[number % len(KINDS)]
        actors = (*trial.ranks, *trial.readers)
        PIDS.update(zip(actors, ray.get([actor.pid.remote() for actor in actors], timeout=60), strict=True))
        calls = trial.begin()
        if kind == "driver":
            kill_driver(chance, eventually)
        else:
            time.sleep(chance.random() * 0.03)  # the moment of the kill, not a wait
            kill(kind, trial, chance)
        for call in calls:
            try:
                ray.get(call, timeout=60)
            except FAILURES as error:
                counts[f"{type(error).__name__.split('(')[0]} after the kill of a {kind}"] += 1
        trial.recover()
        counts[f"kills of a {kind}"] += 1
    for actor in (*trial.ranks, *trial.readers):
        ray.kill(actor)
    weights.drop("policy")
    eventually(lambda: not actor_names(""))
    print(f"\n{KILLS} kills, no mix, no wait without an end, {trial.step} publications:")
    print("\n".join(f"{count:6d} {what}" for what, count in sorted(counts.items())))


if __name__ == "__main__":
    run_driver(sys.argv[1])

"""The driver of `test_weights_networks`, run inside the head's namespace: a trainer on one host, readers on three.

It prints `said: ...` for the test to check, and `ask: ...` for changes of the cable of the trainer's host.
"""

from __future__ import annotations

import gc
import sys
import time
from typing import Any

import ray
import torch
from tests.network_drivers import ask, cable_bytes, connect, node_of, say, until

from raylane import weights
from raylane.errors import WeightsError
from raylane.testing.leaks import Snapshot, leaks, snapshot

ROWS, COUNT = 500_000, 20
NBYTES = ROWS * COUNT * 4
"""Bytes of a version: 1.6 seconds through the slow cable."""
HOSTS = ("head", "two", "three")
"""Resources of the nodes with readers."""


class Rank:
    """One of two ranks, each with half of every tensor."""

    def __init__(self, rank: int, name: str = "policy", copies: int = 1) -> None:
        self.tensors = {f"w{i}": torch.zeros(ROWS // 2) for i in range(COUNT)}
        part = lambda _, tensor: weights.Part.even(tensor, 0, rank, 2)  # noqa: E731
        self.publisher = weights.Publisher(name, self.tensors, rank=rank, world=2, places=part, copies=copies)

    def publish(self, step: int) -> int:
        for tensor in self.tensors.values():
            tensor.fill_(step)
        return self.publisher.publish(step, timeout=30)

    def publish_all(self, steps: list[int]) -> None:
        for step in steps:
            self.publish(step)

    def sent(self) -> int:
        """Return the bytes that have left this host by its cable."""
        return cable_bytes()[1]


class Reader:
    def __init__(self, apply: str, names: int = COUNT, name: str = "policy") -> None:
        self.tensors = {f"w{i}": torch.zeros(ROWS) for i in range(names)}
        self.subscriber = weights.Subscriber(name, self.tensors, apply=apply, subset=names < COUNT)
        self.error = ""

    def update(self, at_least: int, timeout: float) -> Any:
        """Return the version, or the name of the error. Either way the tensors hold one version."""
        try:
            found: Any = self.subscriber.wait_for(at_least, timeout=timeout).step
        except WeightsError as error:
            self.error = str(error)
            found = type(error).__name__
        values = {float(value) for tensor in self.tensors.values() for value in tensor.unique()}
        assert len(values) == 1, f"a mix of versions: {values}"
        assert isinstance(found, str) or values == {found}
        return found

    def last_error(self) -> str:
        return self.error


class Scene:
    def __init__(self) -> None:
        make = ray.remote(num_cpus=0)(Rank).options(resources={"one": 0.1})
        self.ranks = [make.remote(rank) for rank in range(2)]
        self.readers = {(host, apply): self.reader(host, apply) for host in HOSTS for apply in ("copy", "swap")}
        self.step = 0

    @staticmethod
    def reader(host: str, *args: Any) -> Any:
        return ray.remote(num_cpus=0)(Reader).options(resources={host: 0.1}).remote(*args)

    def publish(self) -> int:
        self.step += 1
        ray.get([rank.publish.remote(self.step) for rank in self.ranks], timeout=60)
        return self.step

    def begin(self, timeout: float = 40) -> dict[Any, Any]:
        """Publish, and let all readers begin to update; return their calls when the copies have begun."""
        step = self.publish()
        number = weights.versions("policy")[-1].number
        before = self.sent()
        calls = {key: reader.update.remote(number, timeout) for key, reader in self.readers.items()}
        until(lambda: self.sent() > before + NBYTES // 4, "the copies begin")
        assert step == self.step
        return calls

    def sent(self) -> int:
        return int(ray.get(self.ranks[0].sent.remote()))


def kill_keeper(host: str) -> None:
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["name"].startswith("keeper") and actor["name"].endswith(node_of(host)):
            ray.kill(ray.get_actor(actor["name"], actor["namespace"]))


def results(calls: dict[Any, Any]) -> dict[Any, Any]:
    return dict(zip(calls, ray.get(list(calls.values()), timeout=100), strict=True))


def recovers(scene: Scene) -> None:
    """Publish again: all readers have it soon, whatever happened before."""
    deadline = time.monotonic() + 60
    while True:
        try:
            scene.publish()
            found = set(results({key: one.update.remote(1, 30) for key, one in scene.readers.items()}).values())
            if found == {scene.step}:
                return
            errors = set(ray.get([one.last_error.remote() for one in scene.readers.values()], timeout=30))
            say(f"not yet: {found}, last errors: {errors}")
        except WeightsError as error:
            say(f"not yet: {error}")
        assert time.monotonic() < deadline, "no update works any more"


def one_copy(scene: Scene) -> None:
    """Six readers on three hosts, in the first version, which has the plan to make, and in a later one."""
    for _ in range(2):
        step, before, began = scene.publish(), scene.sent(), time.monotonic()
        found = results({key: reader.update.remote(1, 60) for key, reader in scene.readers.items()})
        assert set(found.values()) == {step}, found
        copies = (scene.sent() - before) / NBYTES
        say(f"{copies:.2f} times the weights left the trainer's host, in {time.monotonic() - began:.2f} s")
        assert copies < 1.3
    assert len(weights.versions("policy")[-1].hosts) == 4
    say("one copy leaves the trainer")


def parts(scene: Scene) -> None:
    """A reader of two of twenty tensors gets the chunks that it needs only."""
    scene.publish()
    before, reader = scene.sent(), scene.reader("two", "copy", 2)
    assert ray.get(reader.update.remote(1, 30)) == scene.step
    copies = (scene.sent() - before) / NBYTES
    say(f"a reader of a tenth of the weights: {copies:.2f}")
    assert copies < 0.6  # with the chunks that it shares with other tensors, of either rank
    ray.kill(reader)
    recovers(scene)
    say("needed chunks only")


def fast_trainer(scene: Scene) -> None:
    """A trainer that publishes again and again waits for the copies; every reader gets a version."""
    steps = list(range(scene.step + 1, scene.step + 9))
    publishing = [rank.publish_all.remote(steps) for rank in scene.ranks]
    found = results({key: reader.update.remote(1, 60) for key, reader in scene.readers.items()})
    ray.get(publishing, timeout=100)
    scene.step = steps[-1]
    say(f"trainer that does not wait: {sorted(found.values())}")
    assert not any(isinstance(step, str) for step in found.values())
    recovers(scene)
    say("fast trainer")


def holder_dies(scene: Scene) -> None:
    calls = scene.begin()
    kill_keeper("two")
    found = results(calls)
    say(f"keeper of a reader's host killed: {found}")
    assert {found[host, apply] for host in ("head", "three") for apply in ("copy", "swap")} == {scene.step}
    assert {found["two", apply] for apply in ("copy", "swap")} <= {scene.step, "WeightsLostError"}
    recovers(scene)
    say("holder killed")


def source_dies(scene: Scene) -> None:
    """In the middle: readers keep what they have. After the copies: the version can be read on."""
    calls = scene.begin()
    kill_keeper("one")
    say(f"keeper of the trainer's host killed: {results(calls)}")
    recovers(scene)
    kill_keeper("one")
    late = scene.reader("two", "copy")
    assert ray.get(late.update.remote(1, 30)) == scene.step
    ray.kill(late)
    recovers(scene)
    say("source killed")


def both_hosts_have_all(scene: Scene) -> None:
    """With `copies=2` a version outlives either host of its ranks, and the next one has two copies again."""
    make = ray.remote(num_cpus=0)(Rank)
    ranks = [make.options(resources={host: 0.1}).remote(i, "kept", 2) for i, host in enumerate(("one", "two"))]
    late = scene.reader("three", "copy", COUNT, "kept")
    for step, host in enumerate(("one", "two"), 1):
        ray.get([rank.publish.remote(step) for rank in ranks], timeout=60)
        until(lambda: weights.versions("kept")[-1].copies == 2, "both hosts have both parts")
        kill_keeper(host)
        until(lambda: weights.versions("kept")[-1].copies == 1, "the death is noted")
        assert ray.get(late.update.remote(step, 30)) == step
    for actor in (late, *ranks):
        ray.kill(actor)
    weights.drop("kept")
    say("both hosts have all")


def cable_is_cut(scene: Scene) -> None:
    calls = scene.begin(timeout=3)
    began = time.monotonic()
    ask("cut")
    found = results(calls)
    say(f"cable cut: {found} after {time.monotonic() - began:.1f} s")
    assert set(found.values()) == {"WeightsTimeoutError"}
    ask("restore")
    ask("slow")
    recovers(scene)
    say("cable cut")


def leave_nothing(scene: object, before: Snapshot) -> None:
    """Forget the scene and the weights, and say that all is done if nothing is left."""
    vars(scene).clear()
    weights.drop("policy")
    gc.collect()
    left = leaks(before, within_s=20)
    assert not left, left
    say("done")


def main(address: str) -> None:
    connect(address)
    before = snapshot()
    scene = Scene()
    ask("slow")
    for act in (one_copy, parts, fast_trainer, holder_dies, source_dies, both_hosts_have_all, cable_is_cut):
        act(scene)
    ask("calm")
    leave_nothing(scene, before)


if __name__ == "__main__":
    main(sys.argv[1])

"""The driver of `test_relay_networks`, run by it inside the head's namespace: one source here, four readers elsewhere.

It prints `said: ...` for the test to check, and `ask: ...` for changes of the cable.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import ray
import torch
from tests.network_drivers import ask, cable_bytes, connect, say, until
from tests.transport.transport_network_driver import expected

import raylane
from raylane.errors import RaylaneError
from raylane.testing.leaks import leaks, snapshot

NBYTES = 20_000_000
"""Bytes that take two seconds through the throttled link."""
SUM = int(expected(NBYTES).sum())
READERS = 4


class Source:
    @raylane.method
    def make(self) -> torch.Tensor:
        self.value = expected(NBYTES)
        return self.value

    def write(self) -> None:
        self.value[0] = 77

    def release(self) -> None:
        self.value.untyped_storage().resize_(0)

    def pid(self) -> int:
        return os.getpid()


class Reader:
    def share_from(self, size: str) -> None:
        os.environ["RAYLANE_SHARE_FROM_BYTES"] = size

    def read(self, refs: list[Any], timeout: float) -> Any:
        """Return the sum of a value and its first byte, or the name of the error; the number of warnings; the time."""
        began = time.monotonic()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                value = raylane.get(refs[0], timeout=timeout)
                found: Any = int(value.sum()), int(value[0])
            except RaylaneError as error:
                found = type(error).__name__
        return found, len(caught), time.monotonic() - began

    def read_into(self, refs: list[Any]) -> bool:
        """Read a value into a tensor that this process has; tell whether the content is right."""
        target = torch.zeros(NBYTES, dtype=torch.uint8)
        raylane.get(refs[0], into=target)
        return int(target.sum()) == SUM

    def counts(self) -> dict[str, Any]:
        return raylane.stats()

    def pid(self) -> int:
        return os.getpid()


class Observer:
    """An actor on the readers' node that sees its network."""

    def received(self) -> int:
        """Return the bytes that have come over the cable."""
        return cable_bytes()[0]

    def meeting(self) -> int:
        """Return the number of sockets of relays: one that listens, and one for each reader that waits."""
        lines = Path("/proc/self/net/unix").read_text().splitlines()
        return sum(" 0005 " in line and "@raylane-" in line for line in lines)

    def signal(self, pid: int, number: int) -> None:
        os.kill(pid, number)


class Scene:
    def __init__(self) -> None:
        self.make = ray.remote(num_cpus=0)(Source).options(resources={"head": 0.1})
        self.reader = ray.remote(num_cpus=0)(Reader).options(resources={"one": 0.1})
        self.source = self.make.remote()
        self.readers = [self.reader.remote() for _ in range(READERS)]
        self.observer: Any = ray.remote(num_cpus=0)(Observer).options(resources={"one": 0.1}).remote()
        self.renew()

    def renew(self) -> None:
        """Wait for all actors, and let each reader connect to the source."""
        ref = self.source.make.remote()
        ray.get([reader.read.remote([ref], 60) for reader in self.readers], timeout=60)

    def received(self) -> int:
        return int(ray.get(self.observer.received.remote()))

    def count(self, name: str) -> int:
        return sum(found.get(name, 0) for found in ray.get([one.counts.remote() for one in self.readers]))

    def begin(self, timeout: float = 60.0) -> tuple[Any, list[Any]]:
        """Let the first reader begin to read a new value, and then the others; return when all others wait for it."""
        for _ in range(10):
            ref = self.source.make.remote()
            ray.wait([ref], timeout=60, fetch_local=False)
            before = self.received()
            calls = [self.readers[0].read.remote([ref], timeout)]
            until(lambda start=before: self.received() > start + 500_000, "the transfer begins")
            calls += [reader.read.remote([ref], timeout) for reader in self.readers[1:]]
            first = calls[:1]
            until(lambda ended=first: self.all_meet() or bool(ray.wait(ended, timeout=0)[0]), "the others wait")
            if self.all_meet():
                return ref, calls
            ray.get(calls, timeout=100)  # on a busy machine the value was there before the others asked: again
        raise AssertionError("no value was on its way when the others asked")

    def all_meet(self) -> bool:
        """Return True if all readers wait for one transfer."""
        return bool(ray.get(self.observer.meeting.remote()) == READERS)

    def begin_and(self, change: str) -> list[Any]:
        """Call a method of the source while a value is on its way to all readers; return their calls."""
        for _ in range(10):
            before = self.received()
            _, calls = self.begin()
            ray.get(getattr(self.source, change).remote())
            if self.received() - before < 0.9 * NBYTES:
                return calls
            ray.get(calls, timeout=100)  # on a busy machine the value was there before the change: again
        raise AssertionError(f"no value was on its way when {change} was called")


def results(calls: list[Any]) -> list[Any]:
    return [found for found, _, _ in ray.get(calls, timeout=100)]


def one_copy(scene: Scene) -> None:
    """Four readers at once, with and without a shared transfer; the bytes that cross are counted."""
    times = {}
    for name, size in (("each for itself", "none"), ("shared", "")):
        ray.get([reader.share_from.remote(size) for reader in scene.readers])
        ref = scene.source.make.remote()
        ray.wait([ref], timeout=60, fetch_local=False)
        before, relayed, relays, began = (
            scene.received(),
            scene.count("relayed"),
            scene.count("relays"),
            time.monotonic(),
        )
        assert results([one.read.remote([ref], 60) for one in scene.readers]) == [(SUM, 0)] * READERS
        times[name] = time.monotonic() - began
        crossed = (scene.received() - before) / NBYTES
        say(f"{name}: {times[name]:.2f} s, {crossed:.2f} times the value crossed")
        copies = (READERS if size else 1) * 1.15
        assert crossed < copies, crossed
        assert scene.count("relayed") - relayed == (0 if size else READERS - 1)
        assert scene.count("relays") - relays == (0 if size else 1)
    say("one copy crosses")


def into_targets(scene: Scene) -> None:
    """Reads into existing tensors share a transfer as soon as the readers know of each other."""
    crossed = []
    for _ in range(3):
        ref = scene.source.make.remote()
        ray.wait([ref], timeout=60, fetch_local=False)
        before = scene.received()
        assert all(ray.get([one.read_into.remote([ref]) for one in scene.readers], timeout=100))
        crossed.append((scene.received() - before) / NBYTES)
    say(f"into targets: {', '.join(f'{one:.2f}' for one in crossed)} times the value crossed")
    assert crossed[-1] < 1.15
    say("targets share")


def relay_dies(scene: Scene) -> None:
    before = scene.received()
    _, calls = scene.begin()
    ray.kill(scene.readers[0])
    assert results(calls[1:]) == [(SUM, 0)] * (READERS - 1)
    assert scene.received() - before < 2.3 * NBYTES
    scene.readers[0] = scene.reader.remote()
    scene.renew()
    say("relay killed")


def relay_stops(scene: Scene) -> None:
    """A relay that is stopped: the others read from the source before their time is over."""
    pid = ray.get(scene.readers[0].pid.remote())
    _, calls = scene.begin(timeout=12.0)
    ray.get(scene.observer.signal.remote(pid, signal.SIGSTOP))
    try:
        assert results(calls[1:]) == [(SUM, 0)] * (READERS - 1)
    finally:
        ray.get(scene.observer.signal.remote(pid, signal.SIGCONT))
    results(calls[:1])
    say("relay stopped")


def source_changes(scene: Scene) -> None:
    """Memory that is written to, or freed, during the transfer."""
    calls = scene.begin_and("write")
    for (_, first), warned, _ in ray.get(calls, timeout=100):
        assert warned == 1
        assert first in (0, 77)
    calls = scene.begin_and("release")
    assert results(calls) == ["TensorFreedError"] * READERS
    say("source changed")


def source_dies(scene: Scene) -> None:
    _, calls = scene.begin()
    began = time.monotonic()
    ray.kill(scene.source)
    assert results(calls) == ["SourceLostError"] * READERS
    assert time.monotonic() - began < 8
    say("source killed")


def main(address: str) -> None:
    connect(address)
    before = snapshot()
    scene = Scene()
    ask("throttle")
    for act in (one_copy, into_targets, relay_dies, relay_stops, source_changes, source_dies):
        act(scene)
    ask("calm")
    until(lambda: ray.get(scene.observer.meeting.remote()) == 0, "no relay is left")
    vars(scene).clear()
    found = leaks(before, within_s=20)
    assert not found, found
    say("done")


if __name__ == "__main__":
    main(sys.argv[1])

"""Mixed traffic between actors that are killed meanwhile, for `test_soak`: every answer is right, or a typed error.

traffic threads   each takes a random action after the other: make, read, pass on, keep, group
killing           SIGKILL to a random actor, which Ray starts again
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import random
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
import ray.exceptions as rex
import torch

import raylane
from raylane.errors import RaylaneError, TransferTimeoutError
from raylane.testing.leaks import descriptors

LIMIT_S = 90.0
"""Deadline of every call. None of them may reach it: an actor is back within seconds."""
SIZES = (1, 1_000, 30_000, 1_000_000, 8_000_000)
TRANSPORTS = (None, "host", "tcp", "object_store", "gloo", *(["nixl"] if importlib.util.find_spec("nixl") else []))
UNTYPED = (rex.RaySystemError, rex.GetTimeoutError, TransferTimeoutError)
"""Errors that say nothing of the cause, or that a deadline was reached."""
MOST_DESCRIPTORS = 400


class Peer:
    """Producer and consumer of values."""

    @raylane.method
    def make(self, count: int, fill: int) -> torch.Tensor:
        return torch.full((count,), fill, dtype=torch.uint8)

    @raylane.method
    def nested(self, count: int, fill: int) -> Any:
        tensor = torch.full((count,), fill, dtype=torch.uint8)
        return {
            "whole": tensor,
            "parts": [tensor[: count // 2], {"array": np.full(count, fill, np.uint8)}],
            "fill": fill,
        }

    @raylane.method
    def total(self, value: Any) -> int:
        return total(value)

    def read(self, refs: list[Any], transport: str | None) -> int:
        return total(raylane.get(refs[0], tensor_transport=transport, timeout=LIMIT_S))

    def pid(self) -> int:
        return os.getpid()

    def report(self) -> dict[str, Any]:
        gc.collect()
        stats = raylane.stats()
        return {
            "entries": stats["entries"],
            "kept_actors": stats["kept_actors"],
            "threads": sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("raylane")),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "memfds": len(descriptors()),
        }


def total(value: Any) -> int:
    """Return the sum of all numbers in a value."""
    if isinstance(value, dict):
        return sum(map(total, value.values()))
    if isinstance(value, list):
        return sum(map(total, value))
    return (
        value if isinstance(value, int) else int(value.sum(dtype=torch.int64 if torch.is_tensor(value) else np.int64))
    )


class Soak:
    """Actors, the threads that use them, and what has happened."""

    def __init__(self, actors: int, seed: int) -> None:
        peer = ray.remote(num_cpus=0.1, max_restarts=-1)(Peer)
        self.actors = [peer.remote() for _ in range(actors)]
        ray.get([actor.__ray_ready__.remote() for actor in self.actors])
        self.done: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.wrong: list[str] = []
        """Failures that must not happen: untyped errors, hangs, wrong values."""
        self._seed = seed
        self._stop = threading.Event()
        self._groups = threading.Lock()

    def run(self, seconds: float, kill_every_s: float, threads: int = 3) -> None:
        """Run traffic; return when all threads have ended, or have failed to."""
        running = [
            threading.Thread(target=self._traffic, args=(random.Random(self._seed + i),), daemon=True, name=f"soak-{i}")
            for i in range(threads)
        ]
        for thread in running:
            thread.start()
        chance, until = random.Random(self._seed - 1), time.monotonic() + seconds
        while not self._stop.wait(max(0.0, min(kill_every_s, until - time.monotonic()))):
            if time.monotonic() >= until:
                break
            self._kill(chance.choice(self.actors))
        self._stop.set()
        for thread in running:
            thread.join(2 * LIMIT_S)
            if thread.is_alive():
                self.wrong.append(f"{thread.name} hangs")

    def close(self) -> list[str]:
        """Drop what is held, ask every actor what it has left, and end all actors; return what was left."""
        gc.collect()
        left = []
        for number, actor in enumerate(self.actors):
            found: dict[str, Any] = {}
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                with contextlib.suppress(rex.RayActorError):  # it may still be starting
                    found = ray.get(actor.report.remote(), timeout=LIMIT_S)
                    if not found["entries"] and not found["kept_actors"]:
                        break
                time.sleep(0.2)
            if found.get("entries", 1) or found["kept_actors"] or found["descriptors"] > MOST_DESCRIPTORS:
                left.append(f"actor {number}: {found}")
            print(f"actor {number}: {found}")
            ray.kill(actor)
        self.actors.clear()
        return left

    def _kill(self, actor: Any) -> None:
        try:
            os.kill(ray.get(actor.pid.remote(), timeout=LIMIT_S), signal.SIGKILL)
            self.done["killed"] += 1
        except (rex.RayActorError, ProcessLookupError):  # not back from the last time
            pass

    def _traffic(self, chance: random.Random) -> None:
        actions: list[Callable[[random.Random], None]] = [
            self._read,
            self._read,
            self._read_into,
            self._pass_on,
            self._put,
            self._keep,
            self._group,
        ]
        while not self._stop.is_set():
            action, began = chance.choice(actions), time.monotonic()
            try:
                action(chance)
                self.done[action.__name__] += 1
            except (RaylaneError, rex.RayError) as error:
                self.errors[f"{action.__name__}: {type(error).__name__}"] += 1
                if isinstance(error, UNTYPED):
                    self._fail(f"after {time.monotonic() - began:.1f} s")
            except BaseException:
                self._fail(action.__name__)
            gc.collect()  # errors hold frames, and these refs

    def _fail(self, what: str) -> None:
        self.wrong.append(f"{what}: {traceback.format_exc()}")
        self._stop.set()

    def _made(self, chance: random.Random) -> tuple[Any, int]:
        """Let an actor make a value; return its ref and sum."""
        actor, count, fill = chance.choice(self.actors), chance.choice(SIZES), chance.randrange(1, 250)
        if chance.random() < 0.3:
            return actor.nested.remote(count, fill), fill * (2 * count + count // 2) + fill
        return actor.make.remote(count, fill), fill * count

    def _read(self, chance: random.Random) -> None:
        ref, wanted = self._made(chance)
        transport = chance.choice(TRANSPORTS)
        assert total(raylane.get(ref, tensor_transport=transport, timeout=LIMIT_S)) == wanted, transport

    def _read_into(self, chance: random.Random) -> None:
        count, fill = chance.choice(SIZES), chance.randrange(1, 250)
        into = torch.zeros(count, dtype=torch.uint8)
        ref = chance.choice(self.actors).make.remote(count, fill)
        raylane.get(ref, into=into, tensor_transport=chance.choice(TRANSPORTS), timeout=LIMIT_S)
        assert total(into) == fill * count

    def _pass_on(self, chance: random.Random) -> None:
        ref, wanted = self._made(chance)
        user = chance.choice(self.actors)
        if chance.random() < 0.5:
            found = ray.get(user.total.remote(ref), timeout=LIMIT_S)
        else:
            found = ray.get(user.read.remote([ref], chance.choice(TRANSPORTS)), timeout=LIMIT_S)
        assert found == wanted

    def _put(self, chance: random.Random) -> None:
        count, fill = chance.choice(SIZES), chance.randrange(1, 250)
        ref = raylane.put(torch.full((count,), fill, dtype=torch.uint8))
        users = [chance.choice(self.actors) for _ in range(3)]
        found = ray.get([user.read.remote([ref], chance.choice(TRANSPORTS)) for user in users], timeout=LIMIT_S)
        assert found == [fill * count] * 3

    def _keep(self, chance: random.Random) -> None:
        """Several values at once, read in another order and more than once."""
        made = [self._made(chance) for _ in range(5)]
        chance.shuffle(made)
        for ref, wanted in (*made, made[0]):
            assert total(raylane.get(ref, timeout=LIMIT_S)) == wanted
        values = raylane.get([ref for ref, _ in made], timeout=LIMIT_S)
        assert [total(value) for value in values] == [wanted for _, wanted in made]

    def _group(self, chance: random.Random) -> None:
        """A group of two actors, for as long as one value takes; an actor is in one group at a time."""
        with self._groups:
            members = chance.sample(self.actors, 2)
            group = raylane.create_collective_group(members, "gloo")
            try:
                count, fill = chance.choice(SIZES), chance.randrange(1, 250)
                ref = members[0].make.options(tensor_transport="gloo").remote(count, fill)
                assert ray.get(members[1].total.remote(ref), timeout=LIMIT_S) == fill * count
            finally:
                raylane.destroy_collective_group(group)

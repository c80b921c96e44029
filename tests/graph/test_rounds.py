"""Many graphs, one after the other: each leaves the driver and the actor as they were."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from tests.graph.graph_actors import Worker

import raylane
from raylane.testing.leaks import descriptors, leaks, snapshot

ROUNDS = 1000


def parent_of(pid: str) -> int:
    """Return the parent of a process; 0 if the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def pid_of(actor: Any) -> int:
    pid: int = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=10)
    return pid


def resources(instance: Any = None) -> dict[str, int]:
    """Count what this process has. Runs in the driver and in an actor."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": len(maps.splitlines()),
        "descriptors and mappings of raylane": len(descriptors()),
        "threads": len(os.listdir("/proc/self/task")),
        "threads of raylane": sum(thread.name.startswith("raylane") for thread in threading.enumerate()),
        "processes": sum(parent_of(name) == os.getpid() for name in os.listdir("/proc") if name.isdigit()),
        "names in /dev/shm": sum("raylane" in name for name in os.listdir("/dev/shm")),
    }


@pytest.mark.slow
@pytest.mark.usefixtures("clean")
def test_a_thousand_compiled_graphs_leave_nothing(workers: list[Any], eventually: Callable[..., None]) -> None:
    worker = workers[0]

    def play(rounds: int) -> None:
        for number in range(rounds):
            with raylane.InputNode() as x:
                node = raylane.bind(worker.add, x, 1)
            with raylane.compile(node) as graph:
                assert graph.execute(number).get() == number + 1

    def counts() -> list[dict[str, int]]:
        return [resources(), ray.get(worker.__ray_call__.remote(resources), timeout=60)]

    play(20)  # threads and modules that later graphs use again
    before = counts()
    play(ROUNDS)

    # Ray has threads, descriptors and mappings of its own that come and go; a graph that left one of any kind would
    # have added a thousand.
    def grown() -> list[str]:
        return [
            f"{kind}: {old[kind]} to {new[kind]}"
            for old, new in zip(before, counts(), strict=True)
            for kind in old
            if new[kind] > old[kind] + (0 if "raylane" in kind else ROUNDS // 20)
        ]

    eventually(lambda: not grown(), within_s=20)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("host", ["", "another"])
def test_compile_after_a_restart_asks_the_actor_again(host: str, eventually: Callable[..., None]) -> None:
    before = snapshot()
    environment = {"env_vars": {"RAYLANE_HOST": host}}
    actor = ray.remote(num_cpus=0, max_restarts=1, runtime_env=environment)(Worker).remote()

    def play() -> None:
        with raylane.InputNode() as x, raylane.compile(raylane.bind(actor.add, x, 1)) as graph:
            assert graph.execute(1).get() == 2

    play()
    old = pid_of(actor)
    ray.kill(actor, no_restart=False)

    def new_process() -> bool:
        try:
            return pid_of(actor) != old
        except ray.exceptions.RayError:
            return False

    eventually(new_process, within_s=60)
    play()  # what the driver knows of the actor is stale
    play()
    ray.kill(actor)
    assert not leaks(before, within_s=20)

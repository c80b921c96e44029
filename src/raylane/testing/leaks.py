"""What a test may have left behind: actors, raylane's threads, its memfds, its names in /dev/shm.

before = snapshot()
...
assert not leaks(before, within_s=10)
"""

from __future__ import annotations

import gc
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from raylane import _ray
from raylane.transport import endpoint


@dataclass(frozen=True)
class Snapshot:
    """What exists now, by kind. `entries` are values that this process still publishes."""

    actors: frozenset[str]
    threads: frozenset[str]
    descriptors: frozenset[str]
    shm: frozenset[str]
    entries: int


def snapshot() -> Snapshot:
    """The present state of this process and of the cluster it is connected to, if any."""
    current = endpoint.existing()
    return Snapshot(
        actors=frozenset(f"{name} {actor}" for actor, name in _ray.living_actors().items())
        if _ray.connected()
        else frozenset(),
        threads=frozenset(f"{t.name} {t.ident}" for t in threading.enumerate() if t.name.startswith("raylane")),
        descriptors=frozenset(descriptors()),
        shm=frozenset(name for name in os.listdir("/dev/shm") if "raylane" in name),
        entries=0 if current is None else len(current.store),
    )


def descriptors(pid: int | str = "self") -> list[str]:
    """The memfds of raylane's that a process has open, as `number target`, or has mapped, as `range target`."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:  # closed meanwhile, such as the one that lists this very folder
            continue
        if "memfd:raylane" in target:
            found.append(f"{link.name} {target}")
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "memfd:raylane" in line:
            found.append(f"{line.split()[0]} {line.split()[-2]}")
    return found


def leaks(before: Snapshot, *, within_s: float = 10.0) -> list[str]:
    """What is there that was not before, after waiting until it is gone; empty when all is well.

    Closes this process's endpoint first, which ends its threads and links and lets go of everything it publishes: what
    is needed is made again on next use, but values published before `snapshot` are gone. Waits at
    most `within_s` seconds: actors take a moment to end after their last handle.
    """
    deadline = time.monotonic() + within_s
    gc.collect()
    left_entries = _wait_entries(before.entries, deadline)
    endpoint.close()
    while True:
        now = snapshot()
        left = [
            *(f"actor {name}" for name in sorted(now.actors - before.actors)),
            *(f"thread {name}" for name in sorted(now.threads - before.threads)),
            *(f"descriptor {name}" for name in sorted(now.descriptors - before.descriptors)),
            *(f"/dev/shm/{name}" for name in sorted(now.shm - before.shm)),
            *left_entries,
        ]
        if not left or time.monotonic() >= deadline:
            return left
        gc.collect()
        time.sleep(0.05)


def _wait_entries(allowed: int, deadline: float) -> list[str]:
    current = endpoint.existing()
    while current is not None and len(current.store) > allowed:
        if time.monotonic() >= deadline:
            return [f"{len(current.store) - allowed} published values"]
        gc.collect()
        time.sleep(0.02)
    return []

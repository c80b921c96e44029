"""Detection of what a test leaves behind: actors, and raylane's threads, memfds, /dev/shm names and values.

Use in a test:

    before = snapshot()
    ...
    assert not leaks(before, within_s=10)
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import ray

from raylane import _ray
from raylane.transport.link import endpoint


@dataclass(frozen=True)
class Snapshot:
    """Existing resources by kind. `entries` is the number of values that this process publishes."""

    actors: frozenset[str]
    threads: frozenset[str]
    descriptors: frozenset[str]
    shm: frozenset[str]
    entries: int


def snapshot() -> Snapshot:
    """Return the present resources of this process, and of the cluster if the process is connected to one."""
    current = endpoint.existing()
    return Snapshot(
        actors=frozenset(f"{name} {actor}" for actor, name in _ray.living_actors().items())
        if ray.is_initialized()
        else frozenset(),
        threads=frozenset(f"{t.name} {t.ident}" for t in threading.enumerate() if t.name.startswith("raylane")),
        descriptors=frozenset(descriptors()),
        shm=frozenset(name for name in os.listdir("/dev/shm") if "raylane" in name),
        entries=0 if current is None else len(current.store),
    )


def descriptors(pid: int | str = "self") -> list[str]:
    """Return raylane's memfds that a process has open, as `number target`, or has mapped, as `range target`."""
    open_descriptors = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:  # closed meanwhile, such as the descriptor with which iterdir lists this folder
            continue
        if "memfd:raylane" in target:
            open_descriptors.append(f"{link.name} {target}")
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "memfd:raylane" in line:
            open_descriptors.append(f"{line.split()[0]} {line.split()[-2]}")
    return open_descriptors


def leaks(before: Snapshot, *, within_s: float = 10.0, spare_actors: Collection[str] = ()) -> list[str]:
    """Return the resources that exist now and did not exist in `before`; an empty list if there are none.

    Only this process and its cluster are looked at, except for names in /dev/shm, which raylane never creates. Actors
    whose ids are in `spare_actors` may be new.

    Closes this process's endpoint first, which ends its threads and links and frees everything it publishes, including
    values published before `snapshot`. The next use creates a new endpoint. Waits at most `within_s` seconds for
    resources to disappear, because actors take a moment to end after their last handle.
    """
    deadline = time.monotonic() + within_s
    # Values first: `endpoint.close` frees them, and would hide those that are still referenced.
    gc.collect()
    remaining_values = []
    current = endpoint.existing()
    while current is not None and len(current.store) > before.entries:
        if time.monotonic() >= deadline:
            remaining_values = [f"{len(current.store) - before.entries} published values"]
            break
        gc.collect()
        time.sleep(0.02)
    del current  # the last reference may keep threads and links that are looked for below
    endpoint.close()
    while True:
        now = snapshot()
        leaked = [
            *(
                f"actor {name}"
                for name in sorted(now.actors - before.actors)
                if name.rpartition(" ")[2] not in spare_actors
            ),
            *(f"thread {name}" for name in sorted(now.threads - before.threads)),
            *(f"descriptor {name}" for name in sorted(now.descriptors - before.descriptors)),
            *(f"/dev/shm/{name}" for name in sorted(now.shm - before.shm)),
            *remaining_values,
        ]
        if not leaked or time.monotonic() >= deadline:
            return leaked
        gc.collect()
        time.sleep(0.05)

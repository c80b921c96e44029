"""Memory of large values: whatever way they took, it is given back while the graph lives and nobody sends."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

import raylane
from raylane.graph.channels.lease import KEPT_BYTES, LeasePool, LeaseReader

pytestmark = pytest.mark.processes

Make = Callable[[int], Any]
COUNT, NBYTES = 30, 50 << 20
MARGIN_BYTES = 60 << 20
"""Allocators of C and of torch keep some memory."""


def _fill(array: Any) -> Any:
    array[:] = 1
    return array


KINDS: dict[str, Make] = {
    "empty array": lambda nbytes: _fill(raylane.empty(nbytes, np.uint8)),
    "empty tensor": lambda nbytes: _fill(raylane.empty(nbytes, torch.uint8)),
    "array": lambda nbytes: np.ones(nbytes, np.uint8),
    "tensor": lambda nbytes: torch.ones(nbytes, dtype=torch.uint8),
}


class Holder:
    """Actor that keeps what it receives, and makes values."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def keep(self, value: Any) -> int:
        self.kept.append(value)
        return len(self.kept)

    def make(self, kind: str) -> Any:
        return KINDS[kind](NBYTES)

    def drop(self) -> None:
        self.kept.clear()
        gc.collect()

    def pid(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def holders(ray_session: None) -> Iterator[dict[str, Any]]:
    """Start an actor on this host, and one on a pretended other host."""
    actors = {
        host: ray.remote(num_cpus=0)(Holder).options(runtime_env={"env_vars": {"RAYLANE_HOST": host}}).remote()
        for host in ("", "b")
    }
    yield actors
    for actor in actors.values():
        ray.kill(actor)


def _private_bytes(pid: int) -> int:
    """Return the resident memory of a process that it shares with no file."""
    (line,) = [line for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if "Anonymous:" in line]
    return int(line.split()[1]) << 10


def _shared_bytes(pids: list[int]) -> int:
    """Return the memory of all memfds that these processes have open or mapped, each counted once."""
    segments: dict[int, int] = {}
    for pid in pids:
        for folder in ("fd", "map_files"):
            for entry in os.scandir(f"/proc/{pid}/{folder}"):
                try:
                    if os.readlink(entry.path).startswith("/memfd:raylane"):
                        found = os.stat(entry.path)
                        segments[found.st_ino] = found.st_blocks * 512
                except FileNotFoundError:  # closed meanwhile
                    continue
    return sum(segments.values())


def _check(pids: list[int], before: list[int], allowed: int, eventually: Callable[..., None]) -> None:
    def excess() -> list[int]:
        gc.collect()
        after = [_shared_bytes(pids), *map(_private_bytes, pids)]
        limits = [allowed, *[MARGIN_BYTES] * len(pids)]
        return [b - a for a, b, limit in zip(before, after, limits, strict=True) if b - a > limit]

    with contextlib.suppress(AssertionError):  # the one below names the excess
        eventually(lambda: not excess(), 20)
    assert not excess()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "host"), [*((kind, "") for kind in KINDS), ("array", "b")])
def test_memory_of_inputs_and_outputs_is_given_back(
    holders: dict[str, Any], kind: str, host: str, eventually: Callable[..., None]
) -> None:
    holder = holders[host]
    pids = [os.getpid(), ray.get(holder.pid.remote())]
    with raylane.InputNode() as x:
        inputs = raylane.bind(holder.keep, x)
    with raylane.InputNode() as x:
        outputs = raylane.bind(holder.make, x)
    with raylane.compile(inputs) as sends, raylane.compile(outputs) as receives:
        sends.execute(0).get()
        ray.get(holder.drop.remote())
        before = [_shared_bytes(pids), *map(_private_bytes, pids)]
        allowed = MARGIN_BYTES if kind.startswith("empty") and not host else KEPT_BYTES + MARGIN_BYTES
        assert [sends.execute(KINDS[kind](NBYTES)).get() for _ in range(COUNT)][-1] == COUNT
        assert _shared_bytes(pids) - before[0] >= COUNT * NBYTES
        ray.get(holder.drop.remote())
        _check(pids, before, allowed, eventually)
        kept = [receives.execute(kind).get() for _ in range(COUNT)]
        assert len(kept[0]) == NBYTES
        del kept
        _check(pids, before, 2 * allowed, eventually)
    _check(pids, before, MARGIN_BYTES, eventually)


def test_lease_pages_are_freed_by_the_last_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylane.graph.channels.lease.KEPT_BYTES", 1 << 20)
    gc.collect()
    before = _shared_bytes([os.getpid()])
    pool, readers = LeasePool(1 << 30), [LeaseReader(), LeaseReader()]
    held = []
    for number in range(20):
        descriptor = pool.lend([bytes([number]) * (1 << 20)], ("a", "b"))
        held.append([reader.borrow(descriptor, at, writable=False) for at, reader in enumerate(readers)])
    assert [bytes(first[:3]) for ((first,), _) in held] == [bytes([number]) * 3 for number in range(20)]
    assert _shared_bytes([os.getpid()]) - before >= 20 << 20
    for pair in held:
        pair[0].clear()
    del pair
    assert _shared_bytes([os.getpid()]) - before >= 20 << 20  # the second reader has it
    assert bytes(held[-1][1][0][:3]) == bytes([19]) * 3
    held.clear()
    # Nobody has looked at the pool since. Those for reuse stay.
    assert _shared_bytes([os.getpid()]) - before <= 6 << 20
    pool.reclaim()
    assert (pool.leased_count, pool.leased_bytes()) == (0, 0)
    assert pool.idle_count <= 4
    (again,) = readers[0].borrow(pool.lend([b"again"], ("a",)), 0, writable=True)
    assert bytes(again) == b"again"
    pool.close()
    for reader in readers:
        reader.close()
    assert bytes(again) == b"again"
    del again
    assert _shared_bytes([os.getpid()]) - before <= 1 << 16

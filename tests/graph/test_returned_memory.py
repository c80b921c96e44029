"""Memory of large values: whatever way they took, it is given back while the graph lives and nobody sends."""

from __future__ import annotations

import gc
import os
import time
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


class Caller:
    """Actor that compiles graphs to a holder. The process of the tests would not do: other tests have memory there."""

    def check(self, holder: Any, kind: str, *, same_host: bool) -> None:
        """Send values and receive some. AssertionError names the process and the bytes that were not given back."""
        self.pids = {"caller": os.getpid(), "holder": ray.get(holder.pid.remote())}
        with raylane.InputNode() as x:
            inputs = raylane.bind(holder.keep, x)
        with raylane.InputNode() as x:
            outputs = raylane.bind(holder.make, x)
        with raylane.compile(inputs) as sends, raylane.compile(outputs) as receives:
            sends.execute(0).get()
            ray.get(holder.drop.remote())
            self.before = self._bytes()
            allowed = MARGIN_BYTES if kind.startswith("empty") and same_host else KEPT_BYTES + MARGIN_BYTES
            assert [sends.execute(KINDS[kind](NBYTES)).get() for _ in range(COUNT)][-1] == COUNT
            assert self._bytes()["shared"] - self.before["shared"] >= COUNT * NBYTES
            ray.get(holder.drop.remote())
            self._wait_until_returned(allowed)
            received = [receives.execute(kind).get() for _ in range(COUNT)]
            assert len(received[0]) == NBYTES
            del received
            self._wait_until_returned(2 * allowed)
        # All of it: what the last value's memory holds now would be missing from the growth that the next test expects.
        self._wait_until_returned(1 << 20)

    def _bytes(self) -> dict[str, int]:
        shared = _shared_bytes(list(self.pids.values()))
        return {"shared": shared, **{name: _private_bytes(pid) for name, pid in self.pids.items()}}

    def _wait_until_returned(self, allowed: int) -> None:
        deadline = time.monotonic() + 20
        while True:
            gc.collect()
            growth = {name: nbytes - self.before[name] for name, nbytes in self._bytes().items()}
            limits = {name: allowed if name == "shared" else MARGIN_BYTES for name in growth}
            excess = {name: nbytes for name, nbytes in growth.items() if nbytes > limits[name]}
            if not excess:
                return
            assert time.monotonic() < deadline, f"not given back: {excess}"
            time.sleep(0.02)


@pytest.fixture(scope="module")
def actors(ray_session: None) -> Iterator[dict[str, Any]]:
    """Start a caller and a holder on this host, and a holder on a pretended other host."""
    started = {
        name: ray.remote(num_cpus=0)(kind)
        .options(runtime_env={"env_vars": {"RAYLANE_HOST": host, "RAYLANE_POOL_IDLE_S": "0.5"}})
        .remote()
        for name, kind, host in (("caller", Caller, ""), ("", Holder, ""), ("b", Holder, "b"))
    }
    yield started
    for actor in started.values():
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


@pytest.mark.claim("graphs", "arrays that arrive without a copy may be kept; the writer waits for their memory")
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "host"), [*((kind, "") for kind in KINDS), ("array", "b")])
def test_memory_of_inputs_and_outputs_is_given_back(actors: dict[str, Any], kind: str, host: str) -> None:
    ray.get(actors["caller"].check.remote(actors[host], kind, same_host=not host))


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

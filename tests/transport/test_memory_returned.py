"""Memory of values that nobody holds any more goes back to the system, in the producer and in the reader."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import raylane

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.slow]
LENGTH, COUNT = 12_500_000, 8
"""Elements of a tensor of 50 MB, and tensors for each way."""
ALLOWED_MB = 150
"""Growth of a process over all of them: less than three of the tensors."""


class Producer:
    @raylane.method
    def plain(self) -> torch.Tensor:
        return torch.ones(LENGTH)

    @raylane.method(snapshot=True)
    def snapshot(self) -> torch.Tensor:
        return torch.ones(LENGTH)

    def pid(self) -> int:
        return os.getpid()


def resident_mb(pid: int) -> int:
    """Return the memory of a process in MB, with what it shares with others."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("Rss:"))


def test_memory_goes_back_by_every_transport(monkeypatch: pytest.MonkeyPatch, eventually: Any) -> None:
    from raylane.transport.link import endpoint

    endpoint.close()  # the next one reads the variable
    monkeypatch.setenv("RAYLANE_POOL_IDLE_S", "0.3")
    runtime_env = {"env_vars": {"RAYLANE_POOL_IDLE_S": "0.3"}}
    actor: Any = ray.remote(num_cpus=0, runtime_env=runtime_env)(Producer).remote()
    pids = [os.getpid(), ray.get(actor.pid.remote())]
    into = torch.zeros(LENGTH)
    ways: dict[str, Callable[[], object]] = {
        "host": lambda: raylane.get(actor.plain.remote(), tensor_transport="host"),
        "tcp": lambda: raylane.get(actor.plain.remote(), tensor_transport="tcp"),
        "gloo": lambda: raylane.get(actor.plain.remote(), tensor_transport="gloo"),
        "snapshot": lambda: ray.get(actor.snapshot.remote()),
        "shared copy": lambda: [ray.get(ref) for ref in [actor.plain.remote()] for _ in range(3)],
        "into": lambda: raylane.get(actor.plain.remote(), into=into, tensor_transport="gloo"),
        "put": lambda: ray.get(raylane.put(torch.ones(LENGTH))),
    }
    ways["host"]()
    gc.collect()
    before = [resident_mb(pid) for pid in pids]
    shm = set(os.listdir("/dev/shm"))
    for name, read in ways.items():
        for _ in range(COUNT):
            read()
        gc.collect()
        for pid, base in zip(pids, before, strict=True):
            eventually(lambda pid=pid, base=base: resident_mb(pid) < base + ALLOWED_MB, within_s=60)
        assert not [entry for entry in set(os.listdir("/dev/shm")) - shm if "raylane" in entry], name
    endpoint.close()

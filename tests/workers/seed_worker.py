"""Worker class for the tests of compiled groups; its module travels by value."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from raylane.errors import GraphTimeoutError


class SeedWorker:
    """A worker of a small data-parallel training: records its calls, computes, waits, fails and dies on request."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.log: list[tuple[str, int, float, float]] = []
        """(call, thread, start, end) of each call, in seconds of time.monotonic."""
        self.thread = threading.get_ident()
        self.local = threading.local()
        self.local.grad = False
        torch.set_grad_enabled(False)

    def work(self, name: str, seconds: float = 0.0) -> int:
        started = time.monotonic()
        time.sleep(seconds)
        self.log.append((name, threading.get_ident(), started, time.monotonic()))
        return self.rank

    def log_of_calls(self) -> list[tuple[str, int, float, float]]:
        return self.log

    def settings(self) -> tuple[bool, bool, bool]:
        """Return (same thread as the constructor, thread-local value is there, gradients are enabled)."""
        return threading.get_ident() == self.thread, hasattr(self.local, "grad"), torch.is_grad_enabled()

    def rows(self, data: Any) -> list[int]:
        return data["ids"].tolist()

    def both(self, data: Any, mask: Any, scale: int = 1) -> tuple[list[int], list[int]]:
        return (data["ids"] * scale).tolist(), mask

    def wait_for(self, path: str) -> int:
        while not Path(path).exists():
            time.sleep(0.005)
        return self.rank

    def raise_on(self, rank: int) -> int:
        if self.rank == rank:
            raise ArithmeticError(f"rank {rank} cannot go on")
        return self.rank

    def reduce_or_raise(self, failing: int | None) -> float:
        """Sum the ranks of all workers; the failing rank raises before it takes part."""
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timedelta(minutes=10))
        if self.rank == failing:
            raise ArithmeticError(f"rank {failing} left the step")
        total = torch.tensor([float(self.rank)])
        dist.all_reduce(total)
        return total.item()

    def die_on(self, rank: int) -> int:
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()
        return self.rank

    def process_id(self) -> int:
        return os.getpid()

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def native_thread(self) -> int:
        return threading.get_native_id()

    def time_out(self) -> None:
        raise GraphTimeoutError("a graph of this worker", execution=3)


class Reluctant(SeedWorker):
    """A worker whose constructor raises as long as a file exists."""

    def __init__(self, path: str) -> None:
        super().__init__()
        if Path(path).exists():
            raise ArithmeticError("the file exists")

"""The actors of `raylane bench graph`. Imports neither torch nor NumPy: most of these actors need neither, and they
are many and start at once."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

__all__ = ["Peer", "Stepper"]


class Peer:
    """Does next to nothing, so that what is measured is the way there and back."""

    def pid(self) -> int:
        return os.getpid()

    def echo(self, value: Any) -> Any:
        return value

    def touch(self, array: Any) -> float:
        """Looks at both ends of a 1-d array."""
        return float(array[0] + array[-1])

    def loop(self, method: str, value: Any, seconds: float, gap_s: float) -> list[float]:
        """Call a method of this actor again and again; microseconds of each call."""
        call, clock = getattr(self, method), time.perf_counter
        times = []
        now = clock()
        end = now + seconds
        while now < end:
            start = clock()
            call(value)
            now = clock()
            times.append((now - start) * 1e6)
            if gap_s:
                time.sleep(gap_s)
        return times


class Stepper(Peer):
    """Trains a small network on one core: forward, backward and update, several times a step."""

    BATCH, WIDTH = 32, 256

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.repeats = 1
        self.model = torch.nn.Sequential(
            torch.nn.Linear(self.WIDTH, self.WIDTH), torch.nn.ReLU(), torch.nn.Linear(self.WIDTH, self.WIDTH)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.batch = torch.ones(self.BATCH, self.WIDTH)

    def calibrate(self, seconds: float) -> int:
        """How many repeats take about that long here."""
        times = []
        end = time.perf_counter() + 20 * seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            self.step(0)
            times.append(time.perf_counter() - start)
        return max(1, round(seconds / statistics.median(times)))

    def repeat(self, count: int) -> None:
        self.repeats = count

    def step(self, value: Any) -> Any:
        # The setting is one of each thread, and contenders run this on threads of their own.
        if self.torch.get_num_threads() != 1:
            self.torch.set_num_threads(1)
        for _ in range(self.repeats):
            self.optimizer.zero_grad()
            loss = self.model(self.batch).square().mean()
            loss.backward()
            self.optimizer.step()
        return value

    def steps(self, count: int) -> list[float]:
        """That many steps, one after the other; when each ended on the clock that all processes of a host share."""
        ends = []
        for _ in range(count):
            self.step(0)
            ends.append(time.perf_counter())
        return ends

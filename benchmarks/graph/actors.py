"""Actors of the benchmark `graph`. Imports neither torch nor NumPy, because many of these actors start at once."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

from benchmarks.graph.wake_ups import WakeUps
from raylane.core.memory.segment import Segment


class Peer:
    """Actor that does almost nothing, so that the measured time is the way to it and back."""

    def pid(self) -> int:
        return os.getpid()

    def echo(self, value: Any) -> Any:
        return value

    def touch(self, array: Any) -> float:
        """Return the sum of the first and the last element of a 1-d array."""
        return float(array[0] + array[-1])

    def loop(self, method: str, value: Any, seconds: float, gap_s: float) -> list[float]:
        """Call a method of this actor repeatedly; return the microseconds of each call."""
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


class Waker(Peer):
    """Actor that does nothing but wake one process when another wakes it."""

    def serve(self, path: str, own: int, following: int, library: str) -> None:
        """Post semaphore `following` of a segment for each post of semaphore `own`. Never returns."""
        segment = Segment.open(path)
        wake_ups = WakeUps(library, segment.address)
        while True:
            wake_ups.pass_on(own, following)


class Stepper(Peer):
    """Actor that trains a small network on one core: forward, backward and update, `repeats` times per step."""

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
        """Return the number of repeats that take about `seconds` on this machine."""
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
        # torch keeps this setting per thread, and each contender runs the method in another thread.
        if self.torch.get_num_threads() != 1:
            self.torch.set_num_threads(1)
        for _ in range(self.repeats):
            self.optimizer.zero_grad()
            loss = self.model(self.batch).square().mean()
            loss.backward()
            self.optimizer.step()
        return value

    def steps(self, count: int) -> list[float]:
        """Run `count` steps and return the end time of each, on the clock that all processes of a host share."""
        ends = []
        for _ in range(count):
            self.step(0)
            ends.append(time.perf_counter())
        return ends

"""Workers of the benchmark `sft`: steps that do almost nothing, or compute for a chosen time.

Each worker keeps the time that its own part of each step took; the driver fetches these times after a block.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import torch


class TimedWorker:
    """Worker that keeps the times of its steps; subclasses define `work`."""

    def __init__(self) -> None:
        self.times_us: list[float] = []
        """Microseconds of the steps since the last `take_times`."""

    def work(self, number: int) -> dict[str, float]:
        """Run step `number` and return its metrics."""
        raise NotImplementedError

    def pid(self) -> int:
        """Return the process ID."""
        return os.getpid()

    def take_times(self) -> list[float]:
        """Return the microseconds of the steps since the last call of this method."""
        times, self.times_us = self.times_us, []
        return times

    def step(self, number: int) -> dict[str, float]:
        """Run step `number`, for which the driver sends nothing else."""
        start = time.perf_counter()
        metrics = self.work(number)
        self.times_us.append((time.perf_counter() - start) * 1e6)
        return metrics

    def feed(self, data: Any, number: int) -> dict[str, float]:
        """Run step `number` on a batch that the driver sent."""
        # Read something: a way to send batches could be fast by leaving them unread.
        assert data["input_ids"].ndim == 2
        return self.step(number)

    def steps(self, first: int, count: int) -> tuple[list[float], float]:
        """Run `count` steps without a driver.

        Return the time of the start and of the end of each step, on the clock that all processes of a host share, and
        the number of tokens of all steps.
        """
        times, tokens = [time.perf_counter()], 0.0
        for number in range(first, first + count):
            tokens += self.step(number)["tokens"]
            times.append(time.perf_counter())
        return times, tokens


class StepWorker(TimedWorker):
    """Worker whose step multiplies matrices `repeats` times and returns metrics like those of a training step."""

    WIDTH = 256

    def __init__(self) -> None:
        super().__init__()
        self.repeats = 0
        # The rows sum to 1, so that repeated products neither vanish nor overflow, which would change their speed.
        self.matrix = torch.full((self.WIDTH, self.WIDTH), 1 / self.WIDTH)

    def calibrate(self, seconds: float) -> int:
        """Return the number of products that take about `seconds` on one thread, measured for 50 times as long."""
        times = []
        end = time.perf_counter() + 50 * seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            self._multiply(20)
            times.append((time.perf_counter() - start) / 20)
        return max(1, round(seconds / statistics.median(times)))

    def repeat(self, count: int) -> None:
        """Set the number of products in a step."""
        self.repeats = count

    def work(self, number: int) -> dict[str, float]:
        if self.repeats:
            self._multiply(self.repeats)
        return {"step": number, "loss": 1.25, "grad_norm": 0.5, "lr": 1e-4, "tokens": 1024.0}

    def _multiply(self, count: int) -> None:
        # torch keeps this setting per thread, and each contender runs the method in another thread.
        if torch.get_num_threads() != 1:
            torch.set_num_threads(1)
        product = self.matrix
        for _ in range(count):
            product = product @ self.matrix

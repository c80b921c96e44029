"""Seconds of a fine-tuning run from the kill of a worker to its next steps, for three ways to go on.

    python -m benchmarks.studies.recovery CONFIG [override...]

    memory      only the killed process starts again; snapshots every 10 steps
    spare       the same, with a process that waits beside the group
    restart     all processes start again from a checkpoint, saved every 10 steps
    undisturbed with and without snapshots, for what they cost when their memory is warm

Each way runs `ROUNDS` times, in turn. Rank 1 is killed when step 25 is read. Prints seconds to the next step that ends
(`any`), and to the first that had not ended before (`new`); and the mean step time of the undisturbed runs.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from raylane.sft.config.load import load_config
from raylane.sft.run import trainer
from raylane.sft.run.trainer import Trainer
from raylane.training.report.metrics import METRICS_FILE, read_metrics
from raylane.training.run.worker import TrainingWorker

ROUNDS, EVERY, KILL_AT, STEPS = 3, 10, 25, 35
UNDISTURBED_STEPS, WARM_AT = 120, 50
"""Steps of an undisturbed run, and the step after which all slots of snapshots have been written once."""


class Stopwatch:
    """Kills rank 1 once, and notes when steps end afterwards."""

    def __init__(self) -> None:
        self.killed_s = 0.0
        self.ended: list[tuple[int, float]] = []
        """Steps that ended after the kill, and when."""

    @contextmanager
    def watching(self) -> Any:
        """Watch the runs of a block."""
        read = Trainer._read_oldest

        def read_and_note(one: Trainer) -> None:
            if not self.killed_s and one._in_flight[0][0] == KILL_AT:
                pid = one.policy.group.call("process_id", ranks=[1]).results()[0]
                self.killed_s = time.perf_counter()
                os.kill(pid, signal.SIGKILL)
            read(one)
            if self.killed_s:
                self.ended.append((one._read, time.perf_counter() - self.killed_s))

        with mock.patch.object(Trainer, "_read_oldest", read_and_note):
            yield

    def seconds(self) -> dict[str, float]:
        """Return the seconds to the next steps, after those that had been computed before the kill."""
        recovered = [at for at in range(1, len(self.ended)) if self.ended[at][0] <= self.ended[at - 1][0]]
        first = recovered[0] if recovered else self._after_gap()
        highest = max(step for step, _ in self.ended[:first]) if first else KILL_AT
        new = next(seconds for step, seconds in self.ended[first:] if step > highest)
        return {"any": self.ended[first][1], "new": new}

    def _after_gap(self) -> int:
        """Return the index of the step after the longest pause, where the run did not go back."""
        times = [0.0, *(seconds for _, seconds in self.ended)]
        return max(range(len(self.ended)), key=lambda at: times[at + 1] - times[at])


def run(config: str, overrides: list[str], *more: str, steps: int = STEPS) -> list[float]:
    """Run a configuration in temporary folders; return the step times after the first steps."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*overrides, f"checkpointing.checkpoint_dir={folder}/saved", f"logger.log_dir={folder}/logs", *more]
        trainer.run(load_config(config, [*words, f"sft.max_num_steps={steps}", "checkpointing.save_hf=false"]))
        records = read_metrics(Path(folder) / "logs" / METRICS_FILE)
    return [one["train:step_time_s"] for one in records if "train:step_time_s" in one and one["step"] > WARM_AT]


def main(config: str, *overrides: str) -> None:
    """Run all ways in turn, and print what they took."""
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        for way, spares in (("memory", 0), ("spare", 1)):
            watch = Stopwatch()
            with watch.watching():
                run(config, list(overrides), f"sft.snapshot_every={EVERY}", f"cluster.spare_workers={spares}")
            for name, seconds in watch.seconds().items():
                found[f"{way}, {name}"].append(seconds)
        watch, regroup = Stopwatch(), TrainingWorker.on_regroup
        del TrainingWorker.on_regroup  # as it was before: all processes start again
        try:
            with watch.watching():
                run(config, list(overrides), f"checkpointing.save_period={EVERY}")
        finally:
            TrainingWorker.on_regroup = regroup  # type: ignore[method-assign]
        for name, seconds in watch.seconds().items():
            found[f"restart, {name}"].append(seconds)
        for name, every in (("with snapshots", EVERY), ("without", 0)):
            times = run(config, list(overrides), f"sft.snapshot_every={every}", steps=UNDISTURBED_STEPS)
            found[f"step {name}"].append(statistics.mean(times))
    for name, all_seconds in found.items():
        print(f"{name:24}", *(f"{seconds:8.3f}" for seconds in all_seconds), "s")


if __name__ == "__main__":
    main(*sys.argv[1:])

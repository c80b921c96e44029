"""Workers on a real Ray that are set up again with other settings: starting processes is what costs time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from raylane.sft.data.prepare import prepare
from raylane.sft.run.policy import SftPolicy
from raylane.training.parallel.mesh import AXES, COPY_AXES, DATA_AXES
from raylane.workers.batch import BatchDict
from sft import tiny_run


class WorkerRun:
    """A policy of `workers` workers, and the configuration that they have now."""

    def __init__(self, folder: Path, workers: int, changes: Mapping[str, Any] | None = None) -> None:
        self.folder, self.workers = folder, workers
        self.config = tiny_run.config_of(folder, {"cluster.num_workers": workers, **(changes or {})})
        self.prepared = prepare(self.config)
        self.policy = SftPolicy(self.config, self.prepared, 8)

    def start(self, changes: Mapping[str, Any]) -> None:
        """Set up the workers anew with `changes` by dotted key."""
        self.config = tiny_run.config_of(self.folder, {"cluster.num_workers": self.workers, **changes})
        self.prepared = prepare(self.config)
        self.policy._config = self.config
        self.policy._setup = (self.config, self.prepared, 8)
        self.policy.facts = self.policy.call("setup", *self.policy._setup)
        self.policy.next_step = 0

    def batch(self, step: int = 0) -> BatchDict:
        """Return the global batch of a step."""
        return tiny_run.global_batch(self.config, self.prepared, step)

    def gradients(self, rows: int | None = 2) -> tuple[float, dict[str, torch.Tensor]]:
        """Return loss and gradients of the global batch of step 0."""
        parts, inner = self.batch().shard(self.policy._dims.readers), self.policy._dims.dp_shard
        future = self.policy.group.call(
            "gradients",
            shard=DATA_AXES,
            replicate=COPY_AXES,
            one_result=AXES,
            common={"micro_batch_size": rows},
            data=[parts[i : i + inner] for i in range(0, len(parts), inner)],
        )
        return future.results(60)[0]

    def losses(self, steps: range) -> list[float]:
        """Run steps and return their losses."""
        return [self.policy.train_step(number)["loss"] for number in steps]

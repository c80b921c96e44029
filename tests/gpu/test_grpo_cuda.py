"""GRPO with the trainer or the engines on a GPU, and the others on CPUs: weights cross between the two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.rl import tiny
from tests.rl.test_run import train_records

from raylane.rl import trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.usefixtures("cluster"),
]
PLACES: dict[str, dict[str, Any]] = {"trainer": {"cluster.gpus_per_node": 1}, "engines": {"rollout.gpus": 0.5}}


@pytest.mark.parametrize("on_gpu", PLACES)
def test_run_ends_with_the_policy_of_the_trainer(tmp_path: Path, on_gpu: str) -> None:
    tiny.write_model(tmp_path)
    config = tiny.config_of(tmp_path, PLACES[on_gpu])
    result = trainer.run(config)
    assert (result.steps, result.stopped) == (4, False)
    records = train_records(config)
    assert len(records) == 4
    # The weights that sampled are those that are trained: their log-probabilities differ by rounding only.
    assert all(abs(record["train:sampling_kl"]) < 1e-4 for record in records)

"""`raylane grpo` with vLLM as its rollout engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM has an environment of its own: run `make test-vllm`")

from tests.rl import tiny
from tests.rl.test_run import train_records
from tests.vllm import engines

from raylane.rl import trainer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster"), pytest.mark.timeout(600)]


def vllm_config(folder: Path, **changes: Any) -> Any:
    tiny.write_model(folder, head_dim=32)
    options = {"rollout.engine": "vllm", "rollout.env_vars": engines.ENVIRONMENT, "rollout.timeout_s": 300}
    return tiny.config_of(folder, {**options, **changes})


def test_log_probabilities_of_vllm_are_those_of_the_trainer(tmp_path: Path) -> None:
    config = vllm_config(tmp_path, **{"rollout.temperature": 0.7})
    result = trainer.run(config)
    assert result.steps == 4
    records = train_records(config)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    for record in records:
        assert record["train:lag"] == 0
        # Two implementations of the same model, in float32.
        assert abs(record["train:sampling_kl"]) < 1e-5
        assert record["train:clipped"] == 0
        assert 1 < record["train:length"] <= 6
    # Steps change the weights, and the next answers are sampled with them.
    assert records[0]["train:loss"] != 0


def test_dead_vllm_is_replaced(tmp_path: Path) -> None:
    config = vllm_config(
        tmp_path, **{"grpo.mode": "one_step", "rollout.kill_after_step": 2, "grpo.val_at_start": False}
    )
    assert trainer.run(config).steps == 4
    assert max(record["train:lag"] for record in train_records(config)) <= 1

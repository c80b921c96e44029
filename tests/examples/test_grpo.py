"""The examples of reinforcement learning: the queue, and a published model type with two rewards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.examples.programs import ROOT, output_of
from tests.rl.tiny import write_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from raylane.rl import trainer
from raylane.rl.config import load_config
from raylane.training.report.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.tour]


def test_rollout_queue_prints_all_groups(ray_session: None) -> None:
    lines = output_of("rollout_queue.py").splitlines()
    assert sorted(line for line in lines if line.startswith("prompt")) == [
        f"prompt {prompt}: 4 samples of 8 tokens" for prompt in range(4)
    ]
    assert lines[-1] == "tokens by version: {7: 128}"


def test_published_model_type_with_two_rewards(ray_session: None, tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"eos_token_id": 258, "bos_token_id": None, "pad_token_id": 257}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=300, num_key_value_heads=2, **sizes, **ids)).save_pretrained(folder)
    problems = tmp_path / "problems.jsonl"
    rows = [{"prompt": f"What is {i} + {i}? Put the result into \\boxed{{}}.", "answer": str(2 * i)} for i in range(8)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = {
        "policy.model_name": folder,
        "data.train": problems,
        "grpo.max_num_steps": 2,
        "grpo.prompts_per_step": 2,
        "grpo.samples_per_prompt": 4,
        "policy.train_global_batch_size": 8,
        "policy.max_total_sequence_length": 128,
        "rollout.max_new_tokens": 16,
        "rollout.gpus": 0,
        "cluster.gpus_per_node": 0,
        "checkpointing.checkpoint_dir": tmp_path / "checkpoints",
        "logger.log_dir": tmp_path / "logs",
    }
    config = load_config(ROOT / "examples" / "grpo_qwen.yaml", [f"{key}={value}" for key, value in words.items()])
    assert trainer.run(config).steps == 2
    records = [record for record in read_metrics(tmp_path / "logs" / "metrics.jsonl") if "train:loss" in record]
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        # The reference is the model that the run began with; the first step moves it by at most lr.
        assert 0 <= record["train:reference_kl"] < 0.01
    assert any({"train:reward_correct", "train:reward_boxed"} <= record.keys() for record in records)

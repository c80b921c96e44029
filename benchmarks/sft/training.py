"""Training for the benchmark `sft`: the worker of a run, a plain loop of torch and transformers, and their data.

Both train the model of examples/sft_docstrings.yaml on the same packed rows, with the same loss (mean over the
supervised tokens of a step), clipping and optimizer, and with the same number of threads in all. The conversations are
random words, the same on every machine.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from benchmarks.sft.workers import TimedWorker
from raylane.sft.config.load import build_config
from raylane.sft.config.schema import SftRunConfig
from raylane.sft.data import order
from raylane.sft.data.mixing import open_rows
from raylane.sft.data.prepared import PreparedData
from raylane.sft.run.worker import SftWorker
from raylane.training.labels import IGNORED
from raylane.training.model.hf_config import model_config
from raylane.training.model.initial import fill_random
from raylane.training.model.optim import learning_rate, set_learning_rate

ROWS = 4
"""Rows of a step."""
THREADS = 2
"""Number of threads of each contender, all its workers together."""


def write_conversations(path: Path, count: int) -> None:
    """Write `count` conversations of random words."""
    # Enough different words that a tokenizer of 4,096 tokens can be trained on them.
    chooser = random.Random(1)
    words = ["".join(chooser.choices("abcdefghijklmnopqrstuvwxyz", k=chooser.randint(3, 9))) for _ in range(4000)]
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            turns = [
                {"role": role, "content": " ".join(chooser.choices(words, k=chooser.randint(5, 25)))}
                for role in ("user", "assistant")
            ]
            file.write(json.dumps({"messages": turns}) + "\n")


def training_config(folder: Path, workers: int) -> SftRunConfig:
    """Return the configuration of a run on `folder`/train.jsonl: 2.6 million parameters, 4 rows of 256 tokens."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "head_dim": 32}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return build_config(
        {
            "sft": {"max_num_epochs": None, "max_num_steps": 100_000, "seed": 1},
            "policy": {
                "hf_config_overrides": {"model_type": "qwen3", "max_position_embeddings": 256, **shape, **heads},
                "tokenizer": {"train_vocab_size": 4096, "chat_template": "chatml"},
                "max_total_sequence_length": 256,
                "train_global_batch_size": ROWS,
                # The rows of a worker are one micro-batch, as are all rows in the plain loop.
                "train_micro_batch_size": ROWS // workers,
                "precision": "float32",
            },
            "data": {"train": str(folder / "train.jsonl"), "cache_dir": str(folder / "cache")},
            "checkpointing": {"enabled": False},
            "cluster": {"num_workers": workers, "cpus_per_worker": THREADS // workers},
        }
    )


class TrainWorker(TimedWorker):
    """Worker of a fine-tuning run that keeps the times of its steps."""

    def __init__(self, num_threads: int) -> None:
        super().__init__()
        self.trained = SftWorker("cpu", num_threads)

    def setup(self, config: SftRunConfig, prepared: PreparedData, total_steps: int) -> None:
        """Build model, optimizer and data."""
        self.trained.setup(config, prepared, total_steps)

    def work(self, number: int) -> dict[str, float]:
        return {"step": number, **self.trained.train_step(number)}

    def teardown(self) -> None:
        """Leave the process group."""
        self.trained.teardown()


class PlainTrainer(TimedWorker):
    """Training loop as one would write it with torch and transformers alone."""

    def __init__(self, num_threads: int) -> None:
        super().__init__()
        torch.set_num_threads(num_threads)

    def setup(self, config: SftRunConfig, prepared: PreparedData, total_steps: int) -> None:
        """Build the model, the optimizer and the rows."""
        from transformers import AutoModelForCausalLM

        policy = config.policy
        hf_config = model_config(policy, prepared.vocab_size, prepared.pad_id, min(prepared.end_ids))
        self.model: Any = AutoModelForCausalLM.from_config(
            hf_config, dtype=torch.float32, attn_implementation="sdpa"
        ).train()
        fill_random(self.model, config.sft.seed)  # the weights with which raylane starts
        # The same groups as `sft.model.optim`: no weight decay for norms and biases.
        matrices = [parameter for parameter in self.model.parameters() if parameter.ndim >= 2]
        vectors = [parameter for parameter in self.model.parameters() if parameter.ndim < 2]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, **policy.optimizer.kwargs.model_dump(), fused=True)
        self.rows = open_rows(prepared.train, policy, prepared.pad_id)
        self.config, self.total_steps = config, total_steps

    def work(self, number: int) -> dict[str, float]:
        policy, sft = self.config.policy, self.config.sft
        row_numbers = order.batch_rows(self.rows.num_rows, policy.train_global_batch_size, sft.seed, number)
        batch = {name: torch.from_numpy(array) for name, array in self.rows.rows(row_numbers).items()}
        rate = learning_rate(number, policy.optimizer.kwargs.lr, policy.scheduler, self.total_steps)
        set_learning_rate(self.optimizer, rate)
        # Without a mask and a cache, transformers keeps the packed documents apart by their positions.
        inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}
        hidden = self.model.model(**inputs).last_hidden_state
        # Only supervised positions go through the head; to compute all logits would make this loop slower.
        learned = batch["labels"] != IGNORED
        loss = torch.nn.functional.cross_entropy(self.model.lm_head(hidden[learned]), batch["labels"][learned])
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), policy.max_grad_norm or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        tokens = int((batch["document_ids"] >= 0).sum())
        return {"step": number, "loss": loss.item(), "grad_norm": float(norm), "tokens": tokens}

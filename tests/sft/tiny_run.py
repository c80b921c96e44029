"""Training run for tests: generated conversations, a tokenizer trained on them, and models of two layers."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tests.sft import reference_loop

from raylane.sft.config.load import build_config
from raylane.sft.config.schema import SftRunConfig
from raylane.sft.data.mixing import open_training_rows, rows_of_step
from raylane.sft.data.prepare import prepare
from raylane.sft.data.prepared import PreparedData
from raylane.training.model.hf_config import model_config
from raylane.training.model.optim import learning_rate, make_optimizer, set_learning_rate
from raylane.workers.batch import BatchDict

ROW_TOKENS = 64
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
WORDS = ("red", "green", "blue", "stone", "river", "cloud", "apple", "north", "south", "early", "late", "one", "two")


def reference_losses(config: SftRunConfig, prepared: PreparedData, steps: int) -> list[float]:
    """Return the losses of a plain model that one process trains with the optimizer of the run."""
    holder: Any = torch.nn.Module()
    model = holder.causal_lm = reference_model(config, prepared)
    settings, policy = config.policy.optimizer, config.policy
    optimizer, losses = make_optimizer(holder, settings), []
    for step in range(steps):
        set_learning_rate(optimizer, learning_rate(step, settings.kwargs.lr, policy.scheduler, 8))
        loss, _ = reference_gradients(model, global_batch(config, prepared, step))
        torch.nn.utils.clip_grad_norm_(model.parameters(), policy.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses


def write_conversations(path: Path, count: int, seed: int) -> None:
    """Write questions of different lengths whose answers repeat them, so that there is something to learn."""
    chooser = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            words = chooser.choices(WORDS, k=chooser.randint(1, 5))
            messages = [
                {"role": "user", "content": "say " + " ".join(words)},
                {"role": "assistant", "content": " ".join(words)},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def config_of(folder: Path, changes: Mapping[str, Any] | None = None) -> SftRunConfig:
    """Return the configuration of the run in `folder`; `changes` by dotted key, e.g. {"cluster.num_workers": 2}."""
    document: dict[str, Any] = {
        "sft": {
            "max_num_steps": 8,
            "max_num_epochs": None,
            "seed": 3,
            "val_global_batch_size": 8,
            "val_micro_batch_size": 2,
        },
        "policy": {
            "model_name": None,
            "hf_config_overrides": {
                "model_type": "qwen3",
                **SIZES,
                "tie_word_embeddings": True,
            },
            "tokenizer": {"train_vocab_size": 320, "chat_template": "chatml"},
            "max_total_sequence_length": ROW_TOKENS,
            "train_global_batch_size": 8,
            "train_micro_batch_size": 2,
            "precision": "float32",
            "loss_chunk_tokens": 16,
            "optimizer": {"kwargs": {"lr": 1e-2}},
            "scheduler": {"name": "cosine", "warmup_steps": 2},
        },
        "data": {
            "train": str(folder / "train.jsonl"),
            "validation": str(folder / "validation.jsonl"),
            "cache_dir": str(folder / "cache"),
        },
        "checkpointing": {"checkpoint_dir": str(folder / "checkpoints"), "keep_latest_k": 9},
        "logger": {"log_dir": str(folder / "logs"), "log_level": "warning"},
        "cluster": {"num_workers": 1},
    }
    for key, value in (changes or {}).items():
        *parents, last = key.split(".")
        here = document
        for parent in parents:
            here = here.setdefault(parent, {})
        here[last] = copy.deepcopy(value)  # a later key may change a part of it
    return build_config(document)


def write_data(folder: Path) -> None:
    """Write the two data files that `config_of` names."""
    write_conversations(folder / "train.jsonl", 150, seed=1)
    write_conversations(folder / "validation.jsonl", 21, seed=2)


def global_batch(config: SftRunConfig, prepared: PreparedData, step: int = 0) -> BatchDict:
    """Return all rows of a step, as the workers together read them."""
    source = open_training_rows(prepared, config)
    rows = rows_of_step(source, config, step)
    return BatchDict({name: torch.from_numpy(array) for name, array in source.rows(rows).items()})


def reference_model(config: SftRunConfig, prepared: PreparedData) -> Any:
    """Return a plain Hugging Face model with the initial weights of the run."""
    hf_config = model_config(config.policy, prepared.vocab_size, prepared.pad_id, prepared.end_ids[0])
    return reference_loop.new_model(hf_config, config.sft.seed)


def reference_gradients(model: Any, batch: BatchDict) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients of a global batch, one document at a time through a plain model.

    Uses neither packing nor sharding.
    """
    total, supervised = torch.zeros((), dtype=torch.float64), 0
    losses = []
    for ids, labels, documents in zip(batch["input_ids"], batch["labels"], batch["document_ids"], strict=True):
        for document in range(int(documents.max()) + 1):
            own = documents == document
            logits = model(input_ids=ids[own][None]).logits[0]
            losses.append(torch.nn.functional.cross_entropy(logits, labels[own], reduction="sum"))
            supervised += int((labels[own] != -100).sum())
    (torch.stack(losses).sum() / supervised).backward()
    total = sum(loss.item() for loss in losses)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return total / supervised, gradients


def assert_same(
    found: tuple[float, Mapping[str, torch.Tensor]], wanted: tuple[float, Mapping[str, torch.Tensor]]
) -> None:
    """Assert that the loss and every gradient differ by less than 1e-5."""
    assert abs(found[0] - wanted[0]) < 1e-5, (found[0], wanted[0])
    assert set(found[1]) == set(wanted[1])
    for name, gradient in wanted[1].items():
        difference = float((found[1][name] - gradient).abs().max())
        assert difference < 1e-5, (name, difference, float(gradient.abs().max()))


def prepared_in(folder: Path) -> PreparedData:
    """Return the tokenised data of the run (tokenised once per folder)."""
    return prepare(config_of(folder))

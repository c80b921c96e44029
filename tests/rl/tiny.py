"""A tiny model with a tokenizer of bytes, and configurations of GRPO runs of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from raylane.rl.config import GrpoRunConfig
from raylane.rl.sorting import write_sets
from raylane.training.config.load import make_config

TEMPLATE = "{% for message in messages %}{{ message.content }}>{% endfor %}"
ROW_TOKENS = 16


def byte_tokenizer() -> Any:
    """Return a tokenizer of 256 bytes and three special tokens: padding, start and end of a turn."""
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    names = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=special[2], pad_token=special[0], clean_up_tokenization_spaces=False
    )


def write_model(folder: Path, *, tied: bool = False, layers: int = 2, head_dim: int = 8) -> Path:
    """Write a random model and its tokenizer as a Hugging Face folder; return its path."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_sets(folder / "data", count=200, held_out=20)
    return folder / "model"


def config_of(folder: Path, changes: Mapping[str, Any] | None = None) -> GrpoRunConfig:
    """Return a configuration of the model that `write_model` wrote; `changes` by dotted key."""
    document: dict[str, Any] = {
        "grpo": {
            "max_num_steps": 4,
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "rewards": "tests.rl.tiny:closeness",
            "log_interval": 1,
            "seed": 3,
            "shown_answers": 2,
        },
        "rollout": {"max_new_tokens": 6, "timeout_s": 60},
        "policy": {
            "model_name": str(folder / "model"),
            "max_total_sequence_length": ROW_TOKENS,
            "train_global_batch_size": 16,
            "train_micro_batch_size": 4,
            "precision": "float32",
            "optimizer": {"name": "adamw", "kwargs": {"lr": 1e-3}},
            "sequence_packing": {"enabled": False},
        },
        "data": {
            "train": str(folder / "data" / "train.jsonl"),
            "validation": str(folder / "data" / "validation.jsonl"),
            "cache_dir": str(folder / "cache"),
        },
        "checkpointing": {"checkpoint_dir": str(folder / "checkpoints"), "keep_latest_k": 10},
        "logger": {"log_dir": str(folder / "logs")},
        "cluster": {"num_workers": 1},
    }
    for key, value in (changes or {}).items():
        section = document
        *parents, last = key.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return make_config(document, GrpoRunConfig)


def closeness(answer: str, row: Mapping[str, Any]) -> float:
    """Return a reward that differs between nearly all answers."""
    places = sum(one == other for one, other in zip(answer, row["answer"], strict=False))
    return places + sum(map(ord, answer)) % 97 / 97


def brevity(answer: str, row: Mapping[str, Any]) -> float:
    """Return more for a shorter answer."""
    return -float(len(answer))

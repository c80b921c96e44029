"""Helpers for tests of the data side: small conversations, a tokenizer trained on them, and a configuration."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from raylane.sft.config.load import build_config
from raylane.sft.config.schema import SftRunConfig
from raylane.sft.data.chat import ChatTokenizer
from raylane.training.config.overrides import merge
from raylane.training.config.policy import TokenizerConfig
from raylane.training.text.messages import Conversation, conversation_of, parse_line

WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "rivers",
    "run",
    "below",
    "old",
    "bridges",
)


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def talk(*messages: dict[str, Any], **more: Any) -> Conversation:
    where = "talk.jsonl:1"
    return conversation_of(parse_line(json.dumps({"messages": list(messages), **more}), where), where)


def sentence(seed: int, num_words: int) -> str:
    return " ".join(WORDS[(seed * 7 + 3 * n) % len(WORDS)] for n in range(num_words))


def question(seed: int, num_words: int = 8) -> dict[str, Any]:
    """Return a line of a data file: one question and an answer of `num_words` words."""
    return {
        "messages": [
            turn("user", f"Question number {seed}: what comes now?"),
            turn("assistant", f"Answer {seed}: {sentence(seed, num_words)}."),
        ]
    }


def write_jsonl(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@functools.cache
def tokenizer() -> ChatTokenizer:
    texts = [message["content"] for seed in range(40) for message in question(seed)["messages"]]
    return ChatTokenizer.train(texts, TokenizerConfig(train_vocab_size=400))


def document(tmp_path: Path, **sections: Any) -> dict[str, Any]:
    """Return a small but complete configuration that reads tmp_path/train.jsonl; `sections` are merged over it."""
    base = {
        "sft": {"max_num_epochs": 2},
        "policy": {
            "tokenizer": {"train_vocab_size": 400},
            "hf_config_overrides": {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 2},
            "max_total_sequence_length": 128,
            "train_global_batch_size": 2,
        },
        "data": {"train": str(tmp_path / "train.jsonl"), "cache_dir": str(tmp_path / "cache")},
    }
    return merge(base, sections)


def config(tmp_path: Path, **sections: Any) -> SftRunConfig:
    return build_config(document(tmp_path, **sections))

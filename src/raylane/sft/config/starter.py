"""Configuration of a run that names a model and data only: `raylane sft MODEL DATA`.

It is written as a file, which people can read and change, and is read as every other one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raylane.errors import ConfigError
from raylane.training.run.places import HUB, hub_model

_OVERRIDE = re.compile(r"~|\+{0,2}[A-Za-z_][\w.]*=")
MOST_ROW_TOKENS = 2048
ROWS_IN_A_STEP = 8


def names_model(word: str) -> bool:
    """Return True if the first word of a command line is a model: a folder of one, or a name with hf: before it."""
    return word.startswith(HUB) or (Path(word) / "config.json").is_file()


def is_override(word: str) -> bool:
    """Return True if a word of a command line changes a key."""
    return _OVERRIDE.match(word) is not None


def starter_document(
    model: str, config: Mapping[str, Any], data: Sequence[str], folder: str, gpus: int
) -> dict[str, Any]:
    """Return the configuration that trains all weights of `model` on `data`. Pure.

    `config` is the content of the model's config.json, `folder` gets all that the run writes, and `gpus` is the number
    of GPUs of this machine.
    """
    longest = config.get("max_position_embeddings")
    length = min(MOST_ROW_TOKENS, longest) if isinstance(longest, int) else MOST_ROW_TOKENS
    return {
        "sft": {"max_num_epochs": 3},
        "policy": {
            "model_name": model,
            "precision": "bfloat16" if gpus else "float32",
            "max_total_sequence_length": length,
            # Divisible by the number of workers.
            "train_global_batch_size": -(-ROWS_IN_A_STEP // max(1, gpus)) * max(1, gpus),
            # A row for each conversation: little data makes enough steps. Micro-batches have the tokens of a full row.
            "sequence_packing": {"enabled": False},
            "dynamic_batching": {"enabled": True},
            "train_micro_batch_size": 1,
            "optimizer": {"kwargs": {"lr": 2e-5}},
            "scheduler": {"name": "cosine", "warmup_steps": 10, "min_lr_ratio": 0.1},
        },
        "data": {"train": [*data], "cache_dir": f"{folder}/cache"},
        "checkpointing": {"checkpoint_dir": f"{folder}/checkpoints"},
        "logger": {"log_dir": f"{folder}/logs"},
        "cluster": {"gpus_per_node": gpus},
    }


def write_starter(model: str, words: Sequence[str], gpus: int) -> tuple[Path, list[str]]:
    """Write the configuration of a model and data; return its path, and the overrides among `words`.

    Downloads the model if it is on the hub and not in the cache of this machine. ConfigError without data, for a model
    that cannot be had, and if the file exists with another content.
    """
    import yaml

    data = [word for word in words if not is_override(word)]
    if not data:
        raise ConfigError(
            f"no data is named. Give a file, folder or data set after the model: raylane sft {model} data.jsonl"
        )
    source = hub_model("MODEL", model) if model.startswith(HUB) else Path(model)
    try:
        config = json.loads((source / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source / 'config.json'} cannot be read: {error}. Download the model again") from error
    folder = Path("runs") / Path(model.removeprefix(HUB)).resolve().name
    path = folder / "run.yaml"
    head = "# Written by raylane from a model and data. Change it, and start it by raylane sft with its path.\n"
    text = head + yaml.safe_dump(starter_document(model, config, data, str(folder), gpus), sort_keys=False)
    if path.exists() and path.read_text("utf-8") != text:
        raise ConfigError(
            f"{path} exists, for other data or with your changes. Start it by `raylane sft {path}`, or move {folder} "
            "away"
        )
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return path, [word for word in words if is_override(word)]

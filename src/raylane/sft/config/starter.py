"""Configuration of a run that names a model and data only: `raylane sft MODEL DATA`.

It is written as a file, which people can read and change, and is read as every other one. The file is written when the
data could be read, and has the options of the command: started by its name, it is the same run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from raylane.errors import ConfigError
from raylane.sft.config.load import build_config
from raylane.sft.config.schema import SftRunConfig
from raylane.training.config.load import Dialect, complete_document
from raylane.training.config.overrides import apply_overrides
from raylane.training.run.places import HUB, hub_model

_OVERRIDE = re.compile(r"~|\+{0,2}[A-Za-z_][\w.]*=")
MOST_ROW_TOKENS = 2048
ROWS_IN_A_STEP = 8
_HEAD = "# Written by raylane from a model and data. Change it, and start it by raylane sft with its path.\n"
_MARK = "# Content when it was written: "
_IDENTITY = (("policy", "model_name"), ("data", "train"))
"""Keys that make a run another run."""


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


@dataclass(frozen=True)
class Starter:
    """Configuration of a model, data and options, and the file that it is written to."""

    path: Path
    document: Mapping[str, Any]
    """Content of the file, with the options of the command."""
    dialect: Dialect | None = None
    """Keys of another program that the options may have."""

    def config(self) -> SftRunConfig:
        """Return the configuration, checked as that of a file; ConfigError as `load_config`."""
        source = str(self.path)
        return build_config(complete_document(self.document, source, SftRunConfig, (), self.dialect), source)

    def text(self) -> str:
        """Return the text of the file."""
        content = yaml.safe_dump(dict(self.document), sort_keys=False)
        return f"{_HEAD}{_MARK}{_digest(content)}\n{content}"

    def check(self) -> None:
        """Raise ConfigError if the file has changes of a user, or belongs to a run with another model or other data."""
        if not self.path.exists():
            return
        reason = refusal(self.path.read_text("utf-8"), self.document, _has_run(self.path.parent))
        if reason is not None:
            raise ConfigError(
                f"{self.path} exists, {reason}. Start it by `raylane sft {self.path}`, or move {self.path.parent} away"
            )

    def write(self) -> None:
        """Write the file: to be called when the data could be read."""
        self.check()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(self.text(), "utf-8")


def starter(model: str, words: Sequence[str], gpus: int, dialect: Dialect | None = None) -> Starter:
    """Return the configuration of a model and data, with the overrides among `words`; writes nothing.

    Downloads the model if it is on the hub and not in the cache of this machine. ConfigError without data, for a model
    that cannot be had, and for an override that does not fit.
    """
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
    document = starter_document(model, config, data, str(folder), gpus)
    options = [word for word in words if is_override(word)]
    is_foreign = (lambda path: False) if dialect is None else dialect.has
    return Starter(folder / "run.yaml", apply_overrides(document, options, SftRunConfig, is_foreign), dialect)


def refusal(text: str, document: Mapping[str, Any], has_run: bool) -> str | None:
    """Return why a file with this text must not be replaced by one with `document`; None if it may be. Pure.

    A file that nobody changed may be replaced as long as no run has used it, and by one with other options always.
    """
    head, _, content = text.removeprefix(_HEAD).partition("\n")
    if head != _MARK + _digest(content):
        return "with your changes"
    before = yaml.safe_load(content)
    if has_run and any(before[section].get(key) != document[section].get(key) for section, key in _IDENTITY):
        return "and the run beside it is of another model or other data"
    return None


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _has_run(folder: Path) -> bool:
    return (folder / "checkpoints").exists() or (folder / "logs").exists()

"""Loading of a fine-tuning configuration: YAML file, NeMo-RL spellings and overrides become one checked `RunConfig`.

The sections and their defaults are in `schema.py`; this module exports them again, so that users import from one
place. Called by the command line and by programs that build a configuration themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from raylane.errors import ConfigError
from raylane.sft import layout, nemo_rl, overrides
from raylane.sft.schema import (
    CheckpointingConfig,
    ClusterConfig,
    CompiledGraphConfig,
    DataConfig,
    LoggerConfig,
    OptimizerConfig,
    PolicyConfig,
    RunConfig,
    SchedulerConfig,
    SftConfig,
    TokenizerConfig,
)

__all__ = [
    "CheckpointingConfig",
    "ClusterConfig",
    "CompiledGraphConfig",
    "DataConfig",
    "LoggerConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "RunConfig",
    "SchedulerConfig",
    "SftConfig",
    "TokenizerConfig",
    "build_config",
    "dump",
    "load_config",
]

_log = logging.getLogger(__name__)


def load_config(path: str | Path, override_words: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of a YAML file (and the files in its `defaults:`) with overrides applied, fully checked.

    `${a.b}` stands for the value of another key; NeMo-RL spellings are translated (`nemo_rl`).

    Raises ConfigError: file missing or not YAML, unknown key (the message names the nearest known one), value of the
    wrong type, or sizes that do not divide (`layout.check_layout`).
    """
    # Overrides come before interpolation, so that `${a.b}` sees the overridden value.
    document = overrides.apply_overrides(overrides.read_yaml(Path(path)), override_words, RunConfig)
    document, ignored = nemo_rl.translate(nemo_rl.interpolate(document, str(path)))
    if ignored:
        _log.info("%s: NeMo-RL keys without effect in raylane are ignored: %s", path, ", ".join(ignored))
    return build_config(document, source=str(path))


def build_config(document: Mapping[str, Any], source: str = "configuration") -> RunConfig:
    """Return the configuration of plain nested values, checked as in `load_config`; `source` names it in errors."""
    overrides.refuse_unknown(document, RunConfig, source=source)
    try:
        config = RunConfig.model_validate(dict(document))
    except ValidationError as error:
        raise ConfigError(overrides.explain(error, source)) from error
    layout.check_layout(config)
    return config


def dump(config: RunConfig) -> dict[str, Any]:
    """Return plain nested values (JSON types only, a copy); `build_config` makes an equal configuration of them."""
    return config.model_dump(mode="json")

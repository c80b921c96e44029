"""Loading of a fine-tuning configuration: YAML file, NeMo-RL spellings and overrides become one checked `RunConfig`.

The sections and their defaults are in `schema.py` and `schema_policy.py`; this module exports them again, so that users
import from one place. Called by the command line and by programs that build a configuration themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined, to_jsonable_python

from raylane.errors import ConfigError
from raylane.sft import layout, nemo_rl, overrides
from raylane.sft.nemo_keys import is_nemo_key
from raylane.sft.schema import CheckpointingConfig, ClusterConfig, DataConfig, LoggerConfig, RunConfig, SftConfig
from raylane.sft.schema_lora import LoraConfig
from raylane.sft.schema_optim import OptimizerConfig
from raylane.sft.schema_policy import CompiledGraphConfig, PolicyConfig, SchedulerConfig, TokenizerConfig

__all__ = [
    "CheckpointingConfig",
    "ClusterConfig",
    "CompiledGraphConfig",
    "DataConfig",
    "LoggerConfig",
    "LoraConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "RunConfig",
    "SchedulerConfig",
    "SftConfig",
    "TokenizerConfig",
    "build_config",
    "differences",
    "dump",
    "load_config",
]

_log = logging.getLogger(__name__)


def load_config(path: str | Path, override_words: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of a YAML file (and the files in its `defaults:`) with overrides applied, fully checked.

    `${a.b}` stands for the value of another key. NeMo-RL's keys are translated (`nemo_rl`); a file with such keys also
    gets NeMo-RL's behaviour where it sets nothing, which one log line lists.

    Raises ConfigError: file missing or not YAML, unknown key (the message names the nearest known one), value of the
    wrong type, or sizes that do not divide (`layout.check_layout`).
    """
    file = overrides.read_yaml(Path(path))
    # Overrides come before interpolation, so that `${a.b}` sees the overridden value.
    document = overrides.apply_overrides(file, override_words, RunConfig, is_nemo_key)
    made = nemo_rl.read_document(document, str(path), with_their_defaults=nemo_rl.is_from_nemo_rl(file))
    # Two lines at most: users paste files with dozens of such keys.
    if ignored := [note.key for note in made.notes if not note.is_set]:
        _log.info("%s: NeMo-RL keys ignored or replaced: %s", path, ", ".join(ignored))
    if kept := [f"{note.key} ({note.reason})" for note in made.notes if note.is_set]:
        _log.info("%s: set as in NeMo-RL: %s", path, ", ".join(kept))
    problems = [*(problem.text for problem in made.problems), *overrides.unknown(made.document, RunConfig).values()]
    # All problems at once, as in `layout.check_layout`.
    problems += [f"{key} is ???, a value that must be given" for key in overrides.missing(made.document)]
    if problems:
        raise ConfigError(f"{path}: " + "; ".join(problems), keys=problems)
    return build_config(made.document, source=str(path))


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


def differences(document: Mapping[str, Any], model: type[BaseModel] = RunConfig) -> dict[str, Any]:
    """Return the keys of a plain document whose values are not the defaults of the schema, or that have no default."""
    changed: dict[str, Any] = {}
    for key, value in document.items():
        field = model.model_fields.get(key)
        inner = field.annotation if field is not None else None
        if isinstance(inner, type) and issubclass(inner, BaseModel) and isinstance(value, Mapping):
            below = differences(value, inner)
            if below:
                changed[key] = below
            continue
        default: Any = PydanticUndefined  # equal to no value, so required keys are always listed
        if field is not None and not field.is_required():
            default = to_jsonable_python(field.get_default(call_default_factory=True, validated_data={}))
        if value != default and not (value is None and default == {}):
            changed[key] = value
    return changed

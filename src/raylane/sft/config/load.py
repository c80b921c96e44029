"""Loading of a fine-tuning configuration: YAML file and overrides become one checked `RunConfig`.

The sections and their defaults are in `schema` and `policy`. Called by the command line and by programs that build a
configuration themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined, to_jsonable_python

from raylane.errors import ConfigError
from raylane.sft.config import keys, layout, overrides
from raylane.sft.config.keys import Reason
from raylane.sft.config.overrides import interpolate
from raylane.sft.config.schema import RunConfig


@dataclass(frozen=True)
class Dialect:
    """Keys of another program that files and overrides may have besides raylane's own (`nemo.dialect.NEMO_RL`)."""

    has: Callable[[str], bool]
    """Returns True for a dotted key of that program which raylane's schema lacks, or has with another meaning."""
    reason: Reason
    """Returns the reason why raylane's schema lacks a key of that program, None for any other key."""
    read: Callable[[Mapping[str, Any], Mapping[str, Any], str], tuple[dict[str, Any], list[str]]]
    """Returns a document with raylane's keys, without `${...}`, and the requests that raylane cannot meet.

    Its arguments: the document with overrides applied, the document of the file, and the name of the file.
    """


def load_config(path: str | Path, override_words: Sequence[str] = (), dialect: Dialect | None = None) -> RunConfig:
    """Return the configuration of a YAML file (and the files in its `defaults:`) with overrides applied, fully checked.

    `${a.b}` stands for the value of another key. With a dialect, keys of that program are accepted and translated.

    Raises ConfigError: file missing or not YAML, unknown key (the message names the nearest known one), value of the
    wrong type, or sizes that do not divide (`layout.check_layout`).
    """
    source = str(path)
    file = overrides.read_yaml(Path(path))
    # Overrides come before interpolation, so that `${a.b}` sees the overridden value.
    if dialect is None:
        document = interpolate(overrides.apply_overrides(file, override_words, RunConfig), source)
        problems = list(keys.unknown(document, RunConfig).values())
    else:
        changed = overrides.apply_overrides(file, override_words, RunConfig, dialect.has)
        document, problems = dialect.read(changed, file, source)
        problems += keys.unknown(document, RunConfig, dialect.reason).values()
    # All problems at once, as in `layout.check_layout`.
    problems += [f"{key} is ???, a value that must be given" for key in keys.missing(document)]
    if problems:
        raise ConfigError(f"{source}: " + "; ".join(problems), keys=problems)
    return build_config(document, source=source)


def build_config(document: Mapping[str, Any], source: str = "configuration") -> RunConfig:
    """Return the configuration of plain nested values, checked as in `load_config`; `source` names it in errors."""
    keys.refuse_unknown(document, RunConfig, source=source)
    try:
        config = RunConfig.model_validate(dict(document))
    except ValidationError as error:
        raise ConfigError(keys.explain(error, source)) from error
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
        inner = keys.model_of(field.annotation) if field is not None else None
        if inner is not None and isinstance(value, Mapping):
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

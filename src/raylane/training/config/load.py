"""Loading of a configuration: YAML file and overrides become one checked tree of sections.

The class of the tree is a parameter: each kind of training has its own, and a check of its values
(`raylane.sft.config.load`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined, to_jsonable_python

from raylane.errors import ConfigError
from raylane.training.config import keys, overrides
from raylane.training.config.keys import Reason
from raylane.training.config.overrides import interpolate
from raylane.training.config.schema import TrainingConfig

Config = TypeVar("Config", bound=TrainingConfig)
"""Configuration of one kind of training."""


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


def read_document(
    path: str | Path, root: type[BaseModel], override_words: Sequence[str] = (), dialect: Dialect | None = None
) -> dict[str, Any]:
    """Return the plain document of a YAML file (and the files in its `defaults:`) with overrides applied.

    `${a.b}` stands for the value of another key. With a dialect, keys of that program are accepted and translated.

    Raises ConfigError: file missing or not YAML, and as `complete_document`.
    """
    return complete_document(overrides.read_yaml(Path(path)), str(path), root, override_words, dialect)


def complete_document(
    file: Mapping[str, Any],
    source: str,
    root: type[BaseModel],
    override_words: Sequence[str] = (),
    dialect: Dialect | None = None,
) -> dict[str, Any]:
    """Return the content of a file as `read_document` does; `source` names it in errors.

    Raises ConfigError: unknown key (the message names the nearest known one in `root`), or a value that must be given
    and is not.
    """
    # Overrides come before interpolation, so that `${a.b}` sees the overridden value.
    if dialect is None:
        document = interpolate(overrides.apply_overrides(file, override_words, root), source)
        problems = list(keys.unknown(document, root).values())
    else:
        changed = overrides.apply_overrides(file, override_words, root, dialect.has)
        document, problems = dialect.read(changed, file, source)
        problems += keys.unknown(document, root, dialect.reason).values()
    # All problems at once, as in the checks of `layout`.
    problems += [f"{key} is ???, a value that must be given" for key in keys.missing(document)]
    if problems:
        raise ConfigError(f"{source}: " + "; ".join(problems), keys=problems)
    return document


def make_config(document: Mapping[str, Any], root: type[Config], source: str = "configuration") -> Config:
    """Return the configuration of plain nested values, without a check that the sections fit together.

    Raises ConfigError for unknown keys and values of a wrong type; `source` names the configuration in it.
    """
    # Before pydantic, whose message for an unknown key has no suggestion.
    keys.refuse_unknown(document, root, source=source)
    try:
        return root.model_validate(dict(document))
    except ValidationError as error:
        raise ConfigError(keys.explain(error, source)) from error


def dump(config: TrainingConfig) -> dict[str, Any]:
    """Return plain nested values (JSON types only, a copy); `make_config` makes an equal configuration of them."""
    return config.model_dump(mode="json")


def dump_to_share(config: TrainingConfig) -> dict[str, Any]:
    """Return plain nested values as `dump` does, without the values of environment variables.

    These may hold passwords and keys of storage, and checkpoints and reports are passed on.
    """
    plain = dump(config)
    # The names stay: they show which settings of NCCL or gloo a run had.
    plain["cluster"]["env_vars"] = dict.fromkeys(plain["cluster"]["env_vars"], "(hidden)")
    return plain


def differences(document: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
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

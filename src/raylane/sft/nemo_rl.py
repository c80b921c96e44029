"""Translation of NeMo-RL configurations: keys with another spelling, and keys without effect in raylane.

`interpolate` resolves `${a.b}` in a plain document. `translate` replaces spellings and removes keys whose value
requests nothing. A key that requests a feature which raylane does not have stays in the document and is then refused as
an unknown key (`overrides.FROM_NEMO_RL` holds the reasons). Pure functions; called by `config.load_config`.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from raylane.errors import ConfigError

__all__ = ["interpolate", "translate"]

_INNERMOST = re.compile(r"(?<!\\)\$\{([^${}]*)\}")
_MAX_ROUNDS = 100


# ------------------------------------------------------------------------------------------------------ ${...}


def interpolate(document: Mapping[str, Any], source: str) -> dict[str, Any]:
    r"""Return a copy of a document with all `${...}` expressions replaced by their values.

    `${a.b}` is the value of that key; `${mul:2,3}` and `${div:6,3}` are a product and a quotient. A value that is one
    expression keeps its type; an expression within text becomes text; `\${` stands for a literal `${`.

    Raises ConfigError for a key that is not set, a circular reference, or another resolver. Environment variables are
    not available: their values would end up in saved configurations.
    """
    plain = copy.deepcopy(dict(document))
    return {key: _resolve(value, plain, source, (str(key),)) for key, value in plain.items()}


def _resolve(value: Any, root: Mapping[str, Any], source: str, path: tuple[str, ...]) -> Any:
    """Return a value with its expressions replaced; `path` names the key in errors."""
    if isinstance(value, Mapping):
        return {key: _resolve(item, root, source, (*path, str(key))) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolve(item, root, source, path) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    where = f"{source}: {'.'.join(path)}={value!r}"
    for _ in range(_MAX_ROUNDS):
        match = _INNERMOST.search(value)
        if match is None:
            return value.replace("\\${", "${")
        found = _evaluate(match[1].strip(), root, where)
        if isinstance(found, Mapping | list):
            if match.span() != (0, len(value)):
                raise ConfigError(
                    f"{where}: {match[0]} is a {type(found).__name__}, which cannot be part of a text; "
                    "make the expression the whole value"
                )
            if "${" in str(found):
                raise ConfigError(f"{where}: {match[0]} contains further expressions; write its values out")
            return copy.deepcopy(found)
        if match.span() == (0, len(value)) and not isinstance(found, str):
            return found  # keep the type: ${a.b} of a number is a number
        value = value[: match.start()] + str(found) + value[match.end() :]
    raise ConfigError(f"{where} refers to itself in a circle; write the value out in one of the keys")


def _evaluate(expression: str, root: Mapping[str, Any], where: str) -> Any:
    """Return the value of one expression, the text between `${` and `}`."""
    resolver, colon, rest = expression.partition(":")
    if not colon:
        return _at(expression, root, where)
    if resolver not in ("mul", "div"):
        raise ConfigError(
            f"{where}: there is no resolver {resolver!r}; use ${{a.b}}, ${{mul:2,3}}, ${{div:6,3}} or a plain value"
        )
    try:
        numbers = [float(part) if any(c in part for c in ".eE") else int(part) for part in rest.split(",")]
        if resolver == "mul":
            return math.prod(numbers)
        first, second = numbers
        quotient = first / second
    except (ValueError, ArithmeticError) as error:
        raise ConfigError(f"{where}: cannot compute ${{{expression}}}: {error}. Give two numbers") from error
    return int(quotient) if isinstance(first, int) and first % second == 0 else quotient


def _at(dotted: str, root: Mapping[str, Any], where: str) -> Any:
    here: Any = root
    for part in dotted.split("."):
        if not isinstance(here, Mapping) or part not in here:
            raise ConfigError(f"{where}: {dotted} is not set, so ${{{dotted}}} has no value; set it, or write a value")
        here = here[part]
    return here


# ------------------------------------------------------------------------- spellings, and keys without effect


def _is_off(value: Any) -> bool:
    """Return True for null, false, 0 and empty values."""
    return not value


def _is_one(value: Any) -> bool:
    return value is None or value == 1


def _is_anything(value: Any) -> bool:
    return True


def _is_disabled(value: Any) -> bool:
    """Return True for an empty section and for one with `enabled: false`, whatever its other keys are."""
    return not value or (isinstance(value, Mapping) and value.get("enabled") is False)


_WITHOUT_EFFECT: dict[str, Callable[[Any], bool]] = {
    "policy.dtensor_cfg.enabled": lambda value: value is True,
    "policy.dtensor_cfg._v2": _is_anything,
    "policy.dtensor_cfg.tensor_parallel_size": _is_one,
    "policy.dtensor_cfg.context_parallel_size": _is_one,
    "policy.dtensor_cfg.expert_parallel_size": _is_one,
    "policy.dtensor_cfg.sequence_parallel": _is_off,
    "policy.dtensor_cfg.custom_parallel_plan": _is_off,
    "policy.dtensor_cfg.env_vars": _is_off,
    "policy.dtensor_cfg.lora_cfg": _is_disabled,
    "policy.megatron_cfg": _is_disabled,
    "policy.dynamic_batching": _is_disabled,
    "policy.offload_optimizer_for_logprob": _is_off,
    "policy.tokenizer.chat_template_kwargs": _is_off,
    "data.num_workers": _is_anything,
    "data.add_generation_prompt": _is_off,
    "checkpointing.checkpoint_must_save_by": _is_off,
    "logger.mlflow_enabled": _is_off,
    "logger.swanlab_enabled": _is_off,
    "logger.monitor_gpus": _is_off,
    "logger.gpu_monitoring": _is_anything,
    "logger.num_val_samples_to_print": _is_off,
}
"""NeMo-RL key -> test that returns True if the value requests nothing beyond what raylane always does."""

_SPELLINGS: dict[str, dict[str, str]] = {
    "policy.optimizer.name": {"torch.optim.AdamW": "adamw", "AdamW": "adamw"},
    "policy.sequence_packing.algorithm": {"modified_first_fit_decreasing": "first_fit_decreasing"},
    "checkpointing.metric_name": {"val:val_loss": "val:loss", "val_loss": "val:loss", "train_loss": "train:loss"},
}
"""Key -> value in NeMo-RL -> value in raylane."""

_DATASETS = (None, "openai_format", "OpenAIFormatDataset")


def translate(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the document with raylane's keys and values, and the list of removed keys that have no effect."""
    plain = copy.deepcopy(dict(document))
    removed = _remove_keys(plain, _WITHOUT_EFFECT)
    for key, spellings in _SPELLINGS.items():
        section, name = _section(plain, key)
        if section is not None and isinstance(section.get(name), str):
            section[name] = spellings.get(section[name], section[name])
    removed += _remove_repeated_lengths(plain)
    _flatten_data_sections(plain)
    return plain, removed


def _section(document: dict[str, Any], key: str) -> tuple[dict[str, Any] | None, str]:
    *parents, name = key.split(".")
    here: Any = document
    for parent in parents:
        here = here.get(parent) if isinstance(here, dict) else None
    return (here if isinstance(here, dict) else None), name


def _remove_keys(document: dict[str, Any], keys: Mapping[str, Callable[[Any], bool]]) -> list[str]:
    """Delete the keys whose value passes the test stored with the key; return these keys."""
    removed = []
    for key, passes in keys.items():
        section, name = _section(document, key)
        if section is not None and name in section and passes(section[name]):
            del section[name]
            removed.append(key)
    return removed


def _remove_repeated_lengths(document: dict[str, Any]) -> list[str]:
    """Remove lengths that only repeat policy.max_total_sequence_length; return their keys."""
    policy = document.get("policy")
    length = policy.get("max_total_sequence_length", 1024) if isinstance(policy, dict) else None
    if not isinstance(length, int) or not isinstance(policy, dict):
        return []
    rows = policy.get("train_micro_batch_size", 1)
    repeats_length: dict[str, Callable[[Any], bool]] = {
        "data.max_input_seq_length": lambda value: value == length,
        "policy.sequence_packing.train_mb_tokens": lambda value: value == length * rows,
        "policy.sequence_packing.sequence_length_round": lambda value: (
            isinstance(value, int) and value > 0 and length % value == 0
        ),
    }
    return _remove_keys(document, repeats_length)


def _flatten_data_sections(document: dict[str, Any]) -> None:
    """Replace the sections data.train and data.validation of OpenAI-style files by file names and keys.

    A section with any other key is left unchanged and later refused because of its type.
    """
    data = document.get("data")
    if not isinstance(data, dict):
        return
    for name in ("train", "validation"):
        one = data.get(name)
        if not isinstance(one, dict) or not isinstance(one.get("data_path"), str):
            continue
        rest = {key: value for key, value in one.items() if key not in ("data_path", "chat_key", "dataset_name")}
        fraction = rest.pop("split_validation_size", 0) if name == "train" else 0
        if one.get("dataset_name") not in _DATASETS or any(rest.values()):
            continue
        data[name] = one["data_path"]
        if one.get("chat_key"):
            data.setdefault("messages_key", one["chat_key"])
        if fraction:
            data.setdefault("validation_fraction", fraction)

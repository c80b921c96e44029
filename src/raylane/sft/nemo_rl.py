"""Reading of pasted NeMo-RL configurations: keys that are spelled otherwise here, or have no effect here.

`interpolate` resolves `${a.b}` in a plain document; `understand` translates spellings and takes out keys whose value
asks for nothing. Whatever asks for something that raylane does not do stays in, and is refused as an unknown key
(`overrides.FROM_NEMO_RL` says why). Pure; called by `config.load_config`.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from raylane.errors import ConfigError

__all__ = ["interpolate", "understand"]

_INNERMOST = re.compile(r"(?<!\\)\$\{([^${}]*)\}")
_MAX_ROUNDS = 100


# ------------------------------------------------------------------------------------------------------ ${...}


def interpolate(document: Mapping[str, Any], source: str) -> dict[str, Any]:
    r"""Return a document in which `${a.b}` stands for the value of that key, and `${mul:2,3}` and `${div:6,3}` for 6
    and 2. A value that is one expression keeps its type; within text it becomes text; `\${` is a plain `${`.

    ConfigError names a key that is not set, a circle, and any other resolver. Environment variables are not read:
    they would end up in saved configurations.
    """
    plain = copy.deepcopy(dict(document))
    return {key: _resolved(value, plain, source, (str(key),)) for key, value in plain.items()}


def _resolved(value: Any, root: Mapping[str, Any], source: str, path: tuple[str, ...]) -> Any:
    if isinstance(value, Mapping):
        return {key: _resolved(item, root, source, (*path, str(key))) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolved(item, root, source, path) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    where = f"{source}: {'.'.join(path)}={value!r}"
    for _ in range(_MAX_ROUNDS):
        match = _INNERMOST.search(value)
        if match is None:
            return value.replace("\\${", "${")
        found = _evaluated(match[1].strip(), root, where)
        if isinstance(found, Mapping | list):
            if match.span() != (0, len(value)):
                raise ConfigError(f"{where}: {match[0]} is a {type(found).__name__}, which cannot stand within text")
            if "${" in str(found):
                raise ConfigError(f"{where}: {match[0]} holds expressions of its own; write its values out")
            return copy.deepcopy(found)
        if match.span() == (0, len(value)) and not isinstance(found, str):
            return found
        value = value[: match.start()] + str(found) + value[match.end() :]
    raise ConfigError(f"{where} goes round in a circle")


def _evaluated(expression: str, root: Mapping[str, Any], where: str) -> Any:
    resolver, colon, rest = expression.partition(":")
    if not colon:
        return _at(expression, root, where)
    if resolver not in ("mul", "div"):
        raise ConfigError(f"{where}: there is no resolver {resolver!r}; there is ${{a.b}}, ${{mul:2,3}}, ${{div:6,3}}")
    try:
        numbers = [float(part) if any(c in part for c in ".eE") else int(part) for part in rest.split(",")]
        if resolver == "mul":
            return math.prod(numbers)
        first, second = numbers
        quotient = first / second
    except (ValueError, ArithmeticError) as error:
        raise ConfigError(f"{where}: ${{{expression}}} cannot be worked out: {error}") from error
    return int(quotient) if isinstance(first, int) and first % second == 0 else quotient


def _at(dotted: str, root: Mapping[str, Any], where: str) -> Any:
    here: Any = root
    for part in dotted.split("."):
        if not isinstance(here, Mapping) or part not in here:
            raise ConfigError(f"{where}: {dotted} is not set, so ${{{dotted}}} has no value; set it, or write a value")
        here = here[part]
    return here


# ------------------------------------------------------------------------------------- spellings, and empty wishes


def _off(value: Any) -> bool:
    """True for null, false, 0 and empty values."""
    return not value


def _one(value: Any) -> bool:
    return value is None or value == 1


def _on(value: Any) -> bool:
    return value is True


def _any(value: Any) -> bool:
    return True


def _disabled(value: Any) -> bool:
    """True for a section that is switched off, whatever else stands in it."""
    return not value or (isinstance(value, Mapping) and value.get("enabled") is False)


_WITHOUT_EFFECT: dict[str, Callable[[Any], bool]] = {
    "policy.dtensor_cfg.enabled": _on,
    "policy.dtensor_cfg._v2": _any,
    "policy.dtensor_cfg.tensor_parallel_size": _one,
    "policy.dtensor_cfg.context_parallel_size": _one,
    "policy.dtensor_cfg.expert_parallel_size": _one,
    "policy.dtensor_cfg.sequence_parallel": _off,
    "policy.dtensor_cfg.custom_parallel_plan": _off,
    "policy.dtensor_cfg.env_vars": _off,
    "policy.dtensor_cfg.lora_cfg": _disabled,
    "policy.megatron_cfg": _disabled,
    "policy.dynamic_batching": _disabled,
    "policy.offload_optimizer_for_logprob": _off,
    "policy.tokenizer.chat_template_kwargs": _off,
    "data.num_workers": _any,
    "data.add_generation_prompt": _off,
    "checkpointing.checkpoint_must_save_by": _off,
    "logger.mlflow_enabled": _off,
    "logger.swanlab_enabled": _off,
    "logger.monitor_gpus": _off,
    "logger.gpu_monitoring": _any,
    "logger.num_val_samples_to_print": _off,
}
"""Key -> is its value one that asks for nothing which raylane does not do anyway?"""

_SPELLINGS: dict[str, dict[str, str]] = {
    "policy.optimizer.name": {"torch.optim.AdamW": "adamw", "AdamW": "adamw"},
    "policy.sequence_packing.algorithm": {"modified_first_fit_decreasing": "first_fit_decreasing"},
    "checkpointing.metric_name": {"val:val_loss": "val:loss", "val_loss": "val:loss", "train_loss": "train:loss"},
}
"""Key -> value of NeMo-RL -> value here."""

_DATASETS = (None, "openai_format", "OpenAIFormatDataset")


def understand(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the document in this project's words, and the keys that were left out because they have no effect."""
    plain = copy.deepcopy(dict(document))
    left_out = _take_out(plain, _WITHOUT_EFFECT)
    for key, spellings in _SPELLINGS.items():
        section, name = _section(plain, key)
        if section is not None and isinstance(section.get(name), str):
            section[name] = spellings.get(section[name], section[name])
    left_out += _lengths(plain)
    _data_sets(plain)
    return plain, left_out


def _section(document: dict[str, Any], key: str) -> tuple[dict[str, Any] | None, str]:
    *parents, name = key.split(".")
    here: Any = document
    for parent in parents:
        here = here.get(parent) if isinstance(here, dict) else None
    return (here if isinstance(here, dict) else None), name


def _take_out(document: dict[str, Any], keys: Mapping[str, Callable[[Any], bool]]) -> list[str]:
    """Delete the keys whose value passes the test beside them; returns those keys."""
    left_out = []
    for key, passes in keys.items():
        section, name = _section(document, key)
        if section is not None and name in section and passes(section[name]):
            del section[name]
            left_out.append(key)
    return left_out


def _lengths(document: dict[str, Any]) -> list[str]:
    """Take out lengths that say once more what policy.max_total_sequence_length says."""
    policy = document.get("policy")
    length = policy.get("max_total_sequence_length", 1024) if isinstance(policy, dict) else None
    if not isinstance(length, int) or not isinstance(policy, dict):
        return []
    rows = policy.get("train_micro_batch_size", 1)
    same: dict[str, Callable[[Any], bool]] = {
        "data.max_input_seq_length": lambda value: value == length,
        "policy.sequence_packing.train_mb_tokens": lambda value: value == length * rows,
        "policy.sequence_packing.sequence_length_round": lambda value: (
            isinstance(value, int) and value > 0 and length % value == 0
        ),
    }
    return _take_out(document, same)


def _data_sets(document: dict[str, Any]) -> None:
    """Turn data.train and data.validation, where they are sections of OpenAI-style files, into file names and keys.

    A section with any other key stays as it is and is refused as the wrong type of value.
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

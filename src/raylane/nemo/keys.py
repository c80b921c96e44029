"""Table of the NeMo-RL keys that raylane's schema does not have, with the treatment of each one.

Facts about NeMo-RL are from examples/configs/sft.yaml, nemo_rl/models/policy/__init__.py, nemo_rl/utils/checkpoint.py
and nemo_rl/data of NVIDIA-NeMo/RL, March 2025 to August 2026. Data and predicates only; `translate` applies the table,
and `dialect` takes its error messages from it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def _anything(value: Any) -> bool:
    return True


def _on(value: Any) -> bool:
    return value is True


def _one_or_null(value: Any) -> bool:
    return value is None or value == 1


def _float32(value: Any) -> bool:
    """Return True for no data type (NeMo-RL's files write None, which YAML reads as text) and for float32."""
    return not value or str(value).rpartition(".")[2] in ("None", "float32", "fp32")


def _disabled(value: Any) -> bool:
    """Return True for an empty section and for one with `enabled: false`, whatever its other keys are."""
    return not value or (isinstance(value, Mapping) and value.get("enabled") is False)


def _force_hf_only(value: Any) -> bool:
    return not value or (isinstance(value, Mapping) and set(value) <= {"force_hf"})


@dataclass(frozen=True)
class Rule:
    """Treatment of one NeMo-RL key: left out if its value is harmless, otherwise refused."""

    key: str
    harmless: Callable[[Any], bool]
    """Returns True if the value requests nothing beyond what raylane does anyway."""
    harmless_text: str
    """Harmless values, for the documentation."""
    why_left_out: str
    why_refused: str = ""
    """Reason for refusing any other value, and the remedy; empty if every value is harmless."""
    changes_training: bool = False
    """True if a run without the refused value would train another model."""


_HARMLESS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "off": (operator.not_, "off or empty"),
    "true": (_on, "`true`"),
    "1": (_one_or_null, "`1`"),
    "any": (_anything, "any"),
    "float32": (_float32, "empty or float32"),
    "disabled": (_disabled, "empty or `enabled: false`"),
    "force_hf": (_force_hf_only, "empty or only `force_hf`"),
}
"""Word for harmless values in rules.txt -> its predicate, and its text in the documentation."""


_ROWS = [
    [*line.split(" | "), "", ""]
    for line in Path(__file__).with_name("rules.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]
_RULES = tuple(
    Rule(key, *_HARMLESS[word], left_out, refused, changes_training=model == "model")
    for key, word, left_out, refused, model, *_ in _ROWS
    if word in _HARMLESS
)


def _rules_of(prefix: str) -> dict[str, Rule]:
    return {rule.key.removeprefix(prefix): rule for rule in _RULES if rule.key.startswith(prefix)}


OPTIMIZER_RULES = _rules_of("optimizer:")
"""Keys of policy.megatron_cfg.optimizer, which `schedule` translates -> treatment of the ones without an equal."""
DATA_SET_RULES = _rules_of("data_set:")
"""Keys of one data set, without the ones that `translate` reads -> treatment."""
RULES = tuple(rule for rule in _RULES if ":" not in rule.key)
"""Keys that are left out or refused. A rule for a section covers all keys below it."""
RENAMES = {key: name for key, word, name, *_ in _ROWS if word == "same"}
"""NeMo-RL key -> raylane key with the same values."""
OTHERWISE = {key: reason for key, word, reason, *_ in _ROWS if word == "joint"}
"""Keys that `translate` reads together with other keys -> reason for refusing what it could not translate."""

_SECTIONS = ("data.train.", "data.validation.", "policy.megatron_cfg.")
"""Beginnings of keys in sections that NeMo-RL has, and raylane has as single values or with other keys."""


def is_nemo_key(path: str) -> bool:
    """Return True if NeMo-RL has this dotted key and raylane may have it under another name or not at all."""
    known = (*(rule.key for rule in RULES), *RENAMES, *OTHERWISE)
    return path.startswith(_SECTIONS) or any(path == key or path.startswith(f"{key}.") for key in known)


def refusal(path: str) -> str | None:
    """Return the reason why raylane's schema has no key `path`, None if NeMo-RL has no such key either."""
    # A rule that never refuses still needs words: `build_config` takes only raylane's own keys.
    reasons = {rule.key: rule.why_refused or f"{rule.why_left_out}; remove it" for rule in RULES}
    reasons |= OTHERWISE | {old: f"use {new}" for old, new in RENAMES.items()}
    while path:  # a key below a section has the section's reason
        if path in reasons:
            return reasons[path]
        path = path.rpartition(".")[0]
    return None

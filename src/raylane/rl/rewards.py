"""Reward functions: plain Python functions of an answer and the line of data with its prompt."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raylane.errors import ConfigError, DataError

RewardFunction = Callable[[str, Mapping[str, Any]], float]
"""Function of the text of an answer and the line of the data file; returns a finite number."""


@dataclass(frozen=True)
class Reward:
    """A reward function with its name and weight."""

    name: str
    """module:function"""
    weight: float
    function: RewardFunction


def load_reward(name: str, weight: float = 1.0) -> Reward:
    """Return the reward function `module:function`. ConfigError if there is none."""
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise ConfigError(f"a reward must be named as module:function, got {name!r}", key="grpo.rewards")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the reward {name} cannot be loaded: {error}. Modules are searched for on PYTHONPATH and in the working "
            "directory",
            key="grpo.rewards",
        ) from error
    if not callable(function):
        raise ConfigError(f"the reward {name} is a {type(function).__name__}; name a function", key="grpo.rewards")
    return Reward(name, weight, function)


def load_rewards(names: Sequence[tuple[str, float]], folder: str) -> list[Reward]:
    """Return reward functions by name and weight; their modules may lie in `folder`, where the driver runs."""
    if folder not in sys.path:  # neither the `raylane` command nor an actor searches it by itself
        sys.path.append(folder)
    return [load_reward(name, weight) for name, weight in names]


def score(rewards: Sequence[Reward], answer: str, row: Mapping[str, Any]) -> tuple[float, list[float]]:
    """Return the weighted sum of all rewards of an answer, and each of them. DataError if one of them fails."""
    values = []
    for reward in rewards:
        try:
            value = float(reward.function(answer, row))
        except Exception as error:
            raise DataError(
                f"the reward {reward.name} failed for the answer {answer!r:.200} to the line {dict(row)!r:.200}: "
                f"{type(error).__name__}: {error}"
            ) from error
        # A NaN would make the advantages of the whole group NaN, and then the weights.
        if not math.isfinite(value):
            raise DataError(
                f"the reward {reward.name} returned {value} for the answer {answer!r:.200}; it must be a finite number"
            )
        values.append(value)
    return sum(reward.weight * value for reward, value in zip(rewards, values, strict=True)), values

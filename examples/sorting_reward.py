"""Reward of `grpo_sort.yaml`: 1 for the right answer, else 0."""

from collections.abc import Mapping
from typing import Any


def exact(answer: str, row: Mapping[str, Any]) -> float:
    return float(answer == row["answer"])

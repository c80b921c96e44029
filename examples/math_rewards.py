"""Rewards of `grpo_qwen.yaml`: a number that is right, in the form that was asked for."""

import re
from collections.abc import Mapping
from typing import Any

BOXED = re.compile(r"\\boxed\{(-?[\d.,]+)\}")


def correct(answer: str, row: Mapping[str, Any]) -> float:
    """1 if the last number in a box is that of the line."""
    boxes = BOXED.findall(answer)
    return float(bool(boxes) and boxes[-1].replace(",", "") == str(row["answer"]))


def boxed(answer: str, row: Mapping[str, Any]) -> float:
    """1 if there is exactly one box."""
    return float(len(BOXED.findall(answer)) == 1)

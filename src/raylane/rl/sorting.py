"""Example task of `make grpo`: sort the digits of a number. Writes its data; the reward is in `examples`."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from raylane.training.storage import write_jsonl

DIGITS = 5
HELD_OUT_OF = 10
"""One number in so many is held out."""


def is_held_out(number: str) -> bool:
    """Return True for numbers that are never trained on: the same ones on every machine."""
    return int(number) * 7919 % 1_000_003 % HELD_OUT_OF == 0


def write_sets(folder: str | Path, count: int = 20_000, held_out: int = 500, seed: int = 0) -> dict[str, int]:
    """Write warm_start.jsonl (conversations), train.jsonl and validation.jsonl (prompts); return the lines in each.

    DataError if the files cannot be written.
    """
    chance = random.Random(seed)
    numbers = [f"{number:0{DIGITS}d}" for number in range(10**DIGITS)]
    # Each number is in one set at most, so nothing that is rewarded was shown in the warm start.
    chance.shuffle(numbers)
    trained = [number for number in numbers if not is_held_out(number)]
    tested = [number for number in numbers if is_held_out(number)][:held_out]
    sets: dict[str, Iterable[dict[str, Any]]] = {
        "warm_start": [
            {"messages": [{"role": "user", "content": number}, {"role": "assistant", "content": _sorted(number)}]}
            for number in trained[:count]
        ],
        "train": [{"prompt": number, "answer": _sorted(number)} for number in trained[count : 2 * count]],
        "validation": [{"prompt": number, "answer": _sorted(number)} for number in tested],
    }
    return write_jsonl(Path(folder), {name: map(json.dumps, rows) for name, rows in sets.items()})


def _sorted(number: str) -> str:
    return "".join(sorted(number))

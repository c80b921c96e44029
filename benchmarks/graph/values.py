"""Values of the cases `values-*` of the benchmark `graph`: what users pass, from 1 KB to 10 MB."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SIZES = {"1KB": 1_000, "10KB": 10_000, "100KB": 100_000, "1MB": 1_000_000, "10MB": 10_000_000}


@dataclass
class Sample:
    """A dataclass of an importable module."""

    name: str
    tokens: list[int]
    weight: float


def script_class() -> type:
    """Return a class as a script has it: in `__main__`, where no other process can import it."""

    class Item:
        def __init__(self) -> None:
            self.name, self.tokens = "item", [1, 2, 3]

        def __eq__(self, other: object) -> bool:
            return vars(self) == vars(other)

        def total(self) -> int:
            """Return the sum of the tokens."""
            return sum(self.tokens)

    Item.__module__, Item.__qualname__ = "__main__", "Item"
    sys.modules["__main__"].Item = Item  # type: ignore[attr-defined]
    return Item


def _array(nbytes: int) -> Any:
    import numpy as np

    return np.arange(nbytes // 4, dtype=np.float32)


def _tensor(nbytes: int) -> Any:
    import torch

    return torch.arange(nbytes // 4, dtype=torch.float32)


_KINDS: dict[str, Callable[[int], Any]] = {
    "array": _array,
    "tensor": _tensor,
    "bytes": lambda nbytes: b"x" * nbytes,
    "text": lambda nbytes: "x" * nbytes,
}
_OTHERS: dict[str, Callable[[], Any]] = {
    "arrays-100": lambda: [_array(1_000) for _ in range(100)],
    "dataclass": lambda: Sample("sample", [1, 2, 3], 0.5),
    "script-class": lambda: script_class()(),
}
NAMES = (
    *(f"{kind}-{size}" for kind in _KINDS for size in SIZES if size != "10MB" or kind in ("array", "tensor")),
    *_OTHERS,
)


def make(name: str) -> Any:
    """Return a new value by its name."""
    kind, _, size = name.rpartition("-")
    return _KINDS[kind](SIZES[size]) if kind in _KINDS else _OTHERS[name]()


def equal(one: Any, other: Any) -> bool:
    """Return True if two values are of one type and equal."""
    if type(one) is not type(other):  # a class of a script is another object in each process, by the same name
        return bool(type(one).__qualname__ == type(other).__qualname__ and vars(one) == vars(other))
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if hasattr(one, "dtype"):
        return bool(one.dtype == other.dtype and one.shape == other.shape and (one == other).all())
    return bool(one == other)

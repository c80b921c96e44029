"""Actor that receives arrays, for tests of memory that is handed over. Imported by the actors too."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import raylane


class Keeper:
    """Actor that says what it receives, and keeps it."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def describe(self, value: Any) -> Any:
        return [(float(one.sum()), writable(one), in_memfd(one)) for one in value]

    def keep(self, value: Any) -> None:
        self.kept.append(value)

    def sums(self) -> list[float]:
        return [float(one.sum()) for one in self.kept]

    def drop(self) -> None:
        self.kept.clear()

    def make(self, count: int) -> Any:
        array = raylane.empty(count, np.float32)
        array[:] = 3
        return array

    def maps(self) -> int:
        with open("/proc/self/maps") as lines:
            return sum("memfd:raylane" in line for line in lines)


def writable(one: Any) -> bool:
    return True if isinstance(one, torch.Tensor) else bool(one.flags.writeable)


def in_memfd(one: Any) -> bool:
    """Return True if an array lies in a segment of raylane."""
    address = one.data_ptr() if isinstance(one, torch.Tensor) else one.ctypes.data
    with open("/proc/self/maps") as lines:
        for line in lines:
            start, _, end = line.split()[0].partition("-")
            if int(start, 16) <= address < int(end, 16):
                return "memfd:raylane" in line
    raise AssertionError("an address outside of every mapping")

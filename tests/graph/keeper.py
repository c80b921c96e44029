"""Actor that receives arrays, for tests of memory that is handed over. Imported by the actors too."""

from __future__ import annotations

import os
import time
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

    def fill(self, request: tuple[str, float]) -> Any:
        """Return output memory that is used again when no receiver holds it, filled with a number."""
        kind, number = request
        buffer = self.__dict__.get(kind)
        if buffer is None:
            buffer = raylane.empty(50_000, np.float32 if kind == "array" else torch.float32)
        elif not raylane.is_free(buffer):
            buffer = raylane.empty_like(buffer)
        setattr(self, kind, buffer)
        buffer[:] = number
        return buffer

    def add_one(self, value: Any) -> tuple[float, float]:
        """Add 1 to tensors in place, keep them, and return the smallest and the largest number."""
        items = value if isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, torch.Tensor) and item is not self.__dict__.get("last"):
                item += 1
        self.kept.append(items)
        tensors = [item for item in items if isinstance(item, torch.Tensor)]
        return min(float(one.min()) for one in tensors), max(float(one.max()) for one in tensors)

    def pid(self) -> int:
        return os.getpid()

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


class Sender:
    """Sender of an array that it keeps."""

    def __init__(self) -> None:
        self.array = raylane.empty(50_000, np.float32)

    def send(self, _: Any) -> Any:
        return self.array

    def is_free(self) -> bool:
        return raylane.is_free(self.array)


class BusyReceiver:
    """Receiver that takes one message, and then no other."""

    def pid(self) -> int:
        return os.getpid()

    def wait(self, *_: Any) -> None:
        time.sleep(600)

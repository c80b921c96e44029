"""Bare wake-ups as functions: compiles `wake_ups.c` where it is used. Imports neither Ray nor torch.

Called by the contender `WakeUps` and its actors.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from raylane.core.signals.semaphore import SEMAPHORE_BYTES

SOURCE = Path(__file__).with_suffix(".c")


def build(folder: str) -> str:
    """Compile `wake_ups.c` into a folder and return the library's path. SystemExit without a C compiler."""
    library = f"{folder}/wake_ups.so"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    command = [*compiler, "-O2", "-fPIC", "-shared", "-pthread", "-o", library, str(SOURCE)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        cause = getattr(error, "stderr", None) or error
        raise SystemExit(
            f"benchmarks: {SOURCE.name} could not be compiled: {cause}. Install a C compiler (Debian and Ubuntu: apt "
            "install gcc), or choose cases without the contender `wake-ups`"
        ) from None
    return library


def next_of(number: int, actors: int, *, chain: bool) -> int:
    """Return the semaphore that actor `number` posts: that of the next actor of a chain, else 0, the driver's."""
    return number + 1 if chain and number < actors else 0


class WakeUps:
    """Semaphores of a shared segment, by number, and the compiled functions."""

    def __init__(self, library: str, address: int) -> None:
        self._library = ctypes.CDLL(library)  # releases the GIL during a call
        self._address = address

    def _at(self, number: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._address + number * SEMAPHORE_BYTES)

    def pass_on(self, own: int, following: int) -> None:
        """Post semaphore `following` for each post of `own`. Returns only after a signal."""
        self._library.pass_on(self._at(own), self._at(following))

    def prepare(self, numbers: Sequence[int], timeout_s: float) -> None:
        """Let `call` post these semaphores, and wait for as many posts of semaphore 0, at most `timeout_s`."""
        others = (ctypes.c_void_p * len(numbers))(*(self._at(number).value for number in numbers))
        self._arguments = self._at(0), others, len(numbers), int(timeout_s)

    def call(self) -> bool:
        """Return True when all posts have come, False after the timeout."""
        return not self._library.call(*self._arguments)

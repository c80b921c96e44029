"""The classes that run for every message: those of the native module where it was built, else those of `portable`.

`RAYLANE_PURE=1` chooses `portable`, for tests and comparisons. Processes of either kind work together.
"""

from __future__ import annotations

import contextlib
import importlib

from raylane.core import settings

# The twin in Python first: it stays where there is no native module, and type checkers read its annotations.
from raylane.core.portable import (
    Doorbell,
    Recorder,
    SlotReader,
    SlotWriter,
    SmallPickler,
    copy,
    copy_many,
    run_delay_ns,
)

__all__ = [
    "NATIVE",
    "Doorbell",
    "Recorder",
    "SlotReader",
    "SlotWriter",
    "SmallPickler",
    "copy",
    "copy_many",
    "run_delay_ns",
]

NAMES = ("Doorbell", "Recorder", "SlotReader", "SlotWriter", "SmallPickler", "copy", "copy_many", "run_delay_ns")
"""Names that both implementations have."""
NATIVE = False
"""True if the native module is in use."""

if not settings.PURE.read():
    with contextlib.suppress(ImportError):  # there was no C compiler when raylane was installed
        _native = importlib.import_module("raylane.core._native")
        globals().update({name: getattr(_native, name) for name in NAMES})
        NATIVE = True

"""The classes that run for every message: those of the native module where it was built, else those of `portable`.

`RAYLANE_PURE=1` chooses `portable`, for tests and comparisons. Processes of either kind work together.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

__all__ = [
    "NATIVE",
    "PURE_VARIABLE",
    "Doorbell",
    "Recorder",
    "SlotReader",
    "SlotWriter",
    "SmallPickler",
    "copy",
    "run_delay_ns",
]

PURE_VARIABLE = "RAYLANE_PURE"

# Type checkers read the twin in Python, which has the annotations.
if TYPE_CHECKING or os.environ.get(PURE_VARIABLE, "0") not in ("", "0"):
    from raylane.core.portable import (
        Doorbell,
        Recorder,
        SlotReader,
        SlotWriter,
        SmallPickler,
        copy,
        run_delay_ns,
    )

    NATIVE = False
    """True if the native module is in use."""
else:
    try:
        from raylane.core._native import (
            Doorbell,
            Recorder,
            SlotReader,
            SlotWriter,
            SmallPickler,
            copy,
            run_delay_ns,
        )

        NATIVE = True
    except ImportError:  # no C compiler when raylane was installed
        from raylane.core.portable import (
            Doorbell,
            Recorder,
            SlotReader,
            SlotWriter,
            SmallPickler,
            copy,
            run_delay_ns,
        )

        NATIVE = False

"""Record of the functions of raylane that a call runs, in their order, in one process."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import raylane

ROOT = str(Path(raylane.__file__).parent)
_calls: list[tuple[str, str]] = []
_active = False


def _note(frame: FrameType, event: str, arg: Any) -> None:
    code = frame.f_code
    if _active and event == "call" and code.co_filename.startswith(ROOT):
        _calls.append((code.co_filename[len(ROOT) + 1 :], code.co_qualname))


def start(_: Any = None) -> None:
    """Record the calls of this thread and of all threads that start from now on."""
    global _active
    _calls.clear()
    _active = True
    threading.setprofile(_note)
    sys.setprofile(_note)


def clear(_: Any = None) -> None:
    """Forget what was recorded so far."""
    _calls.clear()


def stop(_: Any = None) -> list[tuple[str, str]]:
    """Return the file and the qualified name of each function that was called, in order."""
    global _active
    _active = False
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]
    return list(_calls)

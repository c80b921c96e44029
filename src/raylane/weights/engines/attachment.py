"""Parts that attachments of all engines share."""

from __future__ import annotations

from dataclasses import dataclass

PAUSES = ("wait", "keep", "abort")


@dataclass(frozen=True)
class EngineUpdate:
    """Result of an update of an engine."""

    version: int
    step: int
    changed: bool
    """False if the engine had this version already."""
    nbytes: int
    """Bytes of the version that were brought to the engine, all workers together."""
    pause_s: float
    """Seconds in which the engine computed nothing because of the update; with `wait`, after the last request."""
    seconds: float


def check_pause(pause: str) -> None:
    """Raise ValueError for an unknown pause."""
    if pause not in PAUSES:
        raise ValueError(f"pause must be one of {', '.join(PAUSES)}, got {pause!r}")

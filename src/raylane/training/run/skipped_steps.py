"""Count of the steps that a run has left out because loss or gradients were not finite. Called by the trainers."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from raylane.errors import StepNotFiniteError

_log = logging.getLogger(__name__)


class SkippedSteps:
    """Count of the steps that a run has skipped."""

    def __init__(self, limit: int, key: str) -> None:
        """Allow `limit` successive steps; `key` is the key of the configuration that has this number."""
        self._limit, self._key = limit, key
        self._streak = 0
        """Number of steps skipped since the last one that changed the weights."""
        self.total = 0
        """Number of steps skipped by this process."""

    def add(self, step: int, metrics: Mapping[str, float]) -> str:
        """Count step `step` (from 1) and return a sentence about it; StepNotFiniteError beyond the limit."""
        self._streak += 1
        self.total += 1
        figures = f"loss {metrics['loss']}, gradient norm {metrics['grad_norm']}"
        if self._streak > self._limit:
            raise StepNotFiniteError(
                f"step {step} failed: {figures}, after {self._limit} skipped steps in a row "
                f"({self._key}={self._limit}). The weights are those before these steps. Lower "
                "policy.optimizer.kwargs.lr and resume from an earlier checkpoint, or check the data",
                step=step,
                loss=metrics["loss"],
                grad_norm=metrics["grad_norm"],
            )
        text = f"step {step} is skipped: {figures} ({self._streak} in a row, {self.total} in all)"
        _log.warning("%s", text)
        return text

    def end_streak(self) -> None:
        """Note a step that changed the weights."""
        self._streak = 0

"""Steps whose loss or gradients are not finite: what the user is told about them, and how many may be skipped.

The workers decide about a step, all alike (`worker`); this module is used by `trainer`, in the driver.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping

from raylane.errors import DataError, StepNotFiniteError
from raylane.sft.config.schema import RunConfig
from raylane.sft.data.prepare import conversations_at
from raylane.sft.data.rows import RowSource

_log = logging.getLogger(__name__)
_NAMED_LINES = 8
"""Number of lines of data files that an error names."""


class SkippedSteps:
    """Count of the steps that a run has skipped."""

    def __init__(self, limit: int) -> None:
        """Allow `limit` successive steps."""
        self._limit = limit
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
                f"(sft.max_skipped_steps={self._limit}). The weights are those before these steps. Lower "
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


def with_rows(error: StepNotFiniteError, config: RunConfig, rows: RowSource) -> StepNotFiniteError:
    """Return the error of a step with the lines of the data files that are in its rows."""
    number = int(error.fields["step"]) - 1
    chosen = rows.step_rows(config.policy.train_global_batch_size, config.sft.seed, number, config.data.shuffle)
    documents = itertools.chain.from_iterable(rows.packs[row] for row in chosen)
    numbers = sorted({int(rows.cache.origin[document]) for document in documents})
    try:
        places = conversations_at(config, numbers[:_NAMED_LINES])
    except DataError:  # the files have changed or are gone
        places = [f"conversation {number}" for number in numbers[:_NAMED_LINES]]
    more = f" and {len(numbers) - len(places)} more" if len(numbers) > len(places) else ""
    text = f"{error}. The step has the data of {', '.join(places)}{more}"
    return StepNotFiniteError(text, **error.fields, data=places)

"""Begin of a run, or of its further part after a loss: folders, locked and cleaned, and the checkpoint to resume from.

Called by the trainers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from raylane.training import storage
from raylane.training.checkpoint import folders, publishing
from raylane.training.checkpoint.folders import Saved
from raylane.training.config.schema import TrainingConfig
from raylane.training.report.metrics import MetricsLog
from raylane.training.run.places import lock_folders

_log = logging.getLogger(__name__)


@contextmanager
def open_folders(config: TrainingConfig) -> Iterator[tuple[MetricsLog, Saved | None]]:
    """Lock the folders of a run for a `with` block; yield its log, and the checkpoint to resume from (None: a new run).

    ConfigError if another run uses the same folders.
    """
    settings = config.checkpointing
    to_lock = {"logger.log_dir": config.logger.log_dir}
    # Storage behind a URL has no locks.
    if settings.enabled and not storage.is_url(settings.checkpoint_dir):
        to_lock["checkpointing.checkpoint_dir"] = str(storage.at(settings.checkpoint_dir))
    # The folders are locked before the search for a checkpoint: another run must not replace it in between.
    with lock_folders(to_lock), MetricsLog(config.logger, config.logger.log_dir) as log:
        resumed = None
        if settings.enabled:
            for path in publishing.recover(storage.at(settings.checkpoint_dir)):
                _log.warning("recovered %s: a run ended while it replaced this checkpoint", path)
            resumed = folders.find(settings)
            folders.refuse_later(settings, resumed.step if resumed else 0)
        yield log, resumed


def finished_text(
    config: TrainingConfig, resumed: Saved | None, total: int, limits: str, *, publishes: bool = False
) -> str | None:
    """Return a sentence for the user if the run has nothing left to do, None if it has. Reads the checkpoint folder.

    `total` is the number of steps that are configured, by the keys in `limits`. A run that `publishes` its weights for
    readers outside of it has always something to do.
    """
    settings = config.checkpointing
    if resumed is None or resumed.step < total or publishes:
        return None
    if settings.save_hf and publishing.exported(resumed.path) is None:
        return None
    steps = f"all {total} steps" if resumed.step == total else f"{resumed.step} steps, and {total} are configured"
    return (
        f"this run is finished: {resumed.path} has {steps}, so nothing is trained. To train on, raise {limits}; for a "
        "new run, set another checkpointing.checkpoint_dir and logger.log_dir"
    )


def snapshot_text(
    reason: str, new: tuple[int, ...], step: int, before: int, config: TrainingConfig, seconds: float | None = None
) -> str:
    """Return a sentence about ranks that were started again, and what is computed once more.

    `before` is the number of recorded steps; `seconds` those of the steps since `step`, if they are known.
    """
    ranks = f"of rank {new[0]}" if len(new) == 1 else f"of ranks {', '.join(map(str, new)) or 'none'}"
    rows = (before - step) * config.policy.train_global_batch_size
    took = "" if seconds is None else f", {seconds:.1f} s"
    return (
        f"{reason} The process {ranks} was started again, and the run goes on from step {step} in memory: "
        f"{before - step} recorded steps ({rows} rows{took}) are computed again"
    )


def restart_text(reason: str, saved: Saved | None, number: int, limit: int) -> str:
    """Return a sentence about restart `number` of `limit` of all workers, from a checkpoint or from the first step."""
    source = f"from {saved.path}" if saved is not None else "from the first step, as no checkpoint was saved"
    return f"{reason} Starting the workers again {source} ({number} of {limit})"

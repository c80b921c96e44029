"""Restarts of a run after the loss of workers: how many, and from which snapshots. Pure. Called by the trainers.

A run may start again `limit` times without progress. A checkpoint that is saved is progress, and so is a snapshot that
is loaded and is newer than the step to which the restart before went back.
"""

from __future__ import annotations

from raylane.training.run.snapshots import Snapshot


class Restarts:
    """Restarts of one run."""

    def __init__(self, limit: int) -> None:
        """Permit so many without progress; 0 permits none."""
        self._limit = limit
        self.number = 0
        """Restarts since the run has made progress."""
        self.loads_snapshots = True
        """False after a snapshot that could not be loaded: the run goes back to checkpoints from then on."""
        self._went_back_to = 0
        """Number of steps to which the last restart went back."""

    def begin(self, snapshot: Snapshot | None, *, is_stopping: bool) -> bool:
        """Count a restart, for which there is this snapshot. Return False if none is permitted."""
        is_further = snapshot is not None and snapshot.step > self._went_back_to
        if self._limit == 0 or is_stopping or (self.number >= self._limit and not is_further):
            return False
        self.number += 1
        return True

    def note_loaded(self, step: int) -> None:
        """Note that the snapshot of this step was loaded."""
        if step > self._went_back_to:
            self.number = 1

    @property
    def is_over_limit(self) -> bool:
        """True if only a newer snapshot would have permitted the present restart."""
        return self.number > self._limit

    def end(self, step: int) -> None:
        """Note that the run goes on from this step."""
        self._went_back_to = step

    def note_saved(self) -> None:
        """Note that a checkpoint was saved."""
        self.number = 0

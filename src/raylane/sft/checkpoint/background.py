"""Saving of a worker's state while training continues (`checkpointing.is_async`).

`start` copies weights and optimizer to CPU memory; a thread then writes the copy. The ranks agree on the files through
a process group of their own: collectives of a save must not meet those of the training steps, which another thread
calls at the same time. Called by `worker`, on all ranks; the driver makes the checkpoint complete (`policy`).
"""

from __future__ import annotations

import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from raylane.sft.checkpoint import state
from raylane.sft.data.storage import Place
from raylane.sft.model.supervised import RunModel

_TIMEOUT = timedelta(days=1)
"""Longest time that a rank waits for the files of another one; slow storage may take hours for a large model."""


class BackgroundSave:
    """Writer of one state at a time in a thread. Constructing it is collective."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        self._stager = BlockingAsyncStager()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        """Reason why the state could not be written; read after the thread has ended."""

    def start(self, folder: Place, model: RunModel, optimizer: torch.optim.Optimizer | None, step: int) -> None:
        """Copy the state and begin to write it; return as soon as the model may change. Collective."""
        assert self._thread is None, "finish comes first"
        # A copy also of what is on the CPU already: the next step changes weights in place.
        copied = self._stager.stage(state.collect(model, optimizer, step))
        self._error = None
        self._thread = threading.Thread(
            target=self._write, args=(folder, copied, optimizer is not None), name="raylane-save", daemon=True
        )
        self._thread.start()

    def _write(self, folder: Place, copied: dict[str, object], has_optimizer: bool) -> None:
        try:
            state.write(folder, copied, has_optimizer=has_optimizer, group=self._group)
        except BaseException as error:  # torch's error of a failed save is no Exception; `finish` raises it
            self._error = error

    @property
    def ended(self) -> bool:
        """True if a save was started and all ranks have written their files, or failed to."""
        return self._thread is not None and not self._thread.is_alive()

    def finish(self) -> None:
        """Wait until the state is written by all ranks. Raises CheckpointError, the same on all ranks, if it is not."""
        assert self._thread is not None, "start comes first"
        self._thread.join()
        self._thread = None
        if self._error is not None:
            raise self._error

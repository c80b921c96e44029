"""Training state that workers write to and read from a checkpoint, as torch DCP.

All functions are collective: every worker calls them with the same arguments and writes or reads its own shards. Called
by `worker`; `folders` handles folder names, completeness and retention.

`BackgroundSave` writes a copy of the state while training continues (`checkpointing.is_async`). The ranks then agree on
the files through a process group of their own: collectives of a save must not meet those of the training steps, which
another thread calls at the same time. The driver makes the checkpoint complete (`policy`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from raylane.errors import CheckpointDamagedError, CheckpointError
from raylane.training.checkpoint import state
from raylane.training.checkpoint.dcp import CodeFreeReader, FitPlanner, state_writer
from raylane.training.model.lora import saved_buffers
from raylane.training.model.supervised import RunModel
from raylane.training.parallel.sharded import gathered
from raylane.training.storage import Place

T = TypeVar("T")

# Optimizer state by parameter name instead of numbered groups: only this form loads on another layout.
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_OPTIMIZER_NOTE = "optimizer.json"


def save_state(folder: Place, model: RunModel, optimizer: torch.optim.Optimizer | None, step: int) -> None:
    """Write weights, optimizer (unless None) and step as torch DCP. Waits until all workers have written.

    No random state is saved: each step seeds its own random numbers (`worker.SftWorker`).
    """
    write(folder, collect(model, optimizer, step), has_optimizer=optimizer is not None)


def write(folder: Place, state: dict[str, Any], *, has_optimizer: bool, group: dist.ProcessGroup | None = None) -> None:
    """Write what `collect` returned, or a copy of it. The ranks agree through `group`, None for the default one."""
    failed = f"the state could not be written to {folder}"
    try:
        save(state, storage_writer=state_writer(folder), process_group=group)
    except CheckpointException as error:  # a BaseException that holds the failure of each rank
        reasons = "; ".join(sorted({str(failure[0]) for failure in error.failures.values()}))
        raise CheckpointError(f"{failed}: {reasons}", path=str(folder), ranks=sorted(error.failures)) from error
    # Written after all other files: `is_written` looks for it.
    note = json.dumps({"optimizer": has_optimizer})
    on_rank_zero(failed, folder, lambda: (folder / _OPTIMIZER_NOTE).write_text(note, encoding="utf-8"), group)


def is_written(folder: Place) -> bool:
    """Return True if all ranks have written their files to this folder. Not collective."""
    try:
        return "optimizer" in json.loads((folder / _OPTIMIZER_NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def has_optimizer(folder: Place) -> bool:
    """Return True if the optimizer was saved; CheckpointError on all ranks if one rank finds no state folder."""

    def read() -> bool:
        try:
            return bool(json.loads((folder / _OPTIMIZER_NOTE).read_text(encoding="utf-8"))["optimizer"])
        except OSError as error:
            raise CheckpointError(
                f"{folder} holds no saved state that rank {dist.get_rank()} can read: {error}. With several nodes, "
                "checkpointing.checkpoint_dir must be on storage that they share"
            ) from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointDamagedError(
                f"{folder / _OPTIMIZER_NOTE} is damaged: {error!r}. Resume from an earlier checkpoint", path=str(folder)
            ) from error

    return _on_every_rank(read)


def load_state(folder: Place, model: RunModel, optimizer: torch.optim.Optimizer | None) -> int:
    """Read weights and, if given, optimizer in place, on any number of workers; return the step.

    Runs no code from the folder. Raises CheckpointError if the folder belongs to another model, optimizer or program
    (nothing was read then), CheckpointDamagedError if one of its files cannot be read.
    """
    state = collect(model, optimizer, 0)
    reader = CodeFreeReader(folder)
    # Read the metadata first: inside torch's `load` its errors would become an AssertionError.
    _on_every_rank(reader.read_metadata)
    try:
        load(state, storage_reader=reader, planner=FitPlanner())
    except CheckpointException as error:
        raise load_failure(folder, error) from error
    if optimizer is not None:
        set_optimizer_state_dict(model.causal_lm, optimizer, state["optimizer"], options=_FLAT)
    return int(state["step"].item())


def load_failure(folder: Place, error: CheckpointException) -> CheckpointError:
    """Return the error for the failures on the ranks: another model's folder, unreadable, or damaged.

    Only damage makes a run fall back to an earlier checkpoint. Causes that may disappear by themselves (permissions,
    memory, input/output errors, storage that one node cannot see) are therefore not reported as damage.
    """
    causes = [failure[0] for failure in error.failures.values()]
    ranks = sorted(error.failures)
    reasons = "; ".join(sorted({str(cause) or type(cause).__name__ for cause in causes}))
    where = {"path": str(folder), "ranks": ranks}
    # A mismatch first: it says more than the read errors that may follow from it.
    if any(type(cause) is CheckpointError for cause in causes):
        return CheckpointError(
            f"{folder} does not fit this model: {reasons}. For a new run, set another checkpointing.checkpoint_dir",
            **where,
        )
    if any(isinstance(cause, MemoryError | OSError) for cause in causes):
        return CheckpointError(f"{folder} could not be read: {reasons}. Run the same command to try again", **where)
    return CheckpointDamagedError(f"{folder} is damaged: {reasons}. Resume from an earlier checkpoint", **where)


def collect(model: RunModel, optimizer: torch.optim.Optimizer | None, step: int) -> dict[str, Any]:
    """Return weights, optimizer (unless None) and step by name, not copied."""
    weights = {**dict(model.causal_lm.named_parameters()), **saved_buffers(model.causal_lm)}
    state: dict[str, Any] = {"model": weights, "step": torch.tensor(step)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model.causal_lm, optimizer, options=_FLAT)
    return state


def on_rank_zero(
    failed: str, folder: Place, write: Callable[[], object], group: dist.ProcessGroup | None = None
) -> None:
    """Run `write` on rank 0 and wait for it on all ranks; if it fails, raise CheckpointError on all ranks.

    Catches every exception: libraries that write files also raise ValueError, TypeError and their own classes. An
    exception on rank 0 alone would leave the other ranks waiting in the broadcast.
    """
    reason: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            write()
        except OSError as error:
            reason = [str(error)]
        except Exception as error:
            reason = [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(reason, src=0, group=group, device=torch.device("cpu"))
    if reason[0] is not None:
        raise CheckpointError(f"{failed}: {reason[0]}", path=str(folder), ranks=[0])


def _on_every_rank(read: Callable[[], T]) -> T:
    """Return the result of `read` on this rank; if it raises CheckpointError on any rank, raise the first one on all.

    So no rank enters a collective call that another rank will never join.
    """
    mine: CheckpointError | None = None
    result: T
    try:
        result = read()
    except CheckpointError as error:
        mine = error
    # Every rank takes part, whether or not it failed: a missing rank would block the others for ever.
    first = next((error for error in gathered(mine) if error is not None), None)
    if first is not None:
        raise first
    return result


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

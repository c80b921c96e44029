"""What a worker writes to and reads from a checkpoint: torch DCP for state, safetensors for Hugging Face.

All functions are collective: every worker calls them with the same arguments, each writes or reads its own shards.
Called by `worker`; folder names, completeness and what is kept are `checkpoint`'s business.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from raylane.errors import CheckpointDamagedError, CheckpointError
from raylane.sft.dcp import CodeFreeReader, FitPlanner
from raylane.sft.model import SupervisedModel

__all__ = ["has_optimizer", "load_state", "save_hf", "save_state"]

T = TypeVar("T")

# Flat names per parameter instead of numbered groups: the only form that loads on another layout.
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_BYTES_PER_FILE = 4 * 2**30
_OPTIMIZER_NOTE = "optimizer.json"
_GENERATION = "generation_config.json"


def save_state(folder: Path, model: SupervisedModel, optimizer: torch.optim.Optimizer | None, step: int) -> None:
    """Write weights, optimizer (None: left out) and step as torch DCP. Waits until all workers have written.

    No random state: each step seeds its own (`worker.SftWorker`), so there is none to go on with.
    """
    failed = f"the state could not be written to {folder}"
    with _told(failed, folder):
        save(_state(model, optimizer, step), checkpoint_id=folder)
    note = json.dumps({"optimizer": optimizer is not None})
    _on_rank_zero(failed, folder, lambda: (folder / _OPTIMIZER_NOTE).write_text(note, encoding="utf-8"))


def has_optimizer(folder: Path) -> bool:
    """Return True if the optimizer was saved too; CheckpointError on all ranks when one finds no state folder."""

    def read() -> bool:
        try:
            return bool(json.loads((folder / _OPTIMIZER_NOTE).read_text(encoding="utf-8"))["optimizer"])
        except OSError as error:
            raise CheckpointError(
                f"{folder} holds no saved state that rank {dist.get_rank()} can read: {error}"
            ) from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointDamagedError(
                f"{folder / _OPTIMIZER_NOTE} is damaged: {error!r}", path=str(folder)
            ) from error

    return _on_every_rank(read)


def load_state(folder: Path, model: SupervisedModel, optimizer: torch.optim.Optimizer | None) -> int:
    """Read weights and, if given, optimizer in place, on any number of workers; returns the step.

    Runs no code from the folder. Raises CheckpointError when the folder belongs to another model, optimizer or
    program (nothing was read then), CheckpointDamagedError when a file of it cannot be read.
    """
    state = _state(model, optimizer, 0)
    reader = CodeFreeReader(folder)
    _on_every_rank(reader.read_metadata)  # torch's `load` would turn its errors into an AssertionError
    try:
        load(state, storage_reader=reader, planner=FitPlanner())
    except CheckpointException as error:
        raise _load_failure(folder, error) from error
    if optimizer is not None:
        set_optimizer_state_dict(model.causal_lm, optimizer, state["optimizer"], options=_FLAT)
    return int(state["step"].item())


def _load_failure(folder: Path, error: CheckpointException) -> CheckpointError:
    """Return the error to raise for what happened on the ranks: the folder is another model's, unreadable, or damaged.

    Only damage lets a run fall back to an earlier checkpoint, so whatever may pass by itself (permissions, memory,
    input/output errors, storage that one node does not see) is not called damage.
    """
    causes = [failure[0] for failure in error.failures.values()]
    ranks = sorted(error.failures)
    told = "; ".join(sorted({str(cause) or type(cause).__name__ for cause in causes}))
    where = {"path": str(folder), "ranks": ranks}
    if any(type(cause) is CheckpointError for cause in causes):
        return CheckpointError(
            f"{folder} does not fit this model: {told}. To start anew, give another checkpointing.checkpoint_dir",
            **where,
        )
    if any(isinstance(cause, MemoryError | OSError) for cause in causes):
        return CheckpointError(
            f"{folder} could not be read: {told}. Run the same command again to try once more", **where
        )
    return CheckpointDamagedError(f"{folder} is damaged: {told}. Resume from an earlier checkpoint", **where)


def _state(model: SupervisedModel, optimizer: torch.optim.Optimizer | None, step: int) -> dict[str, Any]:
    state: dict[str, Any] = {"model": dict(model.causal_lm.named_parameters()), "step": torch.tensor(step)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model.causal_lm, optimizer, options=_FLAT)
    return state


def save_hf(
    folder: Path, model: SupervisedModel, tokenizer_dir: Path, end_ids: Sequence[int] = (), start: Path | None = None
) -> None:
    """Write a Hugging Face folder: float32 safetensors with index, config, generation config, tokenizer, template.

    `end_ids` are the tokens that end a turn: `generate` will stop at them. `start` is the folder that the weights came
    from: how it generates is kept otherwise.

    Every worker writes its shards, rank 0 joins them; no process holds the whole model. Waits until all is there.
    """
    weights = {name: parameter.detach() for name, parameter in model.causal_lm.named_parameters()}
    writer = HuggingFaceStorageWriter(
        str(folder),
        fqn_to_index_mapping=_files(weights),
        save_distributed=True,
        enable_consolidation=True,
    )
    failed = f"the model could not be written to {folder}"
    with _told(failed, folder):
        save(weights, storage_writer=writer)
    _on_rank_zero(failed, folder, lambda: _write_beside(folder, model.causal_lm, tokenizer_dir, end_ids, start))


def _on_rank_zero(failed: str, folder: Path, write: Callable[[], object]) -> None:
    """Have rank 0 write. Returns on all ranks when that is done; on failure raises CheckpointError on all ranks.

    Catches every exception: libraries that write files also raise ValueError, TypeError and their own classes, and an
    exception that left rank 0 alone would leave the other ranks waiting in the broadcast.
    """
    reason: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            write()
        except OSError as error:
            reason = [str(error)]
        except Exception as error:
            reason = [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(reason, src=0, device=torch.device("cpu"))
    if reason[0] is not None:
        raise CheckpointError(f"{failed}: {reason[0]}", path=str(folder), ranks=[0])


def _on_every_rank(read: Callable[[], T]) -> T:
    """Return what `read` returns on this rank. If it raises CheckpointError on any rank, raise the first one on all.

    So no rank goes on into a collective call that another one will not join.
    """
    mine: CheckpointError | None = None
    found: T
    try:
        found = read()
    except CheckpointError as error:
        mine = error
    errors: list[CheckpointError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, mine)
    first = next((error for error in errors if error is not None), None)
    if first is not None:
        raise first
    return found


def _write_beside(
    folder: Path, causal_lm: Any, tokenizer_dir: Path, end_ids: Sequence[int], start: Path | None
) -> None:
    shutil.rmtree(folder / "sharded", ignore_errors=True)  # what was joined from
    config = type(causal_lm.config).from_dict(causal_lm.config.to_dict())
    config.architectures = [type(causal_lm).__name__]
    if hasattr(config, "auto_map"):  # names code of the base folder, which is not copied and was not used
        del config.auto_map
    config.dtype = torch.float32
    config.save_pretrained(folder)
    generation = json.dumps(_generation_settings(causal_lm, end_ids, start), indent=2, sort_keys=True)
    (folder / _GENERATION).write_text(generation + "\n", encoding="utf-8")
    if tokenizer_dir.is_symlink():
        raise OSError(f"{tokenizer_dir} is a symbolic link; delete data.cache_dir and run again")
    for source in tokenizer_dir.iterdir():
        if source.name not in ("config.json", _GENERATION):
            _copy_plain(source, folder / source.name)


def _generation_settings(causal_lm: Any, end_ids: Sequence[int], start: Path | None) -> dict[str, Any]:
    """Return the content of generation_config.json: the base model's own, with `end_ids` as the tokens to stop at.

    `generate` stops at what this file names and ignores the tokenizer; a base model's file names another token than
    the chat template ends turns with, and its answers would never end. The file is edited as JSON: transformers loads
    settings that contradict each other (temperature without do_sample, as many published folders have) but refuses to
    save them once any of them was changed.
    """
    path = None if start is None else start / _GENERATION
    if path is not None and path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"{path} holds a {type(found).__name__} where an object is needed")
    else:
        own = causal_lm.generation_config
        found = {} if own is None else json.loads(own.to_json_string(use_diff=True))
    named = found.get("eos_token_id")
    known = [] if named is None else [named] if isinstance(named, int) else list(named)
    ends = list(dict.fromkeys([*end_ids, *known]))
    return {**found, "eos_token_id": ends[0] if len(ends) == 1 else ends or None}


def _copy_plain(source: Path, target: Path) -> None:
    """Copy a plain file; folders are left out. OSError for a symbolic link.

    A link in a cache that others can write to would copy any file that this user can read into the exported model.
    """
    try:
        opened = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(f"{source} is a symbolic link; delete data.cache_dir and run again") from error
        raise
    with open(opened, "rb") as file:
        if stat.S_ISREG(os.fstat(opened).st_mode):
            with target.open("wb") as copy:
                shutil.copyfileobj(file, copy)


@contextmanager
def _told(what: str, folder: Path) -> Iterator[None]:
    """DCP's error, which is no Exception and holds what happened on each rank, as ours."""
    try:
        yield
    except CheckpointException as error:
        reasons = "; ".join(sorted({str(failure[0]) for failure in error.failures.values()}))
        raise CheckpointError(f"{what}: {reasons}", path=str(folder), ranks=sorted(error.failures)) from error


def _files(weights: dict[str, Any]) -> dict[str, int]:
    """Weight name -> number of the file that it goes into (from 1), in order, each file up to 4 GiB."""
    files, used, number = {}, 0, 1
    for name, weight in weights.items():
        size = weight.numel() * weight.element_size()
        if used and used + size > _BYTES_PER_FILE:
            number, used = number + 1, 0
        files[name] = number
        used += size
    return files

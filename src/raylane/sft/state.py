"""State that workers write to and read from a checkpoint: torch DCP for training, safetensors for Hugging Face.

All functions are collective: every worker calls them with the same arguments and writes or reads its own shards. Called
by `worker`; `checkpoint` handles folder names, completeness and retention.
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
from raylane.sft import lora
from raylane.sft.adapter_files import adapter_tensors, write_adapter
from raylane.sft.dcp import CodeFreeReader, FitPlanner
from raylane.sft.model import SupervisedModel

__all__ = ["has_optimizer", "load_state", "save_hf", "save_state"]

T = TypeVar("T")

# Optimizer state by parameter name instead of numbered groups: only this form loads on another layout.
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_BYTES_PER_FILE = 4 * 2**30
_OPTIMIZER_NOTE = "optimizer.json"
_GENERATION = "generation_config.json"

ADAPTER_FOLDER = "adapter"
"""Folder of the LoRA adapters inside a Hugging Face folder. Beside config.json, transformers would load them twice."""


def save_state(folder: Path, model: SupervisedModel, optimizer: torch.optim.Optimizer | None, step: int) -> None:
    """Write weights, optimizer (unless None) and step as torch DCP. Waits until all workers have written.

    No random state is saved: each step seeds its own random numbers (`worker.SftWorker`).
    """
    failed = f"the state could not be written to {folder}"
    with _checkpoint_errors(failed, folder):
        save(_state(model, optimizer, step), checkpoint_id=folder)
    note = json.dumps({"optimizer": optimizer is not None})
    _on_rank_zero(failed, folder, lambda: (folder / _OPTIMIZER_NOTE).write_text(note, encoding="utf-8"))


def has_optimizer(folder: Path) -> bool:
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


def load_state(folder: Path, model: SupervisedModel, optimizer: torch.optim.Optimizer | None) -> int:
    """Read weights and, if given, optimizer in place, on any number of workers; return the step.

    Runs no code from the folder. Raises CheckpointError if the folder belongs to another model, optimizer or program
    (nothing was read then), CheckpointDamagedError if one of its files cannot be read.
    """
    state = _state(model, optimizer, 0)
    reader = CodeFreeReader(folder)
    # Read the metadata first: inside torch's `load` its errors would become an AssertionError.
    _on_every_rank(reader.read_metadata)
    try:
        load(state, storage_reader=reader, planner=FitPlanner())
    except CheckpointException as error:
        raise _load_failure(folder, error) from error
    if optimizer is not None:
        set_optimizer_state_dict(model.causal_lm, optimizer, state["optimizer"], options=_FLAT)
    return int(state["step"].item())


def _load_failure(folder: Path, error: CheckpointException) -> CheckpointError:
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


def _state(model: SupervisedModel, optimizer: torch.optim.Optimizer | None, step: int) -> dict[str, Any]:
    state: dict[str, Any] = {"model": dict(model.causal_lm.named_parameters()), "step": torch.tensor(step)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model.causal_lm, optimizer, options=_FLAT)
    return state


def save_hf(
    folder: Path, model: SupervisedModel, tokenizer_dir: Path, end_ids: Sequence[int] = (), start: Path | None = None
) -> None:
    """Write a Hugging Face folder: float32 safetensors with index, config, generation config, tokenizer, template.

    `end_ids` are the tokens that end a turn, at which `generate` will stop. `start` is the folder that the weights came
    from; its other generation settings are kept. LoRA adapters are added into the weights, and also written by
    themselves in PEFT's format, in the folder `adapter`.

    Every worker writes its shards and rank 0 joins them, so no process holds the whole model. Waits until all files are
    written.
    """
    weights = lora.merged_parameters(model.causal_lm)
    writer = HuggingFaceStorageWriter(
        str(folder),
        fqn_to_index_mapping=_file_numbers(weights),
        save_distributed=True,
        enable_consolidation=True,
    )
    failed = f"the model could not be written to {folder}"
    with _checkpoint_errors(failed, folder):
        save(weights, storage_writer=writer)
    adapters = adapter_tensors(model.causal_lm)

    def write() -> None:
        _write_beside(folder, model.causal_lm, tokenizer_dir, end_ids, start)
        if adapters:
            write_adapter(folder / ADAPTER_FOLDER, model.causal_lm, adapters, start, torch.float32)

    _on_rank_zero(failed, folder, write)


def _on_rank_zero(failed: str, folder: Path, write: Callable[[], object]) -> None:
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
    dist.broadcast_object_list(reason, src=0, device=torch.device("cpu"))
    if reason[0] is not None:
        raise CheckpointError(f"{failed}: {reason[0]}", path=str(folder), ranks=[0])


def _on_every_rank(read: Callable[[], T]) -> T:
    """Return the result of `read` on this rank; if it raises CheckpointError on any rank, raise the first one on all.

    So no rank enters a collective call that another rank will never join.
    """
    mine: CheckpointError | None = None
    found: T
    try:
        found = read()
    except CheckpointError as error:
        mine = error
    errors: list[CheckpointError | None] = [None] * dist.get_world_size()
    # Every rank takes part, whether or not it failed: a missing rank would block the others for ever.
    dist.all_gather_object(errors, mine)
    first = next((error for error in errors if error is not None), None)
    if first is not None:
        raise first
    return found


def _write_beside(
    folder: Path, causal_lm: Any, tokenizer_dir: Path, end_ids: Sequence[int], start: Path | None
) -> None:
    """Write everything of a Hugging Face folder except the weights. Runs on rank 0 only."""
    shutil.rmtree(folder / "sharded", ignore_errors=True)  # DCP's shards, already joined into the final files
    config = type(causal_lm.config).from_dict(causal_lm.config.to_dict())
    config.architectures = [type(causal_lm).__name__]
    if hasattr(config, "auto_map"):  # names Python files of the base folder, which are neither used nor copied
        del config.auto_map
    config.dtype = torch.float32
    config.save_pretrained(folder)
    generation = json.dumps(_generation_settings(causal_lm, end_ids, start), indent=2, sort_keys=True)
    (folder / _GENERATION).write_text(generation + "\n", encoding="utf-8")
    if tokenizer_dir.is_symlink():
        raise OSError(f"{tokenizer_dir} is a symbolic link. Delete data.cache_dir and run the command again")
    for source in tokenizer_dir.iterdir():
        if source.name not in ("config.json", _GENERATION):
            _copy_plain(source, folder / source.name)


def _generation_settings(causal_lm: Any, end_ids: Sequence[int], start: Path | None) -> dict[str, Any]:
    """Return the content of generation_config.json: the base model's, with `end_ids` as the tokens to stop at.

    `generate` stops at the tokens in this file and ignores the tokenizer. The file of a base model names another token
    than the one at the end of the chat template's turns, and answers would never end. The file is edited as JSON:
    transformers loads settings that contradict each other (temperature without do_sample, as in many published
    folders), but refuses to save them after any change.
    """
    path = None if start is None else start / _GENERATION
    if path is not None and path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"{path} must hold an object, got a {type(found).__name__}")
    else:
        own = causal_lm.generation_config
        found = {} if own is None else json.loads(own.to_json_string(use_diff=True))
    named = found.get("eos_token_id")
    known = [] if named is None else [named] if isinstance(named, int) else list(named)
    ends = list(dict.fromkeys([*end_ids, *known]))
    return {**found, "eos_token_id": ends[0] if len(ends) == 1 else ends or None}


def _copy_plain(source: Path, target: Path) -> None:
    """Copy a regular file; skip folders. OSError for a symbolic link.

    In a cache that others can write to, a link could make this copy any file that this user can read into the exported
    model.
    """
    try:
        opened = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(f"{source} is a symbolic link. Delete data.cache_dir and run the command again") from error
        raise
    with open(opened, "rb") as file:
        if stat.S_ISREG(os.fstat(opened).st_mode):
            with target.open("wb") as copy:
                shutil.copyfileobj(file, copy)


@contextmanager
def _checkpoint_errors(failed: str, folder: Path) -> Iterator[None]:
    """Translate DCP's error, a BaseException that holds the failure of each rank, to CheckpointError."""
    try:
        yield
    except CheckpointException as error:
        reasons = "; ".join(sorted({str(failure[0]) for failure in error.failures.values()}))
        raise CheckpointError(f"{failed}: {reasons}", path=str(folder), ranks=sorted(error.failures)) from error


def _file_numbers(weights: dict[str, Any]) -> dict[str, int]:
    """Return weight name -> number of its file (from 1), in order, with at most 4 GiB per file."""
    files, used, number = {}, 0, 1
    for name, weight in weights.items():
        size = weight.numel() * weight.element_size()
        if used and used + size > _BYTES_PER_FILE:
            number, used = number + 1, 0
        files[name] = number
        used += size
    return files

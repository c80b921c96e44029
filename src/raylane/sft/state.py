"""What a worker writes to and reads from a checkpoint: torch DCP for state, safetensors for Hugging Face.

All functions are collective: every worker calls them with the same arguments, each writes or reads its own shards.
Called by `worker`; folder names, completeness and what is kept are `checkpoint`'s business.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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

from raylane.errors import CheckpointError
from raylane.sft.model import SupervisedModel

__all__ = ["has_optimizer", "load_state", "save_hf", "save_state"]

# Flat names per parameter instead of numbered groups: the only form that loads on another layout.
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_BYTES_PER_FILE = 4 * 2**30
_OPTIMIZER_NOTE = "optimizer.json"


def save_state(folder: Path, model: SupervisedModel, optimizer: torch.optim.Optimizer | None, step: int) -> None:
    """Write weights, optimizer (None: left out) and step as torch DCP. Waits until all workers have written.

    No random state: each step seeds its own (`worker.SftWorker`), so there is none to go on with.
    """
    with _told(f"the state could not be written to {folder}", folder):
        save(_state(model, optimizer, step), checkpoint_id=folder)
        note = json.dumps({"optimizer": optimizer is not None})
        _on_rank_zero(lambda: (folder / _OPTIMIZER_NOTE).write_text(note, encoding="utf-8"))


def has_optimizer(folder: Path) -> bool:
    """Whether the optimizer was saved too; CheckpointError when this is no state folder."""
    try:
        return bool(json.loads((folder / _OPTIMIZER_NOTE).read_text(encoding="utf-8"))["optimizer"])
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder} holds no saved state: {error!r}", path=str(folder)) from error


def load_state(folder: Path, model: SupervisedModel, optimizer: torch.optim.Optimizer | None) -> int:
    """Read weights and, if given, optimizer in place, on any number of workers; returns the step."""
    state = _state(model, optimizer, 0)
    with _told(f"{folder} does not fit this model (to start anew, give another checkpointing.checkpoint_dir)", folder):
        load(state, checkpoint_id=folder)
    if optimizer is not None:
        set_optimizer_state_dict(model.causal_lm, optimizer, state["optimizer"], options=_FLAT)
    return int(state["step"].item())


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
    with _told(f"the model could not be written to {folder}", folder):
        save(weights, storage_writer=writer)
        _on_rank_zero(lambda: _write_beside(folder, model.causal_lm, tokenizer_dir, end_ids, start))


def _on_rank_zero(write: Callable[[], object]) -> None:
    """Have rank 0 write; returns on all when that is done, and raises its OSError on all: none is left waiting."""
    said: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            write()
        except OSError as error:
            said = [str(error)]
    dist.broadcast_object_list(said, src=0, device=torch.device("cpu"))
    if said[0] is not None:
        raise OSError(said[0])


def _write_beside(
    folder: Path, causal_lm: Any, tokenizer_dir: Path, end_ids: Sequence[int], start: Path | None
) -> None:
    shutil.rmtree(folder / "sharded", ignore_errors=True)  # what was joined from
    config = type(causal_lm.config).from_dict(causal_lm.config.to_dict())
    config.architectures = [type(causal_lm).__name__]
    config.dtype = torch.float32
    config.save_pretrained(folder)
    _generation_config(causal_lm, end_ids, start).save_pretrained(folder)
    for source in tokenizer_dir.iterdir():
        if source.is_file() and source.name not in ("config.json", "generation_config.json"):
            shutil.copy2(source, folder / source.name)


def _generation_config(causal_lm: Any, end_ids: Sequence[int], start: Path | None) -> Any:
    """`generate` stops at what this names and knows nothing of the tokenizer; a base model's names another token than
    the chat template ends turns with, and its answers would never end."""
    from transformers import GenerationConfig

    found = copy.deepcopy(causal_lm.generation_config) or GenerationConfig()
    if start is not None and (start / "generation_config.json").is_file():
        found = GenerationConfig.from_pretrained(start)
    named = found.eos_token_id
    known = [] if named is None else [named] if isinstance(named, int) else list(named)
    ends = list(dict.fromkeys([*end_ids, *known]))
    found.eos_token_id = ends[0] if len(ends) == 1 else ends or None
    return found


@contextmanager
def _told(what: str, folder: Path) -> Iterator[None]:
    """DCP's error, which is no Exception and holds what happened on each rank, as ours."""
    try:
        yield
    except CheckpointException as error:
        reasons = "; ".join(sorted({str(failure[0]) for failure in error.failures.values()}))
        raise CheckpointError(f"{what}: {reasons}", path=str(folder), ranks=sorted(error.failures)) from error
    except OSError as error:  # of `_on_rank_zero`
        raise CheckpointError(f"{what}: {error}", path=str(folder), ranks=[0]) from error


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

"""Files of a Hugging Face folder: config, generation settings, tokenizer, and the division of weights into files.

    folder/config.json, generation_config.json, tokenizer files     written here
           model-00001-of-00003.safetensors, ...                    written by `hf_export` or `export`
           adapter/                                                 LoRA adapters alone (`adapter_files`)

Called by `hf_export` on rank 0, and by `export`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["ADAPTER_FOLDER", "file_numbers", "write_beside"]

ADAPTER_FOLDER = "adapter"
"""Folder of the LoRA adapters inside a Hugging Face folder. Beside config.json, transformers would load them twice."""

_GENERATION = "generation_config.json"
_BYTES_PER_FILE = 4 * 2**30


def write_beside(
    folder: Path,
    causal_lm: Any,
    tokenizer_dir: Path,
    end_ids: Sequence[int],
    start: Path | None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write everything of a Hugging Face folder except the weights, which are of type `dtype`.

    `tokenizer_dir` holds tokenizer and chat template. `end_ids` and `start`: see `_generation_settings`.
    """
    config = type(causal_lm.config).from_dict(causal_lm.config.to_dict())
    config.architectures = [type(causal_lm).__name__]
    if hasattr(config, "auto_map"):  # names Python files of the base folder, which are neither used nor copied
        del config.auto_map
    config.dtype = dtype
    config.save_pretrained(folder)
    generation = json.dumps(_generation_settings(causal_lm, end_ids, start), indent=2, sort_keys=True)
    (folder / _GENERATION).write_text(generation + "\n", encoding="utf-8")
    if tokenizer_dir.is_symlink():
        raise OSError(f"{tokenizer_dir} is a symbolic link. Delete data.cache_dir and run the command again")
    for source in tokenizer_dir.iterdir():
        # Another Hugging Face folder may serve as the tokenizer's; its weights are not copied.
        if source.name not in ("config.json", _GENERATION) and ".safetensors" not in source.name:
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


def file_numbers(weights: dict[str, Any]) -> dict[str, int]:
    """Return weight name -> number of its file (from 1), in order, with at most 4 GiB per file.

    Only the sizes of the tensors matter, which may be on the meta device.
    """
    files, used, number = {}, 0, 1
    for name, weight in weights.items():
        size = weight.numel() * weight.element_size()
        if used and used + size > _BYTES_PER_FILE:
            number, used = number + 1, 0
        files[name] = number
        used += size
    return files

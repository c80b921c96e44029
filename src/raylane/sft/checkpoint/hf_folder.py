"""Files of a Hugging Face folder: config, generation settings, tokenizer, and the plan of the safetensors files.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ADAPTER_FOLDER = "adapter"
"""Folder of the LoRA adapters inside a Hugging Face folder. Beside config.json, transformers would load them twice."""

_GENERATION = "generation_config.json"
_BYTES_PER_FILE = 4 * 2**30
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
"""Names in the header of a safetensors file: https://github.com/huggingface/safetensors#format"""


def write_beside(
    folder: Path,
    causal_lm: Any,
    tokenizer_dir: Path,
    end_ids: Sequence[int],
    start: Path | None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write everything of a Hugging Face folder except the weights, which are of type `dtype`.

    `tokenizer_dir` holds tokenizer and chat template. generation_config.json is that of the base model in `start`, with
    `end_ids` as the tokens to stop at: `generate` stops at the tokens in this file and ignores the tokenizer. The file
    of a base model names another token than the one at the end of the chat template's turns, and answers would never
    end.
    """
    config = type(causal_lm.config).from_dict(causal_lm.config.to_dict())
    config.architectures = [type(causal_lm).__name__]
    if hasattr(config, "auto_map"):  # names Python files of the base folder, which are neither used nor copied
        del config.auto_map
    config.dtype = dtype
    config.save_pretrained(folder)
    # Edited as JSON: transformers loads settings that contradict each other (temperature without do_sample, as in many
    # published folders), but refuses to save them after any change.
    path = None if start is None else start / _GENERATION
    if path is not None and path.is_file():
        settings = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError(f"{path} must hold an object, got a {type(settings).__name__}")
    else:
        defaults = causal_lm.generation_config
        settings = {} if defaults is None else json.loads(defaults.to_json_string(use_diff=True))
    named = settings.get("eos_token_id")
    known = [] if named is None else [named] if isinstance(named, int) else list(named)
    ends = list(dict.fromkeys([*end_ids, *known]))
    settings["eos_token_id"] = ends[0] if len(ends) == 1 else ends or None
    generation = json.dumps(settings, indent=2, sort_keys=True)
    (folder / _GENERATION).write_text(generation + "\n", encoding="utf-8")
    if tokenizer_dir.is_symlink():
        raise OSError(f"{tokenizer_dir} is a symbolic link. Delete data.cache_dir and run the command again")
    for source in tokenizer_dir.iterdir():
        # Another Hugging Face folder may serve as the tokenizer's; its weights are not copied.
        if source.name not in ("config.json", _GENERATION) and ".safetensors" not in source.name:
            _copy_plain(source, folder / source.name)


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


@dataclass(frozen=True)
class WeightFile:
    """Plan of one safetensors file."""

    name: str
    writer: int
    """Rank that writes the file."""
    holders: tuple[int, ...]
    """Ranks that hold (shards of) its weights, and take part in gathering them."""
    shapes: Mapping[str, tuple[int, ...]]
    """Weights in the order in which they are in the file."""

    def header(self, dtype: torch.dtype) -> bytes:
        """Return the first bytes of the file, up to the first weight."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, shape in self.shapes.items():
            end = offset + _num_elements(shape) * dtype.itemsize
            entries[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # weights start at a multiple of 8 bytes
        return len(text).to_bytes(8, "little") + text


def plan_files(
    held: Sequence[Mapping[str, tuple[int, ...]]], bytes_per_element: int, bytes_per_file: int | None = None
) -> list[WeightFile]:
    """Return the files for the weights that each rank holds (name -> shape of the whole weight). Pure.

    Neighbouring weights with the same holders share a file, up to `bytes_per_file` (4 GiB by default); ranks take turns
    in writing.
    """
    limit = _BYTES_PER_FILE if bytes_per_file is None else bytes_per_file
    holders: dict[str, list[int]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, of_rank in enumerate(held):
        for name, shape in of_rank.items():
            holders.setdefault(name, []).append(rank)
            shapes[name] = shape
    groups: list[tuple[tuple[int, ...], dict[str, tuple[int, ...]]]] = []
    used = 0
    for name, ranks in holders.items():
        size = _num_elements(shapes[name]) * bytes_per_element
        if not groups or groups[-1][0] != tuple(ranks) or used + size > limit:
            groups.append((tuple(ranks), {}))
            used = 0
        groups[-1][1][name] = shapes[name]
        used += size
    total = len(groups)
    return [
        WeightFile(f"model-{i + 1:05d}-of-{total:05d}.safetensors", ranks[i % len(ranks)], ranks, group)
        for i, (ranks, group) in enumerate(groups)
    ]


def stored_bytes(weight: torch.Tensor) -> memoryview:
    """Return the bytes of a whole CPU tensor as they are in a file."""
    # Through uint8, because NumPy has no bfloat16.
    return weight.contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_index(folder: Path, files: Sequence[WeightFile], dtype: torch.dtype) -> None:
    """Write the index of weights of this data type, which tells readers the file of each weight."""
    total = sum(_num_elements(shape) for file in files for shape in file.shapes.values()) * dtype.itemsize
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: file.name for file in files for name in file.shapes},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _num_elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()

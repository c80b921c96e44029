"""Reading of the safetensors of a Hugging Face folder: the index, where there is one, decides which files count.

Published folders often hold more `.safetensors` files than belong to the model (a consolidated copy, adapters, an older
shard). Which file counts is never left to the order of a listing.

    with model.safetensors.index.json      each weight from the file that the index names; other files are not opened
    without                                all files; the same weight in two of them is an error

Called by `build`, on all workers; each reads only its own part of a divided weight.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from raylane.errors import CheckpointError
from raylane.training.parallel.sharded import own_part

INDEX = "model.safetensors.index.json"
"""Name of the index: https://huggingface.co/docs/transformers/big_models"""
_SINGLE = "model.safetensors"
_AGAIN = "Copy or download the folder again"

_log = logging.getLogger(__name__)


def weight_files(folder: Path) -> dict[str, Path]:
    """Return the file of each weight. Reads the index and the headers of the files that count.

    CheckpointError if the folder has no weights, if the index is damaged, names a file that does not exist or a weight
    that its file does not hold, or if two files hold the same weight and there is no index.
    """
    index = folder / INDEX
    if index.is_file():
        return _indexed_files(folder, index)
    files: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name in _names(file):
            if name in files:
                raise CheckpointError(
                    f"{folder} holds {name} twice, in {files[name].name} and in {file.name}, and has no {INDEX} that "
                    "tells which one counts. Remove the file that does not belong to the model",
                    path=str(folder),
                    files=[files[name].name, file.name],
                )
            files[name] = file
    if not files:
        raise CheckpointError(
            f"{folder} holds no .safetensors file, and other weight files are not read. Convert the model first",
            path=str(folder),
        )
    return files


def _indexed_files(folder: Path, index: Path) -> dict[str, Path]:
    try:
        names = {str(name): str(file) for name, file in json.loads(index.read_text("utf-8"))["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} cannot be read: {error!r}. {_AGAIN}", path=str(folder)) from error
    if not names:
        raise CheckpointError(f"{index} names no weights. {_AGAIN}", path=str(folder))
    for file in sorted(set(names.values())):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} names {file!r}, which is no .safetensors file of the folder. {_AGAIN}", path=str(folder)
            )
        of_file = [name for name in names if names[name] == file]
        if not (folder / file).is_file():
            raise CheckpointError(
                f"{index} names the file {file} for {of_file[0]} and {len(of_file) - 1} more, and there is no such "
                f"file. {_AGAIN}",
                path=str(folder),
                files=[file],
            )
        if missing := sorted(set(of_file) - _names(folder / file)):
            raise CheckpointError(
                f"{file} does not hold {missing[0]}, although {index} names it for this weight ({len(missing)} such "
                f"weights). {_AGAIN}",
                path=str(folder),
            )
    if _SINGLE not in names.values() and (folder / _SINGLE).is_file():
        _log.warning(
            "%s holds %s beside %s: the weights are read from the files that the index names. Other programs may read "
            "it instead; remove the one that is out of date",
            *(folder, _SINGLE, INDEX),
        )
    return {name: folder / file for name, file in names.items()}


def _names(file: Path) -> set[str]:
    """Return the names of the weights in one file."""
    try:
        with safe_open(file, framework="pt") as stored:
            return set(stored.keys())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}. {_AGAIN}", path=str(file.parent)) from error


def read_weights(parameters: Mapping[str, nn.Parameter], folder: Path, model: str) -> None:
    """Fill parameters in place, converting data types; `model` names them in errors.

    CheckpointError as `weight_files`, and if weights are missing, quantised or of another shape.
    """
    files = weight_files(folder)
    missing = sorted(set(parameters) - set(files))
    if missing:
        advice = "Set policy.model_name to a folder of this model"
        separate = any(re.search(r"\.experts\.\d+\.", name) for name in files)
        if separate and any(".experts." in name for name in missing):
            advice = (
                "The folder has a weight for each expert, and transformers keeps the experts of a layer stacked in "
                "one, which raylane cannot load yet. Use a model without experts"
            )
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {len(parameters)} weights of {model}, e.g. {missing[:3]}; it holds e.g. "
            f"{sorted(files)[:3]}. {advice}",
            path=str(folder),
        )
    for file, names in groupby(sorted(parameters, key=files.__getitem__), files.__getitem__):
        with safe_open(file, framework="pt") as stored:
            for name in names:
                _read(parameters[name], stored.get_slice(name), name, folder)


def _read(parameter: nn.Parameter, stored: Any, name: str, folder: Path) -> None:
    """Copy this worker's part of one stored weight into a parameter."""
    if (shape := tuple(stored.get_shape())) != tuple(parameter.shape):
        raise CheckpointError(
            f"the weights in {folder} do not fit this model: {name} has shape {list(shape)} in the folder and "
            f"{list(parameter.shape)} in this run",
            path=str(folder),
        )
    sizes, starts = shape, (0,) * len(shape)
    if isinstance(parameter, DTensor):
        sizes, starts = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
    values = stored[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]
    # The numbers of quantised weights need scales, which are not read.
    if values.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise CheckpointError(
            f"{folder} holds a quantised model ({name} is {values.dtype}). Use a model in bfloat16, float16 or float32",
            path=str(folder),
        )
    with torch.no_grad():
        own_part(parameter).copy_(values)

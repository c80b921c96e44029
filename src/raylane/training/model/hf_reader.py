"""Reading of the safetensors of a Hugging Face folder: the index, where there is one, decides which files count.

Published folders often hold more `.safetensors` files than belong to the model (a consolidated copy, adapters, an older
shard). Which file counts is never left to the order of a listing.

    with model.safetensors.index.json      each weight from the file that the index names; other files are not opened
    without                                all files; the same weight in two of them is an error

Names and forms may be those of published folders (`stored_form`). Called by `build`, on all workers; each reads only
its own part of a divided weight.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from raylane.errors import CheckpointError
from raylane.training.model.lora import stored_weights
from raylane.training.model.stored_form import WeightSources, read_sources
from raylane.training.parallel.sharded import own_part

INDEX = "model.safetensors.index.json"
"""Name of the index: https://huggingface.co/docs/transformers/big_models"""
_SINGLE = "model.safetensors"
_AGAIN = "Copy or download the folder again"
_DTYPES = ("F64", "F32", "F16", "BF16")
"""Data types that are read: https://github.com/huggingface/safetensors#format"""
_QUANTISED = ("_blocks", "_scales", ".qweight", ".weight_scale", "weight_scale_inv")
"""Ends of names that only quantised models have (MXFP4, GPTQ, compressed tensors, FP8)."""

_COMPUTED = r"rotary_emb\.inv_freq$"
"""Name of what old folders store although the model computes it."""
_COMPARED = 2**24
"""Number of values of two weights that are compared at a time."""

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
    return {name: folder / file for name, file in names.items()}


def _names(file: Path) -> set[str]:
    """Return the names of the weights in one file."""
    try:
        with safe_open(file, framework="pt") as stored:
            return set(stored.keys())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}. {_AGAIN}", path=str(file.parent)) from error


def read_weights(causal_lm: Any, folder: Path, files: Mapping[str, Path]) -> None:
    """Fill the weights of a model in place from a folder, converting names, forms and data types.

    `files` are the `weight_files` of the folder. CheckpointError if weights are missing, quantised or of another shape,
    or if the folder has other values for a weight that its configuration ties to another one.
    """
    weights = stored_weights(causal_lm)
    ties = _ties(causal_lm, weights)
    sources = _sources(causal_lm, weights, ties, files)
    tied_sources = {name: sources.pop(name) for name in ties if name in sources}
    _check_sources(type(causal_lm).__name__, folder, weights, sources, files)
    first_files = {target: min(files[name] for name in _names_of(source)) for target, source in sources.items()}
    for name, source in tied_sources.items():
        if ties[name] in sources:
            _refuse_other_values(folder, files, _names_of(source)[0], _names_of(sources[ties[name]])[0])
    with _OpenFiles() as opened:
        for target in sorted(sources, key=lambda target: (first_files[target], target)):
            opened.keep_only({files[name] for name in _names_of(sources[target])})
            _read(causal_lm, weights[target], sources[target], folder, lambda name: opened.slice(files[name], name))


def warn_of_unused(causal_lm: Any, folder: Path, files: Mapping[str, Path]) -> None:
    """Name a file that is not read, and weights that a whole model has no place for: perhaps they are of another model.

    `files` are the `weight_files` of the folder.
    """
    weights = stored_weights(causal_lm)
    if folder / _SINGLE not in files.values() and (folder / _SINGLE).is_file():
        _log.warning(
            "%s holds %s beside %s: the weights are read from the files that the index names. Other programs may read "
            "it instead; remove the one that is out of date",
            *(folder, _SINGLE, INDEX),
        )
    sources = _sources(causal_lm, weights, _ties(causal_lm, weights), files)
    # transformers itself leaves some out without a word, such as buffers that older versions stored.
    known = [*(getattr(causal_lm, "_keys_to_ignore_on_load_unexpected", None) or ()), _COMPUTED]
    used = {name for source in sources.values() for name in _names_of(source)}
    unused = sorted(name for name in set(files) - used if not any(re.search(pattern, name) for pattern in known))
    if unused:
        _log.warning(
            "%s holds %d weights that %s has no place for, such as %s: they are not used. Check that config.json and "
            "policy.hf_config_overrides describe the model that was stored",
            *(folder, len(unused), type(causal_lm).__name__, unused[0]),
        )


def _sources(
    causal_lm: Any, weights: Mapping[str, Tensor], ties: Mapping[str, str], files: Mapping[str, Path]
) -> dict[str, WeightSources]:
    """Return where each weight of a model, and each tied name, comes from."""
    return read_sources(causal_lm, {**weights, **{name: weights[tied_to] for name, tied_to in ties.items()}}, files)


def _ties(causal_lm: Any, weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names that are no weights of the model, because its configuration ties each to a weight: that weight.

    Such a name is that of the head of a model with tied embeddings.
    """
    ties: dict[str, str] = getattr(causal_lm, "all_tied_weights_keys", None) or {}
    return {name: tied_to for name, tied_to in ties.items() if name not in weights and tied_to in weights}


def _refuse_other_values(folder: Path, files: Mapping[str, Path], name: str, tied_to: str) -> None:
    """Raise CheckpointError if two weights of a folder that should be tied have different values."""
    with _OpenFiles() as opened:
        first, second = opened.slice(files[name], name), opened.slice(files[tied_to], tied_to)
        shape = first.get_shape()
        rows = max(1, _COMPARED // max(1, math.prod(shape[1:])))
        # In parts: two whole embeddings may take gigabytes.
        if shape == second.get_shape() and all(
            torch.equal(first[row : row + rows].float(), second[row : row + rows].float())
            for row in range(0, shape[0], rows)
        ):
            return
    # transformers keeps both and trains two weights; to train one of them would change the model without a word.
    raise CheckpointError(
        f"{folder} holds {name} with other values than {tied_to}, but its config.json has tie_word_embeddings=true, "
        "which makes both the same weight. Set policy.hf_config_overrides.tie_word_embeddings=false to train both as "
        f"they are stored, or remove {name} from the folder to use {tied_to} for both",
        path=str(folder),
    )


def _names_of(source: WeightSources) -> list[str]:
    return [name for names in source.names.values() for name in names]


class _OpenFiles:
    """safetensors files that are open now; a context manager that closes them."""

    def __init__(self) -> None:
        self._open: dict[Path, tuple[ExitStack, Any]] = {}

    def keep_only(self, files: set[Path]) -> None:
        """Close all other files. Pages of a mapped file count as memory of this process until then."""
        for file in set(self._open) - files:
            self._open.pop(file)[0].close()

    def slice(self, file: Path, name: str) -> Any:
        """Return a weight of a file, of which parts can be read."""
        if file not in self._open:
            stack = ExitStack()
            self._open[file] = (stack, stack.enter_context(safe_open(file, framework="pt")))
        return self._open[file][1].get_slice(name)

    def __enter__(self) -> _OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.keep_only(set())


def _check_sources(
    model: str,
    folder: Path,
    weights: Mapping[str, Tensor],
    sources: Mapping[str, WeightSources],
    files: Mapping[str, Path],
) -> None:
    """Raise CheckpointError if weights are missing, or in the folder twice."""
    if missing := sorted(set(weights) - set(sources)):
        advice = "Set policy.model_name to a folder of this model"
        if any(name.endswith(_QUANTISED) for name in files):
            advice = "The folder holds a quantised model. Use a model in bfloat16, float16 or float32"
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {len(weights)} weights of {model}, e.g. {missing[:3]}; it holds e.g. "
            f"{sorted(files)[:3]}. {advice}",
            path=str(folder),
        )
    for target, source in sources.items():
        patterns = [] if source.converter is None else source.converter.source_patterns
        complete = [name for pattern, names in source.names.items() if pattern not in patterns for name in names]
        if complete and len(_names_of(source)) > 1:
            other = next(name for name in _names_of(source) if name != complete[0])
            raise CheckpointError(
                f"{folder} holds {target} of {model} twice, as {complete[0]} and as {other}. {_AGAIN}",
                path=str(folder),
            )
        if not source.stacks_experts:
            continue
        experts = weights[target].shape[0]
        counts = {pattern: len(source.names.get(pattern, [])) for pattern in source.converter.source_patterns}
        if wrong := {pattern: count for pattern, count in counts.items() if count != experts}:
            pattern, count = next(iter(wrong.items()))
            raise CheckpointError(
                f"{folder} holds {count} weights {pattern} for {target} of {model}, which has {experts} experts. "
                f"{_AGAIN}",
                path=str(folder),
            )


def _read(causal_lm: Any, weight: Tensor, source: WeightSources, folder: Path, stored: Callable[[str], Any]) -> None:
    """Compute this worker's part of one weight from those of the folder, and copy it into place.

    Of stacked experts only those of this worker are read, of a weight that needs no conversion only this worker's part,
    and of others all.
    """
    shape = tuple(weight.shape)
    sizes, starts = shape, (0,) * len(shape)
    if isinstance(weight, DTensor):
        sizes, starts = compute_local_shape_and_global_offset(shape, weight.device_mesh, weight.placements)
    local_slices = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
    if 0 in sizes:  # more workers than rows or experts
        return
    part = local_slices if source.converter is None else (...,)

    def values_of(name: str) -> Tensor:
        of_name = stored(name)
        # The numbers of quantised weights need scales, which are not read.
        if of_name.get_dtype() not in _DTYPES:
            raise CheckpointError(
                f"{folder} holds a quantised model ({name} is {of_name.get_dtype()}). Use a model in bfloat16, float16 "
                "or float32",
                path=str(folder),
            )
        if source.converter is None and tuple(of_name.get_shape()) != shape:
            raise _misfit(folder, name, of_name.get_shape(), shape)
        values: Tensor = of_name[part] if shape else of_name[...]
        return values

    try:
        values = source.convert(causal_lm, values_of, local_slices[0] if local_slices else slice(None))
    except (RuntimeError, ValueError, IndexError) as error:  # of transformers' operations, for wrong shapes
        raise CheckpointError(
            f"the weights in {folder} do not fit this model: {source.target} cannot be made of "
            f"{_names_of(source)[:2]}: {error}. {_AGAIN}",
            path=str(folder),
        ) from error
    if source.converter is not None:
        whole_shape = (*shape[:1], *values.shape[1:]) if source.stacks_experts else tuple(values.shape)
        if whole_shape != shape:
            raise _misfit(folder, source.target, whole_shape, shape)
        values = values[(slice(None), *local_slices[1:]) if source.stacks_experts else local_slices]
    with torch.no_grad():
        own_part(weight).copy_(values)


def _misfit(folder: Path, name: str, stored: Sequence[int], shape: Sequence[int]) -> CheckpointError:
    return CheckpointError(
        f"the weights in {folder} do not fit this model: {name} has shape {list(stored)} in the folder and "
        f"{list(shape)} in this run",
        path=str(folder),
    )

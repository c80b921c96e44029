"""Model as a Hugging Face folder (safetensors, configuration, tokenizer), written by a run or from a checkpoint.

    folder/config.json, generation_config.json, tokenizer files     `write_beside`
           model-00001-of-00003.safetensors, ...                    planned by `plan_files`
           adapter/                                                 LoRA adapters alone (`lora.write_adapter`)

`save_hf` writes the model of a run. Called by `worker`, on all ranks. Every file has one writer among the ranks that
hold its weights. Weights are gathered one after the other, in an order that keeps several writers busy, and go straight
into the files: no process holds more than a few whole weights, and nothing is written twice. The place may be a folder
that all nodes see, or a URL.

    gather   a (file 1)   g (file 2)   b (file 1)   h (file 2) ...      all ranks that hold the weight
    write      [-- a, rank 0 --]         [-- b, rank 0 --]              in a thread of the writer's
                        [-- g, rank 1 --]         [-- h, rank 1 --]

`export_state` writes such a folder, or a PEFT folder, from any checkpoint: one process, without Ray, and one
tensor in memory at a time. It runs no code from the checkpoint (`dcp.CodeFreeReader`). Called by the export of
each kind of training (`raylane.sft.run.export`).

    checkpoint/step_N/state/  (torch DCP)  ->  out/model-0000i-of-0000n.safetensors, config.json, tokenizer, ...
                              --form adapter   out/adapter_model.safetensors, adapter_config.json
"""

from __future__ import annotations

import errno
import json
import os
import queue
import shutil
import stat
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from raylane.errors import CheckpointError, ConfigError
from raylane.training.checkpoint.dcp import CodeFreeReader, FitPlanner
from raylane.training.checkpoint.folders import Saved
from raylane.training.checkpoint.state import load_failure, on_rank_zero
from raylane.training.config.policy import PolicyConfig
from raylane.training.model import stored_form
from raylane.training.model.defaults import with_own_defaults
from raylane.training.model.lora import (
    Adapters,
    LoraLinear,
    adapt,
    adapted,
    adapter_names,
    gather_adapters,
    merged_weight,
    saved_buffers,
    stored_weights,
    write_adapter,
)
from raylane.training.model.supervised import RunModel
from raylane.training.parallel.sharded import gathered, whole
from raylane.training.storage import Place

ADAPTER_FOLDER = "adapter"
"""Folder of the LoRA adapters inside a Hugging Face folder. Beside config.json, transformers would load them twice."""

_GENERATION = "generation_config.json"
_TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("additional_chat_templates/*.jinja", "vocab*", "merges*", "*.model", "*.spm", "*.tiktoken", "*.bpe"),
)
"""Files of a tokenizer: another Hugging Face folder may serve as its folder, and nothing else of it is copied."""
_BYTES_PER_FILE = 4 * 2**30
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
"""Names in the header of a safetensors file: https://github.com/huggingface/safetensors#format"""


@dataclass(frozen=True)
class Companions:
    """Contents of a Hugging Face folder besides the weights of a model."""

    tokenizer_dir: Path
    """Folder of tokenizer and chat template."""
    end_ids: Sequence[int]
    """Tokens that end a turn, at which `generate` will stop."""
    start: Path | None
    """Folder that the weights came from; its other generation settings are kept. None for none."""
    dtype: torch.dtype
    """Data type of the weights."""


def write_beside(folder: Path, causal_lm: Any, companions: Companions) -> None:
    """Write everything of a Hugging Face folder except the weights.

    generation_config.json is that of the base model, with the tokens to stop at: `generate` stops at the tokens in this
    file and ignores the tokenizer. The file of a base model names another token than the one at the end of the chat
    template's turns, and answers would never end.
    """
    tokenizer_dir, start = companions.tokenizer_dir, companions.start
    config = type(causal_lm.config).from_dict(causal_lm.config.to_dict())
    config.architectures = [type(causal_lm).__name__]
    if hasattr(config, "auto_map"):  # names Python files of the base folder, which are neither used nor copied
        del config.auto_map
    config.dtype = companions.dtype
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
    ends = list(dict.fromkeys([*companions.end_ids, *known]))
    settings["eos_token_id"] = ends[0] if len(ends) == 1 else ends or None
    # Other programs read config.json alone.
    config.eos_token_id = settings["eos_token_id"]
    config.save_pretrained(folder)
    generation = json.dumps(settings, indent=2, sort_keys=True)
    (folder / _GENERATION).write_text(generation + "\n", encoding="utf-8")
    if tokenizer_dir.is_symlink():
        raise OSError(f"{tokenizer_dir} is a symbolic link. Delete data.cache_dir and run the command again")
    if not tokenizer_dir.is_dir():  # a pattern finds nothing there, without an error
        raise FileNotFoundError(f"there is no tokenizer folder {tokenizer_dir}. Run the command again")
    for source in sorted({path for pattern in _TOKENIZER_FILES for path in tokenizer_dir.glob(pattern)}):
        if source.is_symlink() or not source.is_dir():
            target = folder / source.relative_to(tokenizer_dir)
            target.parent.mkdir(exist_ok=True)
            _copy_plain(source, target)


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


class FileTensor(NamedTuple):
    """One tensor of a safetensors file."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


Stored = Mapping[str, FileTensor]
"""Tensors of a file by name."""


def stored_tensors(causal_lm: Any, dtype: torch.dtype) -> dict[str, Stored]:
    """Return the tensors that files hold for each of `stored_weights` of a model, in the names of published folders.

    Weights have this data type, and buffers their own: the routers of DeepSeek-V3 add them to scores in float32.
    """
    buffers = saved_buffers(causal_lm)
    return {
        name: {
            part: FileTensor(tuple(values.shape), weight.dtype if name in buffers else dtype)
            for part, values in stored_form.stored(causal_lm, name, torch.empty(weight.shape, device="meta")).items()
        }
        for name, weight in stored_weights(causal_lm).items()
    }


@dataclass(frozen=True)
class WeightFile:
    """Plan of one safetensors file."""

    name: str
    writer: int
    """Rank that writes the file."""
    holders: tuple[int, ...]
    """Ranks that hold (shards of) its weights, and take part in gathering them."""
    weights: Mapping[str, Stored]
    """Tensors of each weight of the model, in the order in which they are in the file."""

    @property
    def tensors(self) -> dict[str, FileTensor]:
        """All tensors of the file, in their order."""
        return {name: tensor for tensors in self.weights.values() for name, tensor in tensors.items()}

    def header(self) -> bytes:
        """Return the first bytes of the file, up to the first tensor."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, tensor in self.tensors.items():
            end = offset + tensor.size_bytes
            dtype = _DTYPE_NAMES[tensor.dtype]
            entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # weights start at a multiple of 8 bytes
        return len(text).to_bytes(8, "little") + text

    def contents(self, causal_lm: Any, name: str, weight: Tensor) -> Iterator[memoryview]:
        """Yield the bytes of the tensors that hold one whole weight of the model, in the order of the file."""
        parts = stored_form.stored(causal_lm, name, weight)
        for part, tensor in self.weights[name].items():
            yield stored_bytes(parts[part].to(tensor.dtype))


def plan_files(held: Sequence[Mapping[str, Stored]], bytes_per_file: int | None = None) -> list[WeightFile]:
    """Return the files for the weights of the model that each rank holds, with the tensors of each. Pure.

    Neighbouring weights with the same holders share a file, up to `bytes_per_file` (4 GiB by default); ranks take turns
    in writing.
    """
    limit = _BYTES_PER_FILE if bytes_per_file is None else bytes_per_file
    holders: dict[str, list[int]] = {}
    weights: dict[str, Stored] = {}
    for rank, of_rank in enumerate(held):
        for name, tensors in of_rank.items():
            holders.setdefault(name, []).append(rank)
            weights[name] = tensors
    groups: list[tuple[tuple[int, ...], dict[str, Stored]]] = []
    used = 0
    for name, ranks in holders.items():
        size = sum(tensor.size_bytes for tensor in weights[name].values())
        if not groups or groups[-1][0] != tuple(ranks) or used + size > limit:
            groups.append((tuple(ranks), {}))
            used = 0
        groups[-1][1][name] = weights[name]
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


def write_index(folder: Path, files: Sequence[WeightFile]) -> None:
    """Write the index of weights, which tells readers the file of each of them."""
    index = {
        "metadata": {"total_size": sum(tensor.size_bytes for file in files for tensor in file.tensors.values())},
        "weight_map": {name: file.name for file in files for name in file.tensors},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


_WEIGHTS_WAITING = 2
"""Number of gathered weights that may wait for their writer; with the one being written, the memory that is needed."""


def save_hf(folder: Place, model: RunModel, companions: Companions) -> None:
    """Write a Hugging Face folder; wait until all files are written. Collective.

    LoRA adapters are added into the weights, and also written by themselves in PEFT's format, in the folder `adapter`.
    CheckpointError on all ranks if one of them cannot write.
    """
    failed = f"the model could not be written to {folder}"
    files = _write_weights(failed, folder, model.causal_lm, companions.dtype)
    adapters = gather_adapters(model.causal_lm, model.mesh.pp_group)

    def write_others() -> None:
        # transformers writes to local folders only, and the place may be a URL.
        with tempfile.TemporaryDirectory() as name:
            draft = Path(name)
            write_beside(draft, model.causal_lm, companions)
            write_index(draft, files)
            if adapters is not None:
                write_adapter(draft / ADAPTER_FOLDER, adapters, companions.start, torch.float32)
                if isinstance(folder, Path):
                    (folder / ADAPTER_FOLDER).mkdir()
            for file in draft.rglob("*"):
                if file.is_file():
                    target = folder
                    for part in file.relative_to(draft).parts:
                        target = target / part
                    target.write_bytes(file.read_bytes())

    on_rank_zero(failed, folder, write_others)


def rounds(files: Sequence[WeightFile]) -> list[list[WeightFile]]:
    """Return the files in groups that are written at the same time: each rank writes one file after the other. Pure."""
    of_writer: dict[int, list[WeightFile]] = {}
    for file in files:
        of_writer.setdefault(file.writer, []).append(file)
    return [[file for file in together if file is not None] for together in zip_longest(*of_writer.values())]


def _write_weights(failed: str, folder: Place, causal_lm: Any, dtype: torch.dtype) -> list[WeightFile]:
    """Write all safetensors files; return their plan. Collective."""
    weights, adapters = stored_weights(causal_lm), adapted(causal_lm)
    rank = dist.get_rank()
    files = plan_files(gathered(stored_tensors(causal_lm, dtype)))
    buffers = saved_buffers(causal_lm)
    writer = _WeightWriter(folder, causal_lm)
    try:
        # One weight of each file in turn, so that all writers have work.
        for together in rounds(files):
            for names in zip_longest(*(file.weights for file in together)):
                for file, name in zip(together, names, strict=True):
                    if name is None or rank not in file.holders:
                        continue
                    part = merged_weight(name, weights, adapters)
                    # Rounded before it is gathered: half the bytes on the wire.
                    weight = whole(part if name in buffers else part.to(dtype))
                    if file.writer == rank:
                        writer.add(file, name, weight.cpu())
    finally:
        error = writer.close()
    errors = gathered(error)
    if any(errors):
        reasons = "; ".join(sorted({reason for reason in errors if reason is not None}))
        ranks = [number for number, reason in enumerate(errors) if reason is not None]
        raise CheckpointError(f"{failed}: {reasons}", path=str(folder), ranks=ranks)
    return files


class _WeightWriter:
    """Thread that writes the files of this rank, in the order in which their weights are added.

    After an error it takes weights without writing them: the other ranks still need this one to gather.
    """

    def __init__(self, folder: Place, causal_lm: Any) -> None:
        self._folder, self._causal_lm = folder, causal_lm
        self._waiting: queue.Queue[tuple[WeightFile, str, Tensor] | None] = queue.Queue(_WEIGHTS_WAITING)
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name="raylane-hf-export", daemon=True)
        self._thread.start()

    def add(self, file: WeightFile, name: str, weight: Tensor) -> None:
        """Give the next weight of a file, whole; wait while too many are waiting already."""
        self._waiting.put((file, name, weight))

    def close(self) -> str | None:
        """Wait until all weights are written; return the reason if they are not."""
        self._waiting.put(None)
        self._thread.join()
        return self._error

    def _run(self) -> None:
        file: WeightFile | None = None
        stream: Any = None
        while (item := self._waiting.get()) is not None:
            if self._error is not None:
                continue
            try:
                if item[0] is not file:
                    if stream is not None:
                        stream.close()
                    file = item[0]
                    if isinstance(self._folder, Path):
                        self._folder.mkdir(parents=True, exist_ok=True)
                    stream = (self._folder / file.name).open("wb")
                    stream.write(file.header())
                for values in file.contents(self._causal_lm, item[1], item[2]):
                    stream.write(values)
            except Exception as error:
                self._error = str(error) or type(error).__name__
        try:
            if stream is not None:
                stream.close()
        except Exception as error:
            self._error = self._error or str(error) or type(error).__name__


Form = Literal["merged", "adapter"]


@with_own_defaults
def export_state(
    saved: Saved, out: Path, policy: PolicyConfig, hf_config: Any, companions: Companions, form: Form
) -> Path:
    """Write the model of a checkpoint to the new folder `out`, in the data type of its companions; return `out`.

    `policy` and `hf_config` (transformers' configuration of the model) are those of the run. "merged" is a whole
    Hugging Face folder, with LoRA adapters added into the weights; "adapter" is a PEFT folder with the adapters alone.
    The folder is complete or absent. Raises CheckpointError for a checkpoint that cannot be used, ConfigError for a
    form that the checkpoint does not have.
    """
    path, dtype = saved.path, companions.dtype
    from transformers import AutoModelForCausalLM  # takes seconds

    # Without memory for the weights: only names and shapes are needed.
    with torch.device("meta"):
        causal_lm = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32, trust_remote_code=False)
    adapt(causal_lm, policy.dtensor_cfg.lora_cfg)
    if form == "adapter" and not adapted(causal_lm):
        raise ConfigError(f"{path} was trained without LoRA, so it has no adapters. Use --form merged")
    draft = out.with_name(f"{out.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)  # of an interrupted export
    read = _reader(path / "state")
    try:
        if form == "adapter":
            tensors = {
                name: read(f"model.{parameter}", shape) for name, (parameter, shape) in adapter_names(causal_lm).items()
            }
            base = policy.model_name
            write_adapter(draft, Adapters.of(causal_lm, tensors), None if base is None else Path(base), dtype)
        else:
            draft.mkdir(parents=True)
            weights, layers = stored_weights(causal_lm), adapted(causal_lm)
            files = plan_files([stored_tensors(causal_lm, dtype)])
            for file in files:
                with (draft / file.name).open("wb") as stream:
                    stream.write(file.header())
                    # One weight after the other; the library's own writer needs all of them in memory.
                    for name in file.weights:
                        for values in file.contents(causal_lm, name, _merged(name, layers, weights, read)):
                            stream.write(values)
            write_index(draft, files)
            write_beside(draft, causal_lm, companions)
        draft.rename(out)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error}. Check its free space and permissions") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return out


Read = Callable[[str, torch.Size], Tensor]


def _reader(folder: Place) -> Read:
    """Return a function that reads one tensor of a state folder, float32, by its name and shape."""
    reader = CodeFreeReader(folder)
    reader.read_metadata()  # its own errors, before `load` wraps them

    def read(name: str, shape: torch.Size) -> Tensor:
        values = torch.empty(shape)
        try:
            with warnings.catch_warnings():  # torch warns of a single process even if it is asked for one
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
                load({name: values}, storage_reader=reader, planner=FitPlanner(), no_dist=True)
        except CheckpointException as error:
            raise load_failure(folder, error) from error
        return values

    return read


def _merged(name: str, layers: Mapping[str, LoraLinear], weights: Mapping[str, Tensor], read: Read) -> Tensor:
    """Read one weight, with its adapter added if it has one."""
    owner, _, last = name.rpartition(".")
    layer = layers.get(owner)
    if layer is None:
        return read(f"model.{name}", weights[name].shape)
    if last != "weight":  # the bias of an adapted layer belongs to its base
        return read(f"model.{owner}.base.{last}", weights[name].shape)
    base = read(f"model.{owner}.base.weight", weights[name].shape)
    low = read(f"model.{owner}.lora_A.weight", layer.lora_A.weight.shape)
    high = read(f"model.{owner}.lora_B.weight", layer.lora_B.weight.shape)
    return base + high @ low * layer.scale

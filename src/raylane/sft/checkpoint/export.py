"""Hugging Face or PEFT folder of any checkpoint: one process, without Ray, and one tensor in memory at a time.

    checkpoint/step_N/state/  (torch DCP)  ->  out/model-0000i-of-0000n.safetensors, config.json, tokenizer, ...
                              --form adapter   out/adapter_model.safetensors, adapter_config.json

Runs no code from the checkpoint (`dcp.CodeFreeReader`). Called by `raylane export`.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from raylane.errors import CheckpointError, ConfigError
from raylane.sft.checkpoint import folders
from raylane.sft.checkpoint.dcp import CodeFreeReader, FitPlanner
from raylane.sft.checkpoint.folders import Saved
from raylane.sft.checkpoint.hf_export import Companions, plan_files, stored_bytes, write_beside, write_index
from raylane.sft.checkpoint.publishing import HF_FOLDER
from raylane.sft.checkpoint.state import load_failure
from raylane.sft.config.load import build_config
from raylane.sft.config.schema import RunConfig
from raylane.sft.data.prepare import read_prepared
from raylane.sft.data.storage import Place
from raylane.sft.model.adapter_files import Adapters, adapter_names, write_adapter
from raylane.sft.model.defaults import with_own_defaults
from raylane.sft.model.hf_config import model_config
from raylane.sft.model.lora import LoraLinear, adapt, adapted, base_parameters

Form = Literal["merged", "adapter"]


@with_own_defaults
def export_checkpoint(path: Place, out: Path, form: Form = "merged", dtype: torch.dtype = torch.float32) -> Path:
    """Write the model of the checkpoint folder `path` (step_N) to the new folder `out`; return `out`.

    "merged" is a whole Hugging Face folder, with LoRA adapters added into the weights; "adapter" is a PEFT folder with
    the adapters alone. The folder is complete or absent. Raises CheckpointError for a checkpoint that cannot be used,
    ConfigError for an existing `out` or a form that the checkpoint does not have.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already. Name a folder that does not exist with --out")
    saved = folders.read(path)
    plain = {key: value for key, value in saved.config.items() if key not in folders.NOT_CONFIGURED}
    config = build_config(plain, source=f"{saved.path}/run.json")
    folders.refuse_other_owner(path, config.checkpointing)
    hf_config, companions = _companions(saved, config, dtype)
    from transformers import AutoModelForCausalLM  # not before the check of `out`

    # Without memory for the weights: only names and shapes are needed.
    with torch.device("meta"):
        causal_lm = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32, trust_remote_code=False)
    adapt(causal_lm, config.policy.dtensor_cfg.lora_cfg)
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
            base = config.policy.model_name
            write_adapter(draft, Adapters.of(causal_lm, tensors), None if base is None else Path(base), dtype)
        else:
            draft.mkdir(parents=True)
            _write_weights(draft, causal_lm, read, dtype)
            write_beside(draft, causal_lm, companions)
        draft.rename(out)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error}. Check its free space and permissions") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return out


def _companions(saved: Saved, config: RunConfig, dtype: torch.dtype) -> tuple[Any, Companions]:
    """Return transformers' configuration of the model, and its tokenizer with what belongs to it.

    They come from the run's token cache, or else from the checkpoint's own hf folder.
    """
    from transformers import AutoConfig

    policy = config.policy
    cached = Path(config.data.cache_dir) / str(saved.config.get("prepared")) / "prepared.json"
    if cached.is_file():
        prepared = read_prepared(cached)
        end_id = prepared.end_ids[0] if prepared.end_ids else None
        hf_config = model_config(policy, prepared.vocab_size, prepared.pad_id, end_id)
        start = None if policy.model_name is None else Path(policy.model_name)
        return hf_config, Companions(prepared.tokenizer_dir, prepared.end_ids, start, dtype)
    written = saved.path / HF_FOLDER
    if isinstance(written, Path) and (written / "config.json").is_file():
        hf_config = AutoConfig.from_pretrained(written, local_files_only=True, trust_remote_code=False)
        return hf_config, Companions(written, (), written, dtype)
    raise CheckpointError(
        f"the tokenizer of {saved.path} is missing: neither the token cache {cached.parent} nor {written} exists. Run "
        "this command in the working directory of the run, or prepare the data again with `raylane plan`",
        path=str(saved.path),
    )


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


def _write_weights(folder: Path, causal_lm: nn.Module, read: Read, dtype: torch.dtype) -> None:
    """Write the safetensors files of a model with its adapters added in, and their index.

    One tensor after the other; the library's own writer needs all of them in memory.
    """
    weights, layers = base_parameters(causal_lm), adapted(causal_lm)
    files = plan_files([{name: tuple(weight.shape) for name, weight in weights.items()}], dtype.itemsize)
    for file in files:
        with (folder / file.name).open("wb") as stream:
            stream.write(file.header(dtype))
            for name in file.shapes:
                stream.write(stored_bytes(_merged(name, layers, weights, read).to(dtype)))
    write_index(folder, files, dtype)


def _merged(name: str, layers: Mapping[str, LoraLinear], weights: Mapping[str, nn.Parameter], read: Read) -> Tensor:
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

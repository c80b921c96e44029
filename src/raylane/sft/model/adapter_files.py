"""Files of LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

A folder holds the adapters alone, without the model: `peft.PeftModel.from_pretrained(model, folder)` adds them to it.
Names and keys are those of peft 0.21. Called by `build` (start from adapters), `hf_export` and `export`.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from raylane.errors import CheckpointError
from raylane.sft.config.policy import LoraConfig
from raylane.sft.model.lora import adapted, fill
from raylane.sft.parallel.sharded import gathered, whole

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."
"""Beginning of every name in PEFT's files: the attributes that lead from a PeftModel to the model inside it."""

_UNSUPPORTED = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform")
"""Keys of adapter_config.json that change the meaning of the adapters; they must be off or empty."""


@dataclass(frozen=True)
class Adapters:
    """Adapters of a model, or of the stages of it that one worker holds."""

    settings: LoraConfig
    tensors: dict[str, Tensor]
    """Tensors of undivided layers, by their names in PEFT's files."""
    layers: list[str]
    """Names of the adapted layers."""
    others: list[str]
    """Names of all other linear layers."""

    @classmethod
    def of(cls, causal_lm: nn.Module, tensors: dict[str, Tensor]) -> Adapters:
        """Return these tensors with the names of the layers, of a model that has adapters."""
        layers = adapted(causal_lm)
        linear = [name for name, module in causal_lm.named_modules() if isinstance(module, nn.Linear)]
        return cls(next(iter(layers.values())).settings, tensors, list(layers), linear)


def gather_adapters(causal_lm: nn.Module, stages: dist.ProcessGroup | None) -> Adapters | None:
    """Return the adapters of the whole model, float32 on the CPU; None without LoRA. Collective.

    `stages` are the workers that hold the other stages of a pipeline, all of which have adapters.
    """
    if not adapted(causal_lm):
        return None
    of_stage = Adapters.of(
        causal_lm, {name: whole(parameter.detach()).float().cpu() for name, parameter in _named(causal_lm).items()}
    )
    if stages is None:
        return of_stage
    # Adapters are small, so every stage may have all of them.
    stages_adapters = gathered(of_stage, stages)
    return Adapters(
        of_stage.settings,
        {name: tensor for adapters in stages_adapters for name, tensor in adapters.tensors.items()},
        [name for adapters in stages_adapters for name in adapters.layers],
        [name for adapters in stages_adapters for name in adapters.others],
    )


def adapter_names(causal_lm: nn.Module) -> dict[str, tuple[str, torch.Size]]:
    """Return name in PEFT's files -> (name in the model, shape) of the adapters."""
    return {name: (name.removeprefix(_PREFIX), parameter.shape) for name, parameter in _named(causal_lm).items()}


def _named(causal_lm: nn.Module) -> dict[str, nn.Parameter]:
    return {
        f"{_PREFIX}{name}.{part}.weight": getattr(layer, part).weight
        for name, layer in adapted(causal_lm).items()
        for part in ("lora_A", "lora_B")
    }


def write_adapter(folder: Path, adapters: Adapters, base: Path | None, dtype: torch.dtype) -> None:
    """Create `folder` with the adapters of a whole model; `base` is the model folder that they belong to."""
    folder.mkdir(parents=True)
    settings = adapters.settings
    # The shortest names that select exactly the adapted layers: last parts (q_proj) or whole names. PEFT compares the
    # ends of names, so a last part would also select layers that were left out.
    parts = sorted({name.rpartition(".")[2] for name in adapters.layers})
    left_out = any(name.rpartition(".")[2] in parts for name in adapters.others)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base),
        "r": settings.dim,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": sorted(adapters.layers) if left_out else parts,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        # PEFT replaces these first values by those in the file.
        "init_lora_weights": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    save_file({name: tensor.to(dtype) for name, tensor in adapters.tensors.items()}, folder / WEIGHTS, {"format": "pt"})


def read_adapter(causal_lm: nn.Module, folder: Path, names: Collection[str]) -> None:
    """Fill the adapters in place from a folder in PEFT's format, which must hold `names`, those of the whole model.

    CheckpointError if the folder cannot be read, or belongs to adapters of another shape, scale or place.
    """
    named, layers = _named(causal_lm), adapted(causal_lm)
    settings = next(iter(layers.values())).settings
    try:
        config = dict(json.loads((folder / CONFIG).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise _unreadable(folder, error) from error
    # DoRA, rank-stabilised scales and the like use the same tensors in another formula than `lora.LoraLinear`.
    for key in _UNSUPPORTED:
        if config.get(key):
            raise CheckpointError(
                f"the adapters in {folder} have {key}={config[key]!r}, which is not supported. Use plain LoRA adapters",
                path=str(folder),
            )
    in_file = {"dim": config.get("r"), "alpha": config.get("lora_alpha")}
    for option, mine in (("dim", settings.dim), ("alpha", settings.alpha)):
        if mine != in_file[option]:
            raise CheckpointError(
                f"policy.dtensor_cfg.lora_cfg.{option} is {mine:g}, and the adapters in {folder} have "
                f"{in_file[option]!r}. Set it to their value",
                path=str(folder),
            )
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            stored = set(file.keys())
            if differing := sorted(stored ^ set(names)):
                where = "only in the files" if differing[0] in stored else "only in this run"
                raise CheckpointError(
                    f"the adapters in {folder} belong to other layers: {differing[0]} and {len(differing) - 1} more "
                    "are in one of the two, the first one " + where + ". Set policy.dtensor_cfg.lora_cfg."
                    "target_modules to the target_modules in its adapter_config.json",
                    path=str(folder),
                )
            for name, parameter in named.items():
                values = file.get_tensor(name)
                if values.shape != parameter.shape:
                    raise CheckpointError(
                        f"{name} has shape {list(values.shape)} in {folder} and {list(parameter.shape)} in this run. "
                        "Use the model that the adapters were made for",
                        path=str(folder),
                    )
                # Masters are float32, whatever the file holds.
                fill(parameter, values.float())
    except (OSError, SafetensorError) as error:
        raise _unreadable(folder, error) from error


def _unreadable(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"the adapters in {folder} cannot be read: {error}. Set policy.dtensor_cfg.lora_cfg.adapter_path to a folder "
        f"with {CONFIG} and {WEIGHTS}, or to null",
        path=str(folder),
    )

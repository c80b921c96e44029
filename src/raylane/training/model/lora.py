"""LoRA: frozen projections with a trained low-rank product beside each of them (Hu et al., arXiv:2106.09685).

    y = base(x) + alpha / r * lora_B(lora_A(x))        base [out, in] frozen, lora_A [r, in], lora_B [out, r]

`base`, `lora_A` and `lora_B` are plain nn.Linear modules, which FSDP2 and tensor-parallel plans can shard. `adapt` runs
before sharding, on the meta device too; `initialise` runs after it and fills the adapters. Called by `build`, `initial`
and `export`.

The files of adapters alone have PEFT's format, adapter_config.json and adapter_model.safetensors, without the model:
`peft.PeftModel.from_pretrained(model, folder)` adds them to it. Names and keys are those of peft 0.21.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from raylane.errors import CheckpointError, ConfigError
from raylane.training.config.keys import suggest
from raylane.training.config.policy import LoraConfig
from raylane.training.parallel.sharded import divided, gathered, whole
from raylane.training.parallel.stages import layer_ranges
from raylane.training.parallel.tensor_parallel import ROWS

_BASE = ".base."
"""Part of a parameter's name that adapting added: q_proj.weight became q_proj.base.weight."""


class AdapterDropout(nn.Module):
    """Dropout that drops the same values for any number of tensor-parallel workers.

    These workers have the same random state (`WorkerMesh.random_stream`). Each draws the mask of the whole values and
    takes its own part of it.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self._dim, self._part, self._parts = -1, 0, 1

    def divide(self, dim: int, part: int, parts: int) -> None:
        """From now on take inputs that are one of `parts` equal parts of the whole values along a dimension."""
        self._dim, self._part, self._parts = dim, part, parts

    def forward(self, x: Tensor) -> Tensor:
        """Return x with some values set to 0 and the others scaled up; x itself in evaluation mode."""
        if not self.training or not self.p:
            return x
        size = x.shape[self._dim]
        # Drawn whole also where one part is used, so that the random states of the workers stay equal.
        whole_shape = list(x.shape)
        whole_shape[self._dim] = size * self._parts
        # autograd keeps the mask: one byte for each value, and of a part without the memory of the whole mask.
        mask = torch.empty(whole_shape, dtype=torch.bool, device=x.device).bernoulli_(1 - self.p)
        if self._parts > 1:
            mask = mask.narrow(self._dim, size * self._part, size).clone()
        return x * mask / (1 - self.p)


class LoraLinear(nn.Module):
    """A frozen linear layer and its adapter."""

    def __init__(self, base: nn.Linear, settings: LoraConfig) -> None:
        super().__init__()
        self.settings = settings
        self.scale = settings.alpha / settings.dim
        self.base = base
        # On the device of the base, which may be meta. float32 masters, as for all trained weights.
        where: dict[str, Any] = {"bias": False, "device": base.weight.device, "dtype": torch.float32}
        self.lora_A = nn.Linear(base.in_features, settings.dim, **where)
        self.lora_B = nn.Linear(settings.dim, base.out_features, **where)
        self.dropout = AdapterDropout(settings.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the projection [..., out] of x [..., in]."""
        before = self.settings.dropout_position == "pre"
        low = self.lora_B(self.lora_A(self.dropout(x) if before else x))
        base: Tensor = self.base(x)
        added: Tensor = low if before else self.dropout(low)
        return base + added * self.scale

    def merged(self) -> Tensor:
        """Return the weight [out, in] of one linear layer that computes the same, sharded as the base. Collective."""
        weight = self.base.weight.detach()
        product = whole(self.lora_B.weight.detach()) @ whole(self.lora_A.weight.detach()) * self.scale
        return weight + divided(product, weight)


def adapt(causal_lm: nn.Module, settings: LoraConfig) -> None:
    """Freeze all weights and put an adapter beside each chosen linear layer; does nothing unless LoRA is enabled.

    The adapters have undefined values until `initialise`. ConfigError if a pattern of `settings` matches nothing.
    """
    if not settings.enabled:
        return
    for name in _chosen(causal_lm, settings):
        parent, _, last = name.rpartition(".")
        base = causal_lm.get_submodule(name)
        assert isinstance(base, nn.Linear)
        setattr(causal_lm.get_submodule(parent), last, LoraLinear(base, settings))
    freeze(causal_lm)


def freeze(causal_lm: nn.Module) -> None:
    """Freeze all parameters of an adapted model except its adapters; a model without adapters stays as it is."""
    if adapted(causal_lm):
        for parameter in base_parameters(causal_lm).values():
            parameter.requires_grad_(False)


def check_stages(causal_lm: Any, count: int) -> None:
    """Raise ConfigError if one of `count` pipeline stages of an adapted model would have no adapter to train."""
    numbers = [i for i, layer in enumerate(causal_lm.get_decoder().layers) if adapted(layer)]
    for stage, layers in enumerate(layer_ranges(len(causal_lm.get_decoder().layers), count)):
        if numbers and not set(layers) & set(numbers):
            # Its optimizer would be empty, and nothing behind the tokens would have a gradient.
            raise ConfigError(
                f"policy.dtensor_cfg.lora_cfg adapts nothing in layers {layers[0]} to {layers[-1]}, which are pipeline "
                f"stage {stage} of {count}. Choose layers of every stage in target_modules, or fewer stages",
                key="policy.dtensor_cfg.lora_cfg.target_modules",
            )


def _chosen(causal_lm: nn.Module, settings: LoraConfig) -> list[str]:
    """Return the names of the linear layers to adapt."""
    key = "policy.dtensor_cfg.lora_cfg"
    # The loss uses the head by itself, and its weight may be the embedding's.
    head = causal_lm.get_output_embeddings()  # type: ignore[operator]
    names = [name for name, module in causal_lm.named_modules() if isinstance(module, nn.Linear) and module is not head]
    for option in ("target_modules", "exclude_modules"):
        for pattern in getattr(settings, option):
            if not any(_matches(name, pattern) for name in names):
                known = sorted({name.rpartition(".")[2] for name in names})
                raise ConfigError(
                    f"{key}.{option}: {pattern!r} matches no linear layer of this {type(causal_lm).__name__} (the "
                    f"output head cannot be adapted); {suggest(pattern, known)}. Linear layers: {', '.join(known)}",
                    key=f"{key}.{option}",
                )
    patterns = settings.target_modules or ("*",)
    chosen = [name for name in names if any(_matches(name, pattern) for pattern in patterns)]
    chosen = [name for name in chosen if not any(_matches(name, pattern) for pattern in settings.exclude_modules)]
    if not chosen:
        raise ConfigError(
            f"{key}.exclude_modules={list(settings.exclude_modules)} leaves no linear layer to adapt; remove a name",
            key=f"{key}.exclude_modules",
        )
    return chosen


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)


def adapted(causal_lm: nn.Module) -> dict[str, LoraLinear]:
    """Return the adapted layers by the name of the linear layer that each replaced; empty without LoRA."""
    return {name: module for name, module in causal_lm.named_modules() if isinstance(module, LoraLinear)}


def divide_dropout(causal_lm: Any, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Tell the adapters of a model which part of the whole values their dropout gets, after `tensor_parallel.apply`."""
    for name, adapter in adapted(causal_lm).items():
        rows, before = name.endswith(ROWS), adapter.settings.dropout_position == "pre"
        # The input of a matrix divided by rows, and the output of one divided by columns, have a part of the features.
        if rows == before:
            adapter.dropout.divide(-1, mesh.get_local_rank(), mesh.size())
        elif rows and sequence_parallel:
            adapter.dropout.divide(1, mesh.get_local_rank(), mesh.size())


def seed_of(seed: int, name: str) -> int:
    """Return the seed of the random numbers of one module, by its name in the model's files."""
    return (seed * 1_000_003 + zlib.crc32(name.encode())) % 2**63


def initialise(causal_lm: nn.Module, seed: int) -> None:
    """Fill all adapters with their initial values, a function of `seed` and the name of the layer alone."""
    for name, layer in adapted(causal_lm).items():
        # A generator for each layer: the values depend neither on the order nor on the division among workers.
        generator = torch.Generator().manual_seed(seed_of(seed, name))
        first = torch.empty(layer.lora_A.weight.shape)
        if layer.settings.lora_A_init == "kaiming":
            nn.init.kaiming_uniform_(first, a=math.sqrt(5), generator=generator)
        else:
            nn.init.xavier_normal_(first, generator=generator)
        fill(layer.lora_A.weight, first)
        fill(layer.lora_B.weight, torch.zeros(layer.lora_B.weight.shape))


def base_parameters(causal_lm: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of the model without adapters, by the names that they have in its files."""
    layers = adapted(causal_lm).values()
    skipped = {id(part.weight) for layer in layers for part in (layer.lora_A, layer.lora_B)}
    parameters = {}
    for name, parameter in causal_lm.named_parameters():
        if id(parameter) not in skipped:
            # The name of a parameter before its layer was adapted.
            owner, base, last = name.rpartition(_BASE)
            is_adapted = base and isinstance(causal_lm.get_submodule(owner), LoraLinear)
            parameters[f"{owner}.{last}" if is_adapted else name] = parameter
    return parameters


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong to the files of a model: state that no gradient changes, whole on every worker."""
    return {
        f"{prefix}{key}": buffer
        for prefix, inner in ((f"{name}." if name else "", inner) for name, inner in module.named_modules())
        for key, buffer in inner.named_buffers(recurse=False)
        if key not in inner._non_persistent_buffers_set
    }


def stored_weights(causal_lm: nn.Module) -> dict[str, Tensor]:
    """Return everything that the files of a model hold, without adapters, by its names in the model."""
    return {**base_parameters(causal_lm), **saved_buffers(causal_lm)}


def merged_weight(name: str, weights: Mapping[str, Tensor], layers: Mapping[str, LoraLinear]) -> Tensor:
    """Return one of `stored_weights`, with its adapter of `adapted` added in if it has one. Collective.

    One at a time: all merged weights together would be a second copy of this worker's part of the model.
    """
    owner, _, last = name.rpartition(".")
    return layers[owner].merged() if last == "weight" and owner in layers else weights[name].detach()


def fill(parameter: Tensor, values: Tensor) -> None:
    """Copy whole values, equal on all workers, into a parameter; of a sharded one each worker keeps its part."""
    with torch.no_grad():
        parameter.copy_(divided(values.to(parameter.device), parameter))


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

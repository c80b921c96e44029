"""Optimizer and learning rate schedule; the rate is a pure function of the step. Called by `worker`."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raylane.errors import ConfigError
from raylane.sft.config.policy import OptimizerConfig, OptimizerGroup, SchedulerConfig
from raylane.sft.model.muon import MuonAdamW
from raylane.sft.model.supervised import RunModel


def learning_rate(step: int, peak: float, schedule: SchedulerConfig, total_steps: int) -> float:
    """Return the learning rate of a step, counted from 0.

    The rate rises linearly to `peak` over w = `warmup_steps` steps, starting at `first_step`. It then falls along half
    a cosine or a line to `min_lr_ratio * peak`, which is reached at the step that `min_lr_at` names, or stays constant.
    There is no state, so a resumed run needs nothing but the step number.
    """
    w = schedule.warmup_steps
    if step < w:
        if isinstance(schedule.first_step, float):  # torch.optim.lr_scheduler.LinearLR
            return peak * (schedule.first_step + (1 - schedule.first_step) * step / w)
        begin, rises = {"1/(w+1)": (1, w + 1), "1/w": (1, w), "0": (0, w)}[schedule.first_step]
        return peak * (step + begin) / rises
    if schedule.name == "constant":
        return peak
    # Steps count from 0, so the last one has the number total_steps - 1.
    last = total_steps - 1 if schedule.min_lr_at == "last_step" else total_steps
    span = max(1, last - w)
    progress = min(1.0, (step - schedule.warmup_steps) / span)
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.name == "cosine" else 1 - progress
    return peak * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * shape)


def make_optimizer(model: nn.Module, settings: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the configured optimizer over all trained parameters. Collective in a pipeline.

    `weight_decay_on` selects whether vectors (norms, biases) are decayed too; `groups` give single parameters another
    learning rate or decay. ConfigError if an entry of `groups` is the first match of no parameter.
    """
    kwargs = settings.kwargs.model_dump()
    if not kwargs.keys() & {"foreach", "fused", "differentiable"}:
        # One pass over the memory of all parameters instead of a dozen operations on each; torch exists on no device
        # that raylane uses without this kernel.
        kwargs["fused"] = True
    # The names that files have: without the wrapper's attribute.
    causal_lm = getattr(model, "causal_lm", model)
    named = {name: parameter for name, parameter in causal_lm.named_parameters() if parameter.requires_grad}
    names = list(named)
    pipeline = model.mesh.pp_group if isinstance(model, RunModel) else None
    if pipeline is not None:
        of_stages: list[list[str]] = [[]] * dist.get_world_size(pipeline)
        dist.all_gather_object(of_stages, names, group=pipeline)
        names = list(dict.fromkeys(name for some in of_stages for name in some))
    chosen = _first_matches(names, settings)
    orthogonal = set()
    if settings.name == "muon":
        # Muon trains the matrices of the decoder layers.
        layers: nn.ModuleList = model.causal_lm.get_decoder().layers  # type: ignore[union-attr, operator]
        orthogonal = {id(parameter) for parameter in layers.parameters() if parameter.ndim == 2}
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, parameter in named.items():
        group = chosen.get(name)
        is_decayed = parameter.ndim >= 2 or settings.weight_decay_on == "all"
        decay = settings.kwargs.weight_decay if is_decayed else 0.0
        if group is not None and group.weight_decay is not None:
            decay = group.weight_decay
        values: dict[str, Any] = {"weight_decay": decay}
        scale = 1.0 if group is None else group.lr_scale
        if settings.name == "muon":
            values["orthogonal"] = id(parameter) in orthogonal
            scale *= settings.muon.lr_scale if values["orthogonal"] else 1.0
        if scale != 1.0:  # absent otherwise, so that checkpoints from before this key can be resumed
            values["lr_scale"] = scale
        groups.setdefault(tuple(values.items()), {"params": [], **values})["params"].append(parameter)
    if settings.name == "adamw":
        return torch.optim.AdamW(list(groups.values()), **kwargs)
    return MuonAdamW(list(groups.values()), settings.muon, **kwargs)


def _first_matches(names: list[str], settings: OptimizerConfig) -> dict[str, OptimizerGroup]:
    """Return parameter name -> the first entry of `groups` whose pattern matches it, for names with a match."""
    chosen: dict[str, OptimizerGroup] = {}
    for number, group in enumerate(settings.groups):
        matching = [name for name in names if re.search(group.pattern, name)]
        new = [name for name in matching if name not in chosen]
        if not new:
            matched = f"only parameters of earlier entries, e.g. {matching[0]}" if matching else "no trained parameter"
            shown = ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".0.", name) for name in names))
            raise ConfigError(
                f"policy.optimizer.groups[{number}].pattern={group.pattern!r} matches {matched}. Correct or remove it; "
                f"the parameters are {shown}",
                key=f"policy.optimizer.groups[{number}].pattern",
            )
        chosen.update(dict.fromkeys(new, group))
    return chosen


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of all parameters; some have a multiple of it (`policy.optimizer.groups`)."""
    for group in optimizer.param_groups:
        group["lr"] = value * group.get("lr_scale", 1.0)

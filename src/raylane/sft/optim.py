"""Optimizer and learning rate schedule; the rate is a pure function of the step. Called by `worker`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from raylane.sft.config import OptimizerConfig, SchedulerConfig

__all__ = ["learning_rate", "make_optimizer", "set_learning_rate"]


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
    """Return AdamW over all parameters; `weight_decay_on` selects whether vectors (norms, biases) are decayed too."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    kwargs = settings.kwargs.model_dump()
    if not kwargs.keys() & {"foreach", "fused", "differentiable"}:
        # One pass over the memory of all parameters instead of a dozen operations on each; torch exists on no device
        # that raylane uses without this kernel.
        kwargs["fused"] = True
    decay = settings.kwargs.weight_decay if settings.weight_decay_on == "all" else 0.0
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": decay}]
    return torch.optim.AdamW([group for group in groups if group["params"]], **kwargs)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = value

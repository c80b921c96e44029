"""The optimizer, and its learning rate as a pure function of the step. Called by `worker`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from raylane.sft.config import OptimizerConfig, SchedulerConfig

__all__ = ["learning_rate", "make_optimizer", "set_learning_rate"]


def learning_rate(step: int, peak: float, schedule: SchedulerConfig, total_steps: int) -> float:
    """Learning rate of the step counted from 0.

    Rises linearly to `peak` over `warmup_steps` (its first step already moves), then falls to `min_lr_ratio * peak` at
    the last step along half a cosine or a line, or stays. Has no state, so a resumed run has it right by itself.
    """
    if step < schedule.warmup_steps:
        return peak * (step + 1) / (schedule.warmup_steps + 1)
    if schedule.name == "constant":
        return peak
    span = max(1, total_steps - 1 - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / span)
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.name == "cosine" else 1 - progress
    return peak * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * shape)


def make_optimizer(model: nn.Module, settings: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW over all parameters; vectors (norms, biases) are not decayed: it would pull them off their scale."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    kwargs = settings.kwargs.model_dump()
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], **kwargs)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """For all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = value

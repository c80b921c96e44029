"""Optimizer and learning rate schedule; the rate is a pure function of the step. Called by `worker`.

Muon (Keller Jordan, 2024; arXiv:2502.16982) replaces the averaged gradient of a matrix by the nearest orthogonal one.
That matrix depends on all rows, so a shard alone gives a wrong result: each worker gathers the whole matrix, computes,
and keeps its part. `MuonAdamW` updates the matrices of the decoder layers by Muon and all other parameters by AdamW, as
one object, so that learning rate, checkpoints and warm-up treat it like AdamW.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from raylane.errors import ConfigError
from raylane.training.config.policy import MuonConfig, OptimizerConfig, OptimizerGroup, SchedulerConfig
from raylane.training.model.supervised import RunModel
from raylane.training.parallel.sharded import divided, gathered, whole

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Factors of x, x^3 and x^5 in one Newton-Schulz iteration: those with the steepest start, from Jordan's article."""
_ITERATIONS = 5
_SMALLEST_NORM = 1e-7
_MOMENTUM = 0.95
"""Decay rate of the running average of the gradient, and weight of that average in the update."""


class MuonAdamW(torch.optim.AdamW):
    """AdamW; parameter groups with the entry `orthogonal=True` are updated by Muon instead. `step` is collective."""

    def __init__(self, groups: list[dict[str, Any]], settings: MuonConfig, **adamw: Any) -> None:
        super().__init__(groups, **adamw)
        self._settings = settings

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        everything = self.param_groups
        # AdamW's own step runs over `param_groups`, so it sees only its part of them.
        self.param_groups = [group for group in everything if not group["orthogonal"]]
        try:
            loss: float | None = super().step(closure)
        finally:
            self.param_groups = everything
        for group in everything:
            if group["orthogonal"]:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, parameter.grad, group["lr"], group["weight_decay"])
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, lr: float, weight_decay: float) -> None:
        settings, state = self._settings, self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
            # Muon needs no count, but AdamW's `load_state_dict` reads one for every parameter.
            state["step"] = torch.zeros((), device=parameter.device)
        state["step"] += 1
        average = state["momentum_buffer"].lerp_(gradient, 1 - _MOMENTUM)
        direction = gradient.lerp(average, _MOMENTUM) if settings.nesterov else average
        dtype = torch.bfloat16 if settings.ns_precision == "bfloat16" else torch.float32
        update = orthogonalised(whole(direction), _ITERATIONS, dtype).to(parameter.dtype)
        rows, columns = parameter.shape
        if settings.adjust_lr_fn == "original":
            size = math.sqrt(max(1, rows / columns))
        else:
            size = 0.2 * math.sqrt(max(rows, columns))
        parameter.mul_(1 - lr * weight_decay)
        parameter.add_(divided(update, parameter), alpha=-lr * size)


def orthogonalised(matrix: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Return about U V^T of the decomposition U S V^T of a matrix, of type `dtype`.

    The iterations leave singular values between 0.7 and 1.2 instead of 1, which is as good for training.
    """
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(dtype)
    x = x.mT if tall else x  # the products below have the size of the shorter side
    x = x / x.norm().clamp(min=_SMALLEST_NORM)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


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
        names = list(dict.fromkeys(itertools.chain.from_iterable(gathered(names, pipeline))))
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

"""Muon for the matrices of the decoder layers and AdamW for all other parameters, as one optimizer.

Muon (Keller Jordan, 2024; arXiv:2502.16982) replaces the averaged gradient of a matrix by the nearest orthogonal one.
That matrix depends on all rows, so a shard alone gives a wrong result: each worker gathers the whole matrix, computes,
and keeps its part. One object, so that learning rate, checkpoints and warm-up treat it like AdamW. Made by `optim`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from raylane.sft.config.policy import MuonConfig
from raylane.sft.parallel.sharded import divided, whole

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

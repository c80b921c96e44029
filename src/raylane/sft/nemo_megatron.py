"""Translation of NeMo-RL's policy.megatron_cfg: its optimizer and its learning rate schedule.

The sizes in it are renamed, and its other keys left out or refused, by the tables in `nemo_keys`. Facts are from
examples/configs/sft.yaml of NVIDIA-NeMo/RL and from megatron-core 0.16.1 (optimizer/optimizer_config.py and
optimizer_param_scheduler.py). Pure functions; called by `nemo_rl`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raylane.sft.nemo_schedule import InexactScheduleError

__all__ = ["megatron_clipping", "megatron_optimizer", "megatron_schedule"]

_ARGUMENTS = {"lr": "lr", "weight_decay": "weight_decay", "adam_eps": "eps"}
"""Key of megatron_cfg.optimizer -> argument of AdamW."""


def megatron_optimizer(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return policy.optimizer for the same optimizer; ValueError with the reason if there is none."""
    name = str(section.get("optimizer", "adam")).lower()
    if name not in ("adam", "adamw"):
        raise ValueError(f"optimizer={name}: only adam, which is AdamW, can be translated; set policy.optimizer")
    if section.get("fp16"):
        raise ValueError("fp16=true: policy.precision is bfloat16 or float32; set fp16=false and bf16=true")
    if section.get("optimizer_cpu_offload"):
        raise ValueError("optimizer_cpu_offload=true: the optimizer state stays with the weights; set it to false")
    kwargs = {new: section[old] for old, new in _ARGUMENTS.items() if section.get(old) is not None}
    betas = [section.get("adam_beta1", 0.9), section.get("adam_beta2", 0.999)]
    # Megatron-core decays no biases and no norms.
    return {"name": "adamw", "weight_decay_on": "matrices", "kwargs": {**kwargs, "betas": betas}}


def megatron_clipping(section: Mapping[str, Any]) -> float | None:
    """Return policy.max_grad_norm: Megatron-core clips to 1 by default, and 0 switches it off."""
    return section.get("clip_grad", 1.0) or None


def megatron_schedule(section: Mapping[str, Any], optimizer: Mapping[str, Any], steps: int | None) -> dict[str, Any]:
    """Return policy.scheduler with the same learning rates; InexactScheduleError if there is none.

    `optimizer` is the section beside it, which has the highest and the lowest rate; `steps` is the number of steps of
    the run (None: not known).
    """
    decays = {section.get(f"{end}_weight_decay", optimizer.get("weight_decay")) for end in ("start", "end")}
    if len(decays | {optimizer.get("weight_decay")}) > 1 and section.get("weight_decay_incr_style") != "constant":
        raise InexactScheduleError("a weight decay that changes during the run cannot be expressed; make it constant")
    style, peak = section.get("lr_decay_style", "linear"), optimizer.get("lr")
    if style not in ("constant", "linear", "cosine"):
        raise InexactScheduleError(f"lr_decay_style={style} cannot be expressed; use constant, linear or cosine")
    if not isinstance(peak, int | float) or not peak:
        raise InexactScheduleError(f"megatron_cfg.optimizer.lr={peak!r} is no learning rate; set it")
    warmup = section.get("lr_warmup_iters") or 0
    found: dict[str, Any] = {"name": style, "warmup_steps": warmup}
    if warmup:
        found["first_step"] = float(section.get("lr_warmup_init") or 0.0) / peak
        if found["first_step"] > 1:
            raise InexactScheduleError("lr_warmup_init is above the learning rate, so the rate would fall; lower it")
    if style == "constant":
        return found
    # The lowest rate is reached at step lr_decay_iters, counted from 0; null means the length of the run.
    end = section.get("lr_decay_iters") or steps
    if steps is None or end not in (steps, steps - 1):
        raise InexactScheduleError(
            f"lr_decay_iters={end} is not the end of the run; set it to sft.max_num_steps={steps}, or set the latter"
        )
    found["min_lr_at"] = "after_last_step" if end == steps else "last_step"
    return {**found, "min_lr_ratio": float(optimizer.get("min_lr") or 0.0) / peak}

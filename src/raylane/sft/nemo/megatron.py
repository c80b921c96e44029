"""Translation of NeMo-RL's policy.megatron_cfg: its optimizer and its learning rate schedule.

The sizes in it are renamed, and its other keys left out or refused, by the tables in `keys`. Facts are from
examples/configs/sft.yaml of NVIDIA-NeMo/RL and from megatron-core 0.16.1 (optimizer/optimizer_config.py and
optimizer_param_scheduler.py). Pure functions; called by `translate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raylane.sft.nemo.schedule import InexactScheduleError

_ARGUMENTS = {"lr": "lr", "adam_eps": "eps"}
"""Key of megatron_cfg.optimizer -> argument of AdamW."""

_TRANSLATED = {"optimizer", "fp16", "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad"}
"""Keys of megatron_cfg.optimizer that this module reads."""

_HARMLESS = {
    # Where the state is, and when it moves. `use_precision_aware_optimizer` by itself keeps the state in float32.
    *("use_distributed_optimizer", "use_precision_aware_optimizer", "store_param_remainders"),
    *("overlap_param_gather", "overlap_param_gather_with_optimizer_step", "overlap_cpu_optimizer_d2h_h2d"),
    *("optimizer_offload_fraction", "use_torch_optimizer_for_cpu_offload", "pin_cpu_grads", "pin_cpu_params"),
    # policy.precision decides; masters are float32.
    *("bf16", "params_dtype"),
    # Only fp16, SGD or Muon reads them.
    *("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
    *("sgd_momentum", "muon_momentum", "muon_split_qkv", "muon_use_nesterov", "muon_scale_mode"),
    *("muon_fp32_matmul_prec", "muon_num_ns_steps", "muon_tp_mode", "muon_extra_scale_factor"),
    *("log_num_zeros_in_grad", "barrier_with_L1_time"),
}
"""Keys of megatron_cfg.optimizer that change no number of AdamW, whatever their value."""

_FLOAT32 = {"main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"}

_OFF = {
    "decoupled_lr": "embedding and head have the same learning rate; set policy.optimizer.groups",
    "decoupled_min_lr": "embedding and head have the same learning rate; set policy.optimizer.groups",
    "apply_wd_to_qk_layernorm": "no norm is decayed; set policy.optimizer.groups",
    "optimizer_cpu_offload": "the optimizer state stays with the weights; set it to false",
    "fp8_recipe": "fp8 is not supported; remove it",
    "reuse_grad_buf_for_mxfp8_param_ag": "fp8 is not supported; remove it",
}
"""Keys of megatron_cfg.optimizer that must be off -> reason and remedy."""


def megatron_optimizer(section: Mapping[str, Any], scheduler: Mapping[str, Any]) -> dict[str, Any]:
    """Return policy.optimizer for the same optimizer; ValueError with the reason if there is none.

    `scheduler` is the section beside it, which has the weight decay: InexactScheduleError if that changes.
    """
    name = str(section.get("optimizer", "adam")).lower()
    if name not in ("adam", "adamw"):
        raise ValueError(f"optimizer={name}: only adam, which is AdamW, can be translated; set policy.optimizer")
    if section.get("fp16"):
        raise ValueError("fp16=true: policy.precision is bfloat16 or float32; set fp16=false and bf16=true")
    if section.get("decoupled_weight_decay") not in (None, True):
        raise ValueError(
            "decoupled_weight_decay=false: megatron-core then adds the decay to the gradients (Adam with L2), and "
            "AdamW does not; set it to true"
        )
    for key, value in section.items():
        shown = str(value).lower() if isinstance(value, bool) else value
        if key in _OFF and value:
            raise ValueError(f"{key}={shown}: {_OFF[key]}")
        if key in _FLOAT32 and str(value or "float32").rpartition(".")[2] not in ("float32", "fp32"):
            raise ValueError(f"{key}={shown}: gradients, weights and averages are float32; remove it")
        if key not in {*_TRANSLATED, *_HARMLESS, *_FLOAT32, *_OFF, "decoupled_weight_decay"}:
            raise ValueError(f"{key}={shown}: this key is not known, so its effect would be lost; remove it")
    kwargs = {new: section[old] for old, new in _ARGUMENTS.items() if section.get(old) is not None}
    # Megatron's scheduler overwrites the optimizer's value in every step. NeMo-RL's key may be null: not set.
    decay = section.get("weight_decay")
    start, end = (
        decay if scheduler.get(f"{moment}_weight_decay") is None else scheduler[f"{moment}_weight_decay"]
        for moment in ("start", "end")
    )
    if start != end:
        raise InexactScheduleError(
            f"a weight decay that changes during the run (start_weight_decay={start}, end_weight_decay={end}) cannot "
            "be expressed; set both to one value"
        )
    if end is not None:
        kwargs["weight_decay"] = end
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
    style, peak = section.get("lr_decay_style", "linear"), optimizer.get("lr")
    if style not in ("constant", "linear", "cosine"):
        raise InexactScheduleError(f"lr_decay_style={style} cannot be expressed; use constant, linear or cosine")
    if not isinstance(peak, int | float) or not peak:
        raise InexactScheduleError(f"megatron_cfg.optimizer.lr={peak!r} is no learning rate; set it")
    warmup = section.get("lr_warmup_iters") or 0
    schedule: dict[str, Any] = {"name": style, "warmup_steps": warmup}
    if warmup:
        schedule["first_step"] = float(section.get("lr_warmup_init") or 0.0) / peak
        if schedule["first_step"] > 1:
            raise InexactScheduleError("lr_warmup_init is above the learning rate, so the rate would fall; lower it")
    if style == "constant":
        return schedule
    # The lowest rate is reached at step lr_decay_iters, counted from 0; null means the length of the run.
    end = section.get("lr_decay_iters") or steps
    if steps is None or end not in (steps, steps - 1):
        raise InexactScheduleError(
            f"lr_decay_iters={end} is not the end of the run; set it to sft.max_num_steps={steps}, or set the latter"
        )
    schedule["min_lr_at"] = "after_last_step" if end == steps else "last_step"
    return {**schedule, "min_lr_ratio": float(optimizer.get("min_lr") or 0.0) / peak}

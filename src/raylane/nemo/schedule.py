"""Translation of optimizers and learning rate schedules: torch's as NeMo-RL lists them, and those of Megatron-core.

NeMo-RL has one mapping `{name, kwargs}` or a list of them with one `{milestones: [...]}`, which become a SequentialLR
(nemo_rl/models/automodel/setup.py). Only schedules that `optim.learning_rate` computes exactly are translated. Pure
functions; called by `translate`.

A scheduler is stepped once after each optimizer step, so step t (from 0) runs at torch's value for t.

policy.megatron_cfg has an optimizer and a schedule of its own; the sizes in it are renamed, and its other keys left out
or refused, by the tables in `keys`. Facts are from examples/configs/sft.yaml of NVIDIA-NeMo/RL and from megatron-core
0.16.1 (optimizer/optimizer_config.py and optimizer_param_scheduler.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from raylane.nemo.keys import OPTIMIZER_RULES

_PREFIX = "torch.optim.lr_scheduler."


class InexactScheduleError(ValueError):
    """The message names the part that `policy.scheduler` cannot express, and the nearest setting."""


def is_torch_scheduler(value: Any) -> bool:
    """Return True for the value of `policy.scheduler` in NeMo-RL, False for one of raylane."""
    if isinstance(value, list):
        return True
    return isinstance(value, Mapping) and (
        str(value.get("name", "")).rpartition(".")[2].endswith("LR") or "kwargs" in value
    )


def translate_scheduler(value: Any, peak: float, steps: int | None) -> dict[str, Any]:
    """Return the keys of `policy.scheduler` with the same learning rates; InexactScheduleError if there are none.

    `peak` is the learning rate of the optimizer, `steps` the number of steps of the run (None: not known).
    """
    parts = value if isinstance(value, list) else [value]
    if not all(isinstance(part, Mapping) for part in parts):
        raise InexactScheduleError("each entry must be {name: ..., kwargs: {...}} or {milestones: [...]}")
    # NeMo-RL takes the last entry with milestones; a second one would be ambiguous and fails the count below.
    milestones = [number for part in parts if "name" not in part for number in part.get("milestones", ())]
    phases = []
    for part in [part for part in parts if "name" in part]:
        name = str(part["name"]).removeprefix(_PREFIX)
        set_kwargs = part.get("kwargs") or {}
        if name not in _DEFAULTS:
            raise InexactScheduleError(f"{part['name']} cannot be expressed; known are {', '.join(_DEFAULTS)}")
        unknown = set(set_kwargs) - set(_DEFAULTS[name])
        kwargs = {**_DEFAULTS[name], **set_kwargs}
        wrong = [key for key, value in kwargs.items() if isinstance(value, bool) or not isinstance(value, int | float)]
        if unknown or wrong:
            raise InexactScheduleError(
                f"{name} with {dict(set_kwargs)}: {', '.join([*sorted(unknown), *wrong])} cannot be used"
            )
        phases.append((name, kwargs))
    if not all(isinstance(number, int) for number in milestones):
        raise InexactScheduleError(f"milestones must be numbers of steps, got {milestones}")
    if len(phases) not in (1, 2) or len(milestones) != len(phases) - 1:
        raise InexactScheduleError(
            f"{len(phases)} schedulers with milestones {milestones}: only one scheduler, or a LinearLR warm-up and one "
            "other scheduler with one milestone, can be expressed"
        )
    if len(phases) == 1:
        name, kwargs = phases[0]
        # LinearLR alone rises and then stays at its end, as a constant schedule after a warm-up does.
        if name == "LinearLR" and kwargs["end_factor"] == 1:
            return {"name": "constant", **_warmup(kwargs, None)}
        return {**_decay(name, kwargs, peak, steps), "warmup_steps": 0}
    (first, warmup), (second, decay) = phases
    if first != "LinearLR":
        raise InexactScheduleError(f"{first} before {second}: the first scheduler can only be a LinearLR warm-up")
    rise = _warmup(warmup, milestones[0])
    remaining_steps = None if steps is None else steps - rise["warmup_steps"]
    return {**_decay(second, decay, peak, remaining_steps), **rise}


_DEFAULTS: dict[str, dict[str, Any]] = {  # of torch 2.13, torch/optim/lr_scheduler.py; T_max has none
    "LinearLR": {"start_factor": 1 / 3, "end_factor": 1.0, "total_iters": 5},
    "ConstantLR": {"factor": 1 / 3, "total_iters": 5},
    "CosineAnnealingLR": {"T_max": None, "eta_min": 0.0},
}


def _warmup(kwargs: dict[str, Any], milestone: int | None) -> dict[str, Any]:
    """Return the keys of a warm-up by LinearLR that ends at `milestone` (None: no scheduler follows)."""
    start, end, length = kwargs["start_factor"], kwargs["end_factor"], kwargs["total_iters"]
    if end != 1:
        raise InexactScheduleError(f"a warm-up that ends at end_factor={end}: it must end at 1.0")
    if milestone is None or milestone == length:
        return {"warmup_steps": length, "first_step": start}
    # The step at which LinearLR reaches the peak still belongs to the warm-up.
    if milestone == length + 1 and math.isclose(start, 1 / milestone, rel_tol=1e-9):
        return {"warmup_steps": milestone, "first_step": "1/w"}
    raise InexactScheduleError(
        f"a warm-up with start_factor={start}, total_iters={length} and the milestone {milestone}: the milestone must "
        f"be total_iters; the nearest setting is policy.scheduler.warmup_steps={milestone} with first_step={start}"
    )


def _decay(name: str, kwargs: dict[str, Any], peak: float, steps: int | None) -> dict[str, Any]:
    """Return the keys of the scheduler after the warm-up, which lasts for `steps` steps (None: not known)."""
    if name == "ConstantLR":
        if kwargs["factor"] != 1 and kwargs["total_iters"] > 0:
            raise InexactScheduleError(f"ConstantLR with factor={kwargs['factor']}: only 1.0 can be expressed")
        return {"name": "constant"}
    cosine = name == "CosineAnnealingLR"
    length = kwargs["T_max"] if cosine else kwargs["total_iters"]
    if not cosine and kwargs["start_factor"] != 1:
        raise InexactScheduleError(f"a LinearLR decay from start_factor={kwargs['start_factor']}: it must be 1.0")
    # torch names the lowest rate itself, raylane its fraction of the peak.
    ratio = kwargs["eta_min"] / peak if cosine else kwargs["end_factor"]
    if not 0 <= ratio <= 1:
        raise InexactScheduleError(f"{name} towards {ratio:g} of the peak: it must be between 0 and 1")
    if steps is None:
        raise InexactScheduleError(f"{name} over {length} steps needs sft.max_num_steps, so that its end is known")
    # CosineAnnealingLR rises again after T_max, so a shorter one cannot be cut off either.
    if length not in (steps, steps - 1):
        raise InexactScheduleError(
            f"{name} over {length} steps, but {steps} steps follow the warm-up: raylane's {'cosine' if cosine else ''}"
            f"{'' if cosine else 'linear'} ends with the run. Make the two equal, or set policy.scheduler.name, "
            "warmup_steps and min_lr_ratio"
        )
    return {
        "name": "cosine" if cosine else "linear",
        "min_lr_ratio": ratio,
        "min_lr_at": "after_last_step" if length == steps else "last_step",
    }


_ARGUMENTS = {"lr": "lr", "adam_eps": "eps"}
"""Key of megatron_cfg.optimizer -> argument of AdamW."""

_TRANSLATED = {"optimizer", "fp16", "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad"}
"""Keys of megatron_cfg.optimizer that this module reads; `keys.OPTIMIZER_RULES` has the others."""


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
        rule = OPTIMIZER_RULES.get(key)
        if rule is not None and not rule.harmless(value):
            raise ValueError(f"{key}={shown}: {rule.why_refused}")
        if rule is None and key not in {*_TRANSLATED, "decoupled_weight_decay"}:
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

"""torch's schedulers as NeMo-RL lists them: the translated schedule has the same learning rate at every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raylane.nemo.schedule import InexactScheduleError, is_torch_scheduler, translate_scheduler
from raylane.nemo.translate import translate
from raylane.training.config.policy import SchedulerConfig
from raylane.training.model.optim import learning_rate

PEAK, STEPS = 3e-4, 20


def phase(name: str, **kwargs: Any) -> dict[str, Any]:
    return {"name": f"torch.optim.lr_scheduler.{name}", "kwargs": kwargs}


def torchs(parts: list[dict[str, Any]], steps: int) -> list[float]:
    """Return the learning rates that NeMo-RL uses in each step, from torch itself."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    made = [
        getattr(torch.optim.lr_scheduler, part["name"].rpartition(".")[2])(optimizer, **part["kwargs"])
        for part in parts
        if "name" in part
    ]
    scheduler = made[0]
    if len(made) > 1:
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, made, parts[-1]["milestones"])
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


WARMUP = phase("LinearLR", start_factor=0.1, end_factor=1.0, total_iters=5)
SCHEDULES = {
    "cosine": [phase("CosineAnnealingLR", T_max=STEPS, eta_min=3e-5)],
    "cosine to the last step": [phase("CosineAnnealingLR", T_max=STEPS - 1)],
    "warm-up": [WARMUP],
    "warm-up, constant": [WARMUP, phase("ConstantLR", factor=1.0, total_iters=10**10), {"milestones": [5]}],
    "warm-up, cosine": [WARMUP, phase("CosineAnnealingLR", T_max=15, eta_min=1e-5), {"milestones": [5]}],
    "warm-up, linear": [
        WARMUP,
        phase("LinearLR", start_factor=1.0, end_factor=0.2, total_iters=14),
        {"milestones": [5]},
    ],
    "1/w": [
        phase("LinearLR", start_factor=0.25, total_iters=3),
        phase("CosineAnnealingLR", T_max=16),
        {"milestones": [4]},
    ],
    "constant": [phase("ConstantLR", factor=1.0)],
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_translated_schedule_has_the_rates_of_torch(name: str) -> None:
    parts = SCHEDULES[name]
    ours = SchedulerConfig(**translate_scheduler(parts, PEAK, STEPS))
    found = [learning_rate(step, PEAK, ours, STEPS) for step in range(STEPS)]
    assert found == pytest.approx(torchs(parts, STEPS), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ([WARMUP, phase("CosineAnnealingLR", T_max=9), {"milestones": [5]}], "over 9 steps, but 15 steps follow"),
        ([WARMUP, phase("CosineAnnealingLR", T_max=10), {"milestones": [10]}], "the milestone must be total_iters"),
        ([phase("OneCycleLR", max_lr=1)], "OneCycleLR cannot be expressed"),
        ([phase("CosineAnnealingLR")], "T_max cannot be used"),
        ([phase("ConstantLR", factor=0.5, total_iters=2)], "only 1.0 can be expressed"),
        ([WARMUP, WARMUP, WARMUP, {"milestones": [5, 10]}], "3 schedulers with milestones"),
        ([phase("ConstantLR", factor=1.0), WARMUP, {"milestones": [5]}], "ConstantLR before LinearLR"),
        ([phase("LinearLR", start_factor=0.5, end_factor=0.9)], "a LinearLR decay from start_factor=0.5"),
        ([phase("CosineAnnealingLR", T_max=STEPS, eta_min=1.0)], "it must be between 0 and 1"),
        ([phase("ConstantLR", factor=1.0, last_epoch=3)], "last_epoch cannot be used"),
        ([3], "each entry must be"),
        ([WARMUP, WARMUP, {"milestones": ["a"]}], "milestones must be numbers of steps"),
    ],
)
def test_inexact_schedule_is_refused_with_the_reason(parts: list[Any], told: str) -> None:
    with pytest.raises(InexactScheduleError) as error:
        translate_scheduler(parts, PEAK, STEPS)
    assert told in str(error.value)


def test_schedule_without_known_end_is_refused() -> None:
    with pytest.raises(InexactScheduleError, match=r"needs sft\.max_num_steps"):
        translate_scheduler([phase("CosineAnnealingLR", T_max=5)], PEAK, None)


def test_scheduler_in_a_document_is_replaced_or_a_problem() -> None:
    policy = {"scheduler": SCHEDULES["warm-up, cosine"], "optimizer": {"kwargs": {"lr": 1e-4}}}
    made = translate({"policy": policy, "sft": {"max_num_steps": STEPS}})
    assert made.document["policy"]["scheduler"] == {
        "name": "cosine", "min_lr_ratio": pytest.approx(0.1), "min_lr_at": "after_last_step",
        "warmup_steps": 5, "first_step": 0.1,
    }  # fmt: skip
    (problem,) = translate({"policy": policy, "sft": {"max_num_steps": 7}}).problems
    assert (problem.key, problem.must_set) == ("policy.scheduler", "policy.scheduler")


def test_own_scheduler_is_told_apart_from_torchs() -> None:
    assert not is_torch_scheduler({"name": "cosine", "warmup_steps": 3})
    assert is_torch_scheduler(phase("ConstantLR"))

"""The learning rate as a function of the step, and what the optimizer decays."""

from __future__ import annotations

import pytest
import torch

from raylane.training.config.policy import OptimizerConfig, SchedulerConfig
from raylane.training.model.optim import learning_rate, make_optimizer, set_learning_rate


def rates(total: int, **fields) -> list[float]:
    return [learning_rate(step, 1.0, SchedulerConfig(**fields), total) for step in range(total)]


def test_warm_up_rises_from_its_first_step_to_the_peak():
    assert rates(10, name="constant", warmup_steps=4) == pytest.approx([0.2, 0.4, 0.6, 0.8, *[1.0] * 6])


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_decay_ends_at_the_minimum_on_the_last_step(name):
    values = rates(11, name=name, warmup_steps=3, min_lr_ratio=0.1)
    assert values[3] == 1.0
    assert values[-1] == pytest.approx(0.1)
    assert values[3:] == sorted(values[3:], reverse=True)


def test_schedule_is_linear_and_ends_at_the_minimum():
    assert rates(5, name="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    assert learning_rate(50, 1.0, SchedulerConfig(name="cosine", min_lr_ratio=0.2), 5) == pytest.approx(0.2)
    assert rates(1, name="cosine") == [1.0]


def test_vectors_are_not_decayed_and_every_group_gets_the_rate():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    optimizer = make_optimizer(model, OptimizerConfig(kwargs={"weight_decay": 0.3, "betas": (0.8, 0.9)}))
    decayed, plain = optimizer.param_groups
    assert [tuple(p.shape) for p in decayed["params"]] == [(4, 3)]
    assert (decayed["weight_decay"], plain["weight_decay"], plain["betas"]) == (0.3, 0.0, (0.8, 0.9))
    assert len(plain["params"]) == 3
    set_learning_rate(optimizer, 0.125)
    assert {group["lr"] for group in optimizer.param_groups} == {0.125}


def torchs(scheduler_of, total):
    """Learning rates of steps 0, 1, ... that a scheduler of torch or transformers gives."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = scheduler_of(optimizer)
    values = []
    for _ in range(total):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values


def test_learning_rate_can_be_that_of_transformers():
    from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

    theirs = {"warmup_steps": 3, "first_step": "0", "min_lr_at": "after_last_step"}
    for name, make in (("cosine", get_cosine_schedule_with_warmup), ("linear", get_linear_schedule_with_warmup)):
        assert rates(10, name=name, **theirs) == pytest.approx(torchs(lambda one, make=make: make(one, 3, 10), 10))


def test_learning_rate_can_be_that_of_torch():
    from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

    theirs = {"first_step": "1/w", "min_lr_at": "after_last_step"}
    assert rates(10, **theirs) == pytest.approx(torchs(lambda one: CosineAnnealingLR(one, 10), 10))
    rise = torchs(lambda one: LambdaLR(one, lambda step: min(1.0, (step + 1) / 4)), 4)
    assert rates(9, warmup_steps=4, **theirs)[:4] == pytest.approx(rise)


def test_weight_decay_on_all_decays_vectors_too():
    model = torch.nn.LayerNorm(4)
    settings = OptimizerConfig(weight_decay_on="all", kwargs={"weight_decay": 0.3})
    assert [group["weight_decay"] for group in make_optimizer(model, settings).param_groups] == [0.3]

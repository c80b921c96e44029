"""The learning rate as a function of the step, and what the optimizer decays."""

from __future__ import annotations

import pytest
import torch

from raylane.sft.config import OptimizerConfig, SchedulerConfig
from raylane.sft.optim import learning_rate, make_optimizer, set_learning_rate


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


def test_a_line_is_a_line_and_runs_past_their_end_stay_at_the_minimum():
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

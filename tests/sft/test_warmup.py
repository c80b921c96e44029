"""The warm-up step: real sizes and the real way, and not a bit of the training state changes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from raylane.sft.data.mixing import open_rows
from raylane.sft.run.policy import SftPolicy
from raylane.training.run import step
from sft import tiny_run


def small_model():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def disturb(model, optimizer, rate=0.5):
    model(torch.randn(8, 4)).square().sum().backward()
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    random.random(), np.random.random()


def bits(value):
    return torch.as_tensor(value).numpy().tobytes()


def state_of(model, optimizer):
    """All that a step may change, as bytes."""
    saved = optimizer.state_dict()
    return {
        **{name: bits(tensor) for name, tensor in model.state_dict().items()},
        **{(number, name): bits(value) for number, values in saved["state"].items() for name, value in values.items()},
        "groups": str(saved["param_groups"]),
        "torch": bits(torch.get_rng_state()),
        "python": random.getstate(),
        "numpy": str(np.random.get_state()),
        "gradients": [parameter.grad for parameter in model.parameters()],
    }


@pytest.mark.parametrize("steps_before", [0, 2], ids=["fresh", "resumed"])
def test_state_kept_restores_every_bit(steps_before):
    model, optimizer = small_model()
    for _ in range(steps_before):
        disturb(model, optimizer)
        optimizer.zero_grad(set_to_none=True)
    before = state_of(model, optimizer)
    with step.state_kept(model, optimizer):
        disturb(model, optimizer, rate=3.0)
        assert all(value != before.get(name) for name, value in state_of(model, optimizer).items())
    assert state_of(model, optimizer) == before


def test_state_kept_restores_after_an_exception():
    model, optimizer = small_model()
    before = state_of(model, optimizer)

    def fail():
        with step.state_kept(model, optimizer):
            disturb(model, optimizer)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert state_of(model, optimizer) == before


def test_full_rows_have_keys_and_types_of_real_rows(folder):
    """R8: a warm-up batch with other keys and shapes warms up something else."""
    config, prepared = tiny_run.config_of(folder), tiny_run.prepared_in(folder)
    source = open_rows(prepared.train, config.policy, prepared.pad_id)
    real, full = source.rows([0, 1, 2]), source.full_rows(3, tiny_run.ROW_TOKENS)
    assert {name: (array.shape, array.dtype) for name, array in full.items()} == {
        name: (array.shape, array.dtype) for name, array in real.items()
    }
    assert (full["labels"][:, :-1] == full["input_ids"][:, 1:]).all()
    assert (full["labels"][:, -1] == -100).all()
    assert source.full_rows(500, 100)["input_ids"].shape == (500, 100), "more tokens than the data have"


@pytest.mark.parametrize("feed", ["workers", "driver"])
def test_steps_after_a_warm_up_are_the_same_bits(ray_session, folder, feed):
    """F10, R9: forward only, on the first start only, and timed in a process without a GPU."""
    prepared = tiny_run.prepared_in(folder)
    config = tiny_run.config_of(
        folder, {"sft.feed": feed, "cluster.num_workers": 2, "policy.compiled_graph.mode": "required"}
    )
    rows = open_rows(prepared.train, config.policy, prepared.pad_id)
    with SftPolicy(config, prepared, 6) as policy:
        plain = [policy.train_step(number)["loss"] for number in range(3)]
        saved = policy.save({"train:loss": plain[-1]})
        plain += [policy.train_step(number)["loss"] for number in range(3, 6)]
        policy.recover()
        figures = policy.warm_up(rows)
        assert figures["grad_norm"] > 0, "the backward pass ran"
        assert figures["compute_time_s"] > 0
        assert figures["supervised_tokens"] == 8 * (tiny_run.ROW_TOKENS - 1), "as large as a step can be"
        assert [policy.train_step(number)["loss"] for number in range(3)] == plain[:3]
        policy.recover()
        assert policy.load(saved.path) == 3
        policy.warm_up(rows)
        assert [policy.train_step(number)["loss"] for number in range(3, 6)] == plain[3:]


def test_warm_up_of_no_rows_does_nothing(ray_session, folder):
    prepared = tiny_run.prepared_in(folder)
    config = tiny_run.config_of(folder, {"policy.compiled_graph.warmup_gbs": 0})
    with SftPolicy(config, prepared, 2) as policy:
        assert policy.warm_up(open_rows(prepared.train, config.policy, prepared.pad_id)) is None

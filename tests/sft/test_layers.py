"""Activation checkpointing and compilation of layers: the gradients are those of a plain model."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from raylane.errors import ConfigError
from raylane.sft.data.prepare import prepare
from raylane.training.model import build
from sft import tiny_run
from sft.layouts import in_matrix

CHECKPOINTING = "policy.dtensor_cfg.activation_checkpointing"
COMPILE = {"policy.dtensor_cfg.compile_layers": True}
SHARDED = {"policy.dtensor_cfg.shard_parameters": "always"}
FOUR_LAYERS = {"policy.hf_config_overrides.num_hidden_layers": 4}


def gradients(worker, folder, changes):
    config = tiny_run.config_of(folder, changes)
    prepared = prepare(config)
    worker.setup(config, prepared, 8)
    return worker.gradients(tiny_run.global_batch(config, prepared), 2)


@pytest.mark.parametrize("sharding", [{}, SHARDED])
def test_checkpointing_changes_no_gradient(worker, folder, sharding):
    wanted = gradients(worker, folder, {**FOUR_LAYERS, **sharding})
    for choice in (True, "full", "selective", "every_other_layer"):
        tiny_run.assert_same(gradients(worker, folder, {**FOUR_LAYERS, **sharding, CHECKPOINTING: choice}), wanted)


def test_checkpointing_of_layers_is_as_configured(worker, folder):
    found = {}
    for choice in (False, "full", "selective", "every_other_layer"):
        gradients(worker, folder, {**FOUR_LAYERS, CHECKPOINTING: choice})
        found[choice] = [layer.gradient_checkpointing for layer in worker.model.causal_lm.get_decoder().layers]
    assert found == {
        False: [False] * 4,
        "full": [True] * 4,
        "selective": [True] * 4,
        "every_other_layer": [True, False, True, False],
    }


def test_selective_checkpointing_repeats_no_matrix_product(worker, folder):
    counts = {}
    for choice in (False, "selective", "full"):
        gradients(worker, folder, {CHECKPOINTING: choice})
        batch = next(tiny_run.global_batch(worker.config, worker.vocabulary).micro_batches(2))
        with FlopCounterMode(display=False) as counter:
            worker.model(batch, worker._loss).backward()
        counts[choice] = counter.get_total_flops()
        worker.optimizer.zero_grad()
    assert counts["selective"] == counts[False] < counts["full"]


# The compiler warns of itself: it uses deprecated parts of torch, and reads .grad of intermediate results.
@pytest.mark.claim("fine-tuning", "compiled layers have the gradients of plain ones")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {**SHARDED, CHECKPOINTING: "full"},
        {CHECKPOINTING: "selective"},
        *in_matrix({}, SHARDED, {CHECKPOINTING: "full"}),
    ],
)
def test_compiled_layers_have_the_gradients_of_plain_ones(worker, folder, changes):
    wanted = gradients(worker, folder, {**FOUR_LAYERS})
    torch.compiler.reset()
    found = gradients(worker, folder, {**FOUR_LAYERS, **changes, **COMPILE})
    tiny_run.assert_same(found, wanted)
    assert all(worker.train_step(number)["loss"] > 0 for number in range(2))
    assert not any("_orig_mod" in name for name, _ in worker.model.named_parameters())


def test_compilation_without_a_compiler_is_refused(worker, folder, monkeypatch):
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setenv("CXX", "icpx")
    with pytest.raises(ConfigError, match=r"compile_layers=true needs a C\+\+ compiler \(icpx or g\+\+ or clang\+\+\)"):
        gradients(worker, folder, COMPILE)


def test_unknown_checkpointing_names_the_choices(tmp_path):
    with pytest.raises(ConfigError, match="every_other_layer"):
        tiny_run.config_of(tmp_path, {CHECKPOINTING: "some"})

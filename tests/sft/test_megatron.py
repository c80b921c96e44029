"""Megatron-core as the backend: the numbers of the same Hugging Face model, on one worker and on four.

The tests of the layers need the package megatron-core and skip without it; no CUDA device is needed.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from tests.ranks import Ranks

from raylane.errors import ConfigError
from raylane.sft.data.prepare import prepare
from raylane.sft.run.policy import SftPolicy
from raylane.training.config import megatron_limits
from raylane.training.model import megatron
from raylane.training.model.attention import PackedRows, attend
from raylane.training.model.megatron import MegatronModel
from sft import tiny_run

ENABLED = {"policy.megatron_cfg.enabled": True}
HAS_MEGATRON = importlib.util.find_spec("megatron") is not None
needs_megatron = pytest.mark.skipif(not HAS_MEGATRON, reason="megatron-core is not installed (raylane[megatron])")
# Megatron-core 0.16 uses arguments that it has deprecated itself.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
STEPS = 4
MODELS = {
    "llama": {},
    "llama-scaled": {
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"head_dim": 12},
}


def changes_of(model, workers=1, tp=1, **others):
    shape = {"model_type": model.partition("-")[0], **MODELS[model]}
    return {
        **{f"policy.hf_config_overrides.{key}": value for key, value in shape.items()},
        "cluster.num_workers": workers,
        "policy.dtensor_cfg.tensor_parallel_size": tp,
        "policy.train_micro_batch_size": 2,
        "policy.optimizer.kwargs": {"lr": 1e-3, "eps": 1e-4},
        **others,
    }


def computed(worker, config, prepared):
    """Return loss and gradients of this rank's rows, the losses of some steps, and the validation loss after them."""
    worker.setup(config, prepared, 8)
    assert isinstance(worker.model, MegatronModel) is config.policy.megatron_cfg.enabled
    first = worker.gradients(worker.own_rows(0), 2)
    losses = [worker.train_step(number)["loss"] for number in range(STEPS)]
    return first, losses, worker.evaluate()["loss"]


def one_process(config, prepared):
    """Return the same of a plain Hugging Face model, without the validation loss."""
    first = tiny_run.reference_gradients(
        tiny_run.reference_model(config, prepared), tiny_run.global_batch(config, prepared)
    )
    return first, tiny_run.reference_losses(config, prepared, STEPS)


@needs_megatron
@pytest.mark.parametrize("model", MODELS)
def test_one_worker_equals_a_plain_model(worker, folder, model):
    config = tiny_run.config_of(folder, changes_of(model, **ENABLED))
    prepared = prepare(config)
    first, losses = one_process(config, prepared)
    found = computed(worker, config, prepared)
    tiny_run.assert_same(found[0], first)
    assert found[1] == pytest.approx(losses, abs=1e-5)


@pytest.fixture(scope="module")
def four():
    with Ranks(4) as ranks:
        yield ranks


@pytest.mark.claim("fine-tuning", "layers of Megatron-core equal a plain model, on two by two workers (CPUs only)")
@needs_megatron
@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_two_by_two_workers_equal_a_plain_model(four, folder, model):
    # 321 words do not divide by two workers.
    odd = {"policy.hf_config_overrides.vocab_size": 321}
    config = tiny_run.config_of(folder, changes_of(model, 4, 2, **ENABLED, **odd))
    prepared = prepare(config)
    first, losses = one_process(config, prepared)
    for found in four.run(computed, config, prepared):
        tiny_run.assert_same(found[0], first)
        assert found[1] == pytest.approx(losses, abs=1e-5)


@needs_megatron
def test_bfloat16_is_near_raylanes_own_layers(worker, folder):
    changes = changes_of("llama", **{"policy.precision": "bfloat16"})
    prepared = prepare(tiny_run.config_of(folder, changes))
    own = computed(worker, tiny_run.config_of(folder, changes), prepared)
    found = computed(worker, tiny_run.config_of(folder, {**changes, **ENABLED}), prepared)
    assert found[1] == pytest.approx(own[1], abs=2e-2)
    assert all(one.dtype == torch.float32 for one in worker.model.parameters())


def trained_and_saved(worker, config, prepared, folder):
    """Train two steps and save; return the losses of the two steps after them."""
    worker.setup(config, prepared, 8)
    for number in range(2):
        worker.train_step(number)
    worker.save_state(str(folder / "state"), 2)
    worker.save_hf(str(folder / "hf"))
    return [worker.train_step(number)["loss"] for number in (2, 3)]


def resumed(worker, config, prepared, folder):
    worker.setup(config, prepared, 8)
    assert worker.load_state(str(folder / "state")) == 2
    return [worker.train_step(number)["loss"] for number in (2, 3)]


@needs_megatron
@pytest.mark.ranks
@pytest.mark.slow
def test_checkpoints_and_folders_go_both_ways(four, folder, tmp_path):
    """From Megatron with two tensor-parallel workers to raylane's own layers, and back."""
    own = tiny_run.config_of(folder, changes_of("llama", 4))
    theirs = tiny_run.config_of(folder, changes_of("llama", 4, 2, **ENABLED))
    prepared = prepare(own)
    # AdamW's averages are compared too: they decide about the second loss.
    for name, (source, target) in {"from": (theirs, own), "to": (own, theirs)}.items():
        wanted = four.run(trained_and_saved, source, prepared, tmp_path / name)[0]
        for losses in four.run(resumed, target, prepared, tmp_path / name):
            assert losses == pytest.approx(wanted, abs=2e-5)
        start = {"policy.model_name": str(tmp_path / name / "hf"), "policy.hf_config_overrides": {}}
        start["policy.tokenizer"] = {"name": str(prepared.tokenizer_dir), "chat_template": "chatml"}
        enabled = {**ENABLED, "policy.dtensor_cfg.tensor_parallel_size": 2} if target is theirs else {}
        again = tiny_run.config_of(folder, {"cluster.num_workers": 4, **start, **enabled})
        assert four.run(first_loss, again, prepared)[0] == pytest.approx(wanted[0], abs=2e-2)


def first_loss(worker, config, prepared):
    """Return the loss of step 2 without training."""
    worker.setup(config, prepared, 8)
    return worker.gradients(worker.own_rows(2), 2)[0]


# ------------------------------------------------------------------------------------------- without the package


@pytest.mark.parametrize("how", ["whole", "filled", "stacked", "grouped"])
def test_unpack_is_the_inverse_of_pack(how):
    shapes = {"whole": [(5, 4)], "filled": [(5, 4)], "stacked": [(6, 4), (6, 4)], "grouped": [(12, 4), (6, 4), (6, 4)]}
    parts = [torch.randn(shape) for shape in shapes[how]]
    rows = sum(map(len, parts)) + (how == "filled")
    joined = torch.full((rows, 4), 7.0)
    megatron.pack(how, parts, 3, joined)
    found = megatron.unpack(how, joined, [part.shape for part in parts], 3)
    assert all(torch.equal(one, part) for one, part in zip(found, parts, strict=True))
    if how == "filled":
        assert not joined[5:].any()
    if how == "grouped":  # two groups of two query heads, a key head and a value head, each of 3 rows
        assert torch.equal(joined[:12], torch.cat([parts[0][:6], parts[1][:3], parts[2][:3]]))


def test_missing_package_is_refused_before_any_process(folder, monkeypatch):
    monkeypatch.setattr(megatron_limits, "_is_installed", lambda: False)
    config = tiny_run.config_of(folder, changes_of("llama", **ENABLED))
    with pytest.raises(ConfigError, match=r"pip install 'raylane\[megatron\]'"):
        SftPolicy(config, prepare(config), 1)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"pipeline_parallel_size": 2},
            r"pipeline_parallel_size=2 does not work .*schedules allocates on CUDA devices",
        ),
        ({"context_parallel_size": 2}, "needs the attention of Transformer Engine"),
        (
            {"tensor_parallel_size": 2, "sequence_parallel": True},
            "sequence_parallel=true .* Transformer Engine or Apex",
        ),
        ({"activation_checkpointing": "full"}, "needs the random state of a CUDA device"),
        ({"lora_cfg": {"enabled": True}}, r"lora_cfg\.enabled=true does not work with policy\.megatron_cfg"),
    ],
)
def test_settings_that_need_cuda_are_refused(folder, changes, told):
    keys = {f"policy.dtensor_cfg.{key}": value for key, value in changes.items()}
    with pytest.raises(ConfigError, match=told):
        tiny_run.config_of(folder, {**changes_of("llama", 2, **ENABLED), **keys})


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ({"model_type": "gemma"}, "a model of type 'gemma' cannot be converted"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias=True does not work"),
        ({"model_type": "llama", "attn_implementation": "sdpa"}, "needs 'raylane'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn'"),
    ],
)
def test_models_that_cannot_be_converted_are_refused(shape, told):
    (problem,) = megatron.check_shape(shape)
    assert told in problem


def test_attention_refuses_what_megatron_might_pass():
    """A bias or another mask would silently change nothing."""
    rows = PackedRows.of(torch.arange(4)[None])
    states = torch.randn(4, 1, 2, 8)
    layer = megatron._Attention(softmax_scale=0.5, layer_number=1)
    plain = layer(states, states, states, rows, attn_mask_type=SimpleNamespace(name="causal"), attention_bias=None)
    expected = attend(layer, *[states.permute(1, 2, 0, 3)] * 3, None, 0.5, packed_rows=rows)[0]
    torch.testing.assert_close(plain, expected.transpose(0, 1).flatten(2))
    for others in ({"attention_bias": torch.zeros(1)}, {"attn_mask_type": SimpleNamespace(name="padding")}):
        with pytest.raises(ConfigError, match=f"_Attention passes {next(iter(others))}, which raylane does not know"):
            layer(states, states, states, rows, **others)

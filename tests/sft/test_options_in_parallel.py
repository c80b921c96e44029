"""Training options together with tensor, context and pipeline parallelism: the numbers of one plain model."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from raylane.errors import ConfigError
from raylane.sft.data.prepare import prepare
from sft import tiny_run
from sft.layouts import in_matrix

pytestmark = [
    pytest.mark.slow,
    # PEFT 0.21 asks transformers 5.23 by an old name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

PARALLEL = {
    "tp": {"tensor_parallel_size": 2},
    "tp-sp": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "cp": {"context_parallel_size": 2},
    "pp": {"pipeline_parallel_size": 2},
}
MUON = {"policy.optimizer.name": "muon", "policy.optimizer.groups": [{"pattern": "embed", "lr_scale": 0.3}]}
BUDGET = {
    "policy.sequence_packing": {"enabled": False},
    "policy.dynamic_batching": {"enabled": True, "train_mb_tokens": 96, "sequence_length_round": 4},
}
KEY = "policy.dtensor_cfg.lora_cfg"
LORA = {KEY: {"enabled": True, "dim": 3, "alpha": 6}}
STEPS = 4


def config_of(folder, changes, parallel=None):
    keys = {f"policy.dtensor_cfg.{key}": value for key, value in (parallel or {}).items()}
    return tiny_run.config_of(folder, {**changes, "cluster.num_workers": 2, "policy.train_micro_batch_size": 1, **keys})


def train(worker, config, prepared):
    """Return the losses of some steps on one rank."""
    worker.setup(config, prepared, 8)
    return [worker.train_step(number)["loss"] for number in range(STEPS)]


@pytest.mark.parametrize("layout", ["tp-sp", "pp", *in_matrix("tp", "cp")])
def test_muon_equals_one_process(ranks, folder, layout):
    config = config_of(folder, MUON, PARALLEL[layout])
    prepared = prepare(config)
    wanted = tiny_run.reference_losses(config, prepared, STEPS)
    for losses in ranks.run(train, config, prepared):
        assert losses == pytest.approx(wanted, abs=2e-5)


@pytest.mark.parametrize("layout", ["tp-sp", "cp"])
def test_token_budget_equals_one_process(ranks, folder, layout):
    config = config_of(folder, BUDGET, PARALLEL[layout])
    prepared = prepare(config)
    wanted = tiny_run.reference_losses(config, prepared, STEPS)
    for losses in ranks.run(train, config, prepared):
        assert losses == pytest.approx(wanted, abs=2e-5)


def train_and_save(worker, config, prepared, folder):
    """Return the losses of some steps on one rank; write the model and its adapters."""
    losses = train(worker, config, prepared)
    worker.save_hf(str(folder))
    return losses


@pytest.mark.parametrize("layout", ["tp", "cp", *in_matrix("tp-sp", "pp")])
def test_adapters_equal_those_of_undivided_layers(ranks, folder, tmp_path, layout):
    plain, divided = config_of(folder, LORA), config_of(folder, LORA, PARALLEL[layout])
    prepared = prepare(plain)
    wanted = ranks.run(train_and_save, plain, prepared, tmp_path / "plain")[0]
    found = ranks.run(train_and_save, divided, prepared, tmp_path / "divided")
    assert all(losses == pytest.approx(wanted, abs=2e-5) for losses in found)
    for pattern in ("*.safetensors", "adapter/*.safetensors"):
        # The workers of a pipeline write a file each.
        mine, theirs = (
            {name: one for file in (tmp_path / run).glob(pattern) for name, one in load_file(file).items()}
            for run in ("plain", "divided")
        )
        assert sorted(mine) == sorted(theirs)
        for name, tensor in mine.items():
            torch.testing.assert_close(theirs[name], tensor, atol=1e-3, rtol=0)


@pytest.mark.parametrize("options", [MUON, LORA])
def test_shards_of_divided_layers_equal_whole_ones(ranks, four_ranks, folder, options):
    """Two workers divide each matrix, and two divide the parts once more."""
    plain = config_of(folder, options)
    prepared = prepare(plain)
    wanted = ranks.run(train, plain, prepared)[0]
    both = config_of(folder, {**options, "policy.dtensor_cfg.shard_parameters": "always"}, PARALLEL["tp-sp"])
    four_workers = both.model_copy(update={"cluster": both.cluster.model_copy(update={"num_workers": 4})})
    for losses in four_ranks.run(train, four_workers, prepared):
        assert losses == pytest.approx(wanted, abs=2e-5)


@pytest.mark.parametrize(
    ("layout", "position"),
    [
        ("tp", "pre"),
        ("tp-sp", "post"),
        *in_matrix(("tp", "post"), ("tp-sp", "pre")),
    ],
)
def test_dropout_of_adapters_equals_that_of_whole_layers(ranks, four_ranks, folder, layout, position):
    """The masks are those of undivided layers, so the losses are the same numbers."""
    settings = {**LORA[KEY], "dropout": 0.4, "dropout_position": position}
    plain = config_of(folder, {KEY: settings})
    prepared = prepare(plain)
    wanted = ranks.run(train, plain, prepared)[0]
    assert wanted != pytest.approx(ranks.run(train, config_of(folder, LORA), prepared)[0], abs=1e-4)
    both = config_of(folder, {KEY: settings}, PARALLEL[layout])
    four_workers = both.model_copy(update={"cluster": both.cluster.model_copy(update={"num_workers": 4})})
    for losses in four_ranks.run(train, four_workers, prepared):
        assert losses == pytest.approx(wanted, abs=2e-5)


def gradients(worker, config, prepared, batch):
    """Return loss and gradients of the rows of this rank."""
    worker.setup(config, prepared, 8)
    return worker.gradients(batch, 1)


@pytest.mark.claim("fine-tuning", "LoRA has the gradients of PEFT, also in a pipeline")
@pytest.mark.parametrize(
    "schedule",
    ["interleaved_zero_bubble", *in_matrix("1f1b", "gpipe", "interleaved_1f1b")],
)
def test_adapters_in_a_pipeline_have_the_gradients_of_peft(ranks, folder, tmp_path, schedule):
    from peft import PeftModel

    changes = {**LORA, "policy.hf_config_overrides.num_hidden_layers": 4}
    pipeline = {"pipeline_parallel_size": 2, "pipeline_schedule": schedule}
    config = config_of(folder, changes, pipeline)
    prepared = prepare(config)
    ranks.run(train_and_save, config, prepared, tmp_path / "hf")
    # The files of both stages are one adapter, from which PEFT and a pipeline start.
    adapter = {**LORA[KEY], "adapter_path": str(tmp_path / "hf/adapter")}
    batch = tiny_run.global_batch(config, prepared)
    found = ranks.run(gradients, config_of(folder, {**changes, KEY: adapter}, pipeline), prepared, batch)
    theirs = PeftModel.from_pretrained(
        tiny_run.reference_model(config, prepared), adapter["adapter_path"], is_trainable=True
    )
    loss, wanted = tiny_run.reference_gradients(theirs, batch)
    names = {name: name.removeprefix("base_model.model.").replace(".default", "") for name in wanted}
    trained = {names[name]: gradient for name, gradient in wanted.items() if gradient is not None}
    for one in found:
        tiny_run.assert_same(one, (loss, trained))


def refused(worker, config, prepared):
    """Return the message with which `setup` fails."""
    with pytest.raises(ConfigError) as error:
        worker.setup(config, prepared, 8)
    return str(error.value)


def test_stage_without_adapters_is_refused_by_every_rank(ranks, folder):
    config = config_of(folder, {KEY: {**LORA[KEY], "target_modules": ["model.layers.0.*"]}}, PARALLEL["pp"])
    for told in ranks.run(refused, config, prepare(config)):
        assert "adapts nothing in layers 1 to 1, which are pipeline stage 1 of 2" in told


@pytest.mark.parametrize("layout", ["tp-sp", "cp", "pp"])
def test_selective_checkpointing_equals_one_process(ranks, folder, layout):
    config = config_of(folder, {"policy.dtensor_cfg.activation_checkpointing": "selective"}, PARALLEL[layout])
    prepared = prepare(config)
    assert ranks.run(train, config, prepared)[0] == pytest.approx(
        tiny_run.reference_losses(config, prepared, STEPS), abs=2e-5
    )

"""LoRA in one worker: gradients and files against the real PEFT, state, and settings that fit no layer."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule

from raylane.errors import CheckpointError, ConfigError
from raylane.sft.data.prepare import prepare
from raylane.training.model import lora
from raylane.workers.batch import BatchDict
from sft import tiny_run

KEY = "policy.dtensor_cfg.lora_cfg"
LORA = {KEY: {"enabled": True, "dim": 4, "alpha": 8}}
# PEFT 0.21 asks transformers 5.23 by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SHARDED = {"policy.dtensor_cfg.shard_parameters": "always"}


def start(worker, folder, changes=None):
    config = tiny_run.config_of(folder, changes)
    prepared = prepare(config)
    facts = worker.setup(config, prepared, 8)
    return config, prepared, facts


def peft_model(config, prepared, adapter):
    from peft import PeftModel

    return PeftModel.from_pretrained(tiny_run.reference_model(config, prepared), adapter, is_trainable=True)


def logits(model, batch):
    """Return the logits of the first document of each row."""
    found = []
    for ids, documents in zip(batch["input_ids"], batch["document_ids"], strict=True):
        found.append(model(input_ids=ids[documents == 0][None]).logits[0])
    return torch.cat(found)


@pytest.mark.claim("fine-tuning", "LoRA has the gradients of PEFT, also in a pipeline")
@pytest.mark.parametrize("sharding", [{}, SHARDED, {"policy.dtensor_cfg.activation_checkpointing": True}])
def test_gradients_of_adapters_equal_those_of_peft(worker, folder, tmp_path, sharding):
    config, prepared, facts = start(worker, folder, {**LORA, **sharding})
    assert isinstance(worker.model, FSDPModule) is ("policy.dtensor_cfg.shard_parameters" in sharding)
    for number in range(3):
        worker.train_step(number)
    worker.save_hf(str(tmp_path / "hf"))
    batch = tiny_run.global_batch(config, prepared)
    theirs = peft_model(config, prepared, tmp_path / "hf/adapter")
    loss, wanted = tiny_run.reference_gradients(theirs, batch)
    names = {name: name.removeprefix("base_model.model.").replace(".default", "") for name in wanted}
    trained = {names[name]: gradient for name, gradient in wanted.items() if gradient is not None}
    assert facts["parameters_trained"] == sum(gradient.numel() for gradient in trained.values())
    assert all("lora_" in name for name in trained)
    tiny_run.assert_same(worker.gradients(batch, 2), (loss, trained))


def test_training_changes_adapters_only_and_learns(worker, folder):
    start(worker, folder, {**LORA, "policy.optimizer.kwargs.lr": 5e-2})
    base = {name: one.clone() for name, one in lora.base_parameters(worker.model.causal_lm).items()}
    before = worker.evaluate()["loss"]
    for number in range(8):
        worker.train_step(number)
    assert worker.evaluate()["loss"] < before - 0.1
    for name, one in lora.base_parameters(worker.model.causal_lm).items():
        assert torch.equal(one, base[name]), name


@pytest.mark.parametrize("sharding", [{}, SHARDED])
def test_files_compute_the_same_merged_and_in_peft(worker, folder, tmp_path, sharding):
    from transformers import AutoModelForCausalLM

    config, prepared, _ = start(worker, folder, {**LORA, **sharding})
    for number in range(4):
        worker.train_step(number)
    batch = tiny_run.global_batch(config, prepared)
    worker.save_hf(str(tmp_path / "hf"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert merged.config.model_type == "qwen3"
    theirs = peft_model(config, prepared, tmp_path / "hf/adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(logits(merged, batch), logits(theirs, batch), atol=1e-5, rtol=0)
        inputs = BatchDict({name: batch[name][:2] for name in ("input_ids", "position_ids")})
        first = batch["document_ids"][:2] == 0
        mine = worker.model(inputs, None)[first]
        torch.testing.assert_close(mine, logits(theirs, batch)[: len(mine)], atol=1e-5, rtol=0)
    worker._end_other_work()
    described = json.loads((tmp_path / "hf/adapter/adapter_config.json").read_text())
    assert described["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )


@pytest.mark.parametrize("sharding", [{}, SHARDED])
def test_adapter_path_continues_from_the_files(worker, folder, tmp_path, sharding):
    config, prepared, _ = start(worker, folder, {**LORA, **sharding})
    for number in range(3):
        worker.train_step(number)
    worker.save_hf(str(tmp_path / "hf"))
    batch = tiny_run.global_batch(config, prepared)
    wanted = worker.gradients(batch, 2)
    adapter = {KEY: {**LORA[KEY], "adapter_path": str(tmp_path / "hf/adapter")}}
    start(worker, folder, {**adapter, **sharding})
    found = worker.gradients(batch, 2)
    assert found[0] == wanted[0]
    assert all(torch.equal(found[1][name], one) for name, one in wanted[1].items())


@pytest.mark.parametrize("sharding", [{}, SHARDED])
def test_state_of_adapters_goes_on_bit_for_bit(worker, folder, tmp_path, sharding):
    changes = {KEY: {**LORA[KEY], "dropout": 0.2}, **sharding}
    start(worker, folder, changes)
    for number in range(3):
        worker.train_step(number)
    worker.save_state(str(tmp_path / "state"), 3)
    wanted = [worker.train_step(number)["loss"] for number in range(3, 8)]
    start(worker, folder, changes)
    assert worker.warm_up(2, 32)["loss"] > 0
    assert worker.load_state(str(tmp_path / "state")) == 3
    assert [worker.train_step(number)["loss"] for number in range(3, 8)] == wanted


def test_model_folder_with_adapters_has_the_same_start(worker, folder, tmp_path):
    """The base is read under its own names, and adapters do not depend on where the base came from."""
    config, prepared, _ = start(worker, folder, SHARDED)
    worker.save_hf(str(tmp_path / "base"))
    start(worker, folder, LORA)
    batch = tiny_run.global_batch(config, prepared)
    wanted = worker.gradients(batch, 2)
    changes = {"policy.model_name": str(tmp_path / "base"), "policy.hf_config_overrides": {}, "policy.tokenizer": {}}
    for sharding in ({}, SHARDED):
        start(worker, folder, {**changes, **LORA, **sharding})
        tiny_run.assert_same(worker.gradients(batch, 2), wanted)


def test_bfloat16_adapters_keep_float32_masters(worker, folder):
    start(worker, folder, {**LORA, "policy.precision": "bfloat16"})
    for number in range(2):
        worker.train_step(number)
    assert {one.dtype for one in worker.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("position", ["pre", "post"])
def test_dropout_is_on_in_training_only(worker, folder, position):
    changes = {KEY: {**LORA[KEY], "dropout": 0.5, "dropout_position": position, "lora_A_init": "xavier"}}
    config, prepared, _ = start(worker, folder, changes)
    worker.train_step(1)  # while B is zero, dropout changes nothing
    batch = tiny_run.global_batch(config, prepared)
    losses = {worker.gradients(batch, 2)[0] for _ in range(2)}
    assert len(losses) == 2
    assert worker.evaluate() == worker.evaluate()


@pytest.mark.parametrize(
    ("settings", "adapted"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, {"q_proj", "v_proj"}),
        ({"target_modules": "*.mlp.*"}, {"gate_proj", "up_proj", "down_proj"}),
        ({"exclude_modules": ["*.mlp.*"]}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ({"target_modules": "model.layers.1.self_attn.o_proj"}, {"o_proj"}),
    ],
)
def test_patterns_choose_the_layers(folder, tmp_path, worker, settings, adapted):
    start(worker, folder, {KEY: {**LORA[KEY], **settings}})
    names = lora.adapted(worker.model.causal_lm)
    assert {name.rpartition(".")[2] for name in names} == adapted
    worker.save_hf(str(tmp_path / "hf"))
    targets = json.loads((tmp_path / "hf/adapter/adapter_config.json").read_text())["target_modules"]
    assert set(targets) == (set(names) if len(names) == 1 else adapted)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"target_modules": ["q_prj"]}, r"target_modules: 'q_prj' matches no linear layer.*did you mean 'q_proj'"),
        ({"target_modules": ["lm_head"]}, "the output head cannot be adapted"),
        ({"exclude_modules": ["nothing"]}, "exclude_modules: 'nothing' matches no linear layer"),
        ({"exclude_modules": ["*"]}, "leaves no linear layer to adapt"),
        ({"match_all_linear": False}, "nothing would be trained; name linear layers"),
    ],
)
def test_patterns_that_choose_nothing_are_refused(folder, worker, settings, told):
    with pytest.raises(ConfigError, match=told):
        start(worker, folder, {KEY: {**LORA[KEY], **settings}})


def test_adapters_of_another_kind_are_refused(worker, folder, tmp_path):
    start(worker, folder, LORA)
    worker.save_hf(str(tmp_path / "hf"))
    adapter = tmp_path / "hf/adapter"

    def told(settings, words, path=adapter):
        with pytest.raises(CheckpointError, match=words):
            start(worker, folder, {KEY: {**LORA[KEY], **settings, "adapter_path": str(path)}})

    told({"dim": 2}, r"lora_cfg\.dim is 2, and the adapters in .* have 4")
    told({"alpha": 2}, r"lora_cfg\.alpha is 2, and the adapters in .* have 8")
    told({"target_modules": ["q_proj"]}, "belong to other layers: .*only in the files")
    told({}, "cannot be read: .*No such file", tmp_path)
    described = json.loads((adapter / "adapter_config.json").read_text())
    shutil.copytree(adapter, tmp_path / "dora")
    (tmp_path / "dora/adapter_config.json").write_text(json.dumps({**described, "use_dora": True}))
    told({}, "have use_dora=True, which is not supported", tmp_path / "dora")
    (adapter / "adapter_model.safetensors").write_bytes(b"nothing")
    told({}, "adapters in .* cannot be read")


def test_adapter_file_holds_adapters_alone(worker, folder, tmp_path):
    start(worker, folder, LORA)
    worker.save_hf(str(tmp_path / "hf"))
    stored = load_file(tmp_path / "hf/adapter/adapter_model.safetensors")
    assert len(stored) == 2 * len(lora.adapted(worker.model.causal_lm))
    assert all(name.endswith(("lora_A.weight", "lora_B.weight")) for name in stored)
    assert not any("lora" in name for name in load_file(tmp_path / "hf/model-00001-of-00001.safetensors"))

"""`raylane export`: folders of checkpoints, merged and as adapters, made without Ray and without a worker."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from tests.ranks import only_worker

from raylane.cli import main
from raylane.errors import CheckpointError, ConfigError
from raylane.sft.data.prepare import prepare
from raylane.sft.run.export import export_checkpoint
from raylane.training.checkpoint import export, folders, publishing
from raylane.training.config.load import dump
from sft import tiny_run

LORA = {"policy.dtensor_cfg.lora_cfg": {"enabled": True, "dim": 4, "alpha": 8}}


@pytest.fixture(scope="module")
def made(folder):
    """Folder -> checkpoints "plain" (with hf) and "lora" (two steps each), saved by a worker that has ended."""
    with only_worker() as worker:
        for name, changes in (("plain", {}), ("lora", LORA)):
            config = tiny_run.config_of(
                folder,
                {**changes, "policy.hf_config_overrides.attention_bias": True, "policy.optimizer.kwargs.lr": 0.1},
            )
            prepared = prepare(config)
            worker.setup(config, prepared, 8)
            worker.train_step(0)
            worker.train_step(1)
            partial = publishing.begin(folder / name, 2)
            worker.save_state(str(partial / "state"), 2)
            saved = folders.commit(partial, 2, {}, {**dump(config), "prepared": prepared.train.parent.name})
            worker.save_hf(str(saved.path / "hf"))
    return folder


def weights(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.claim("fine-tuning", "an exported checkpoint equals the Hugging Face folder that the workers write")
@pytest.mark.parametrize("name", ["plain", "lora"])
def test_export_equals_the_folder_that_the_workers_write(made, tmp_path, monkeypatch, name):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setattr(export, "_BYTES_PER_FILE", 30_000)  # several files
    step, out = made / name / "step_2", tmp_path / "out"
    assert export_checkpoint(step, out) == out
    assert len(list(out.glob("model-*.safetensors"))) > 1
    wanted = weights(step / "hf")
    found = weights(out)
    assert sorted(found) == sorted(wanted)
    for one, tensor in wanted.items():
        torch.testing.assert_close(found[one], tensor, atol=1e-7, rtol=1e-6)
    for file in ("config.json", "generation_config.json", "chat_template.jinja"):
        assert (out / file).read_text() == (step / "hf" / file).read_text()
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert all(torch.equal(one, found[key]) for key, one in loaded.named_parameters())
    assert AutoTokenizer.from_pretrained(out).chat_template is not None


def test_export_in_bfloat16_rounds_the_weights(made, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    step, out = made / "plain/step_2", tmp_path / "out"
    assert main(["export", str(step), "--out", str(out), "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out.strip().endswith(str(out))
    wanted = weights(step / "hf")
    assert all(torch.equal(one, wanted[name].bfloat16()) for name, one in weights(out).items())
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16


def test_export_of_adapters_equals_those_of_the_workers(made, tmp_path):
    step, out = made / "lora/step_2", tmp_path / "out"
    export_checkpoint(step, out, "adapter")
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (out / file).read_bytes() == (step / "hf/adapter" / file).read_bytes()
    with pytest.raises(ConfigError, match=r"was trained without LoRA, so it has no adapters. Use --form merged"):
        export_checkpoint(made / "plain/step_2", tmp_path / "no", "adapter")
    assert not list(tmp_path.glob("no*"))


def test_export_without_the_token_cache_uses_the_hf_folder(made, tmp_path):
    step = tmp_path / "step_2"
    shutil.copytree(made / "plain/step_2", step)
    run = json.loads((step / "run.json").read_text())
    run["config"]["data"]["cache_dir"] = str(tmp_path / "gone")
    (step / "run.json").write_text(json.dumps(run))
    export_checkpoint(step, tmp_path / "out")
    assert (tmp_path / "out/config.json").read_text() == (step / "hf/config.json").read_text()
    shutil.rmtree(step / "hf")
    with pytest.raises(
        CheckpointError, match=r"the tokenizer of .*step_2 is missing: neither .*gone.* nor .*hf exists"
    ):
        export_checkpoint(step, tmp_path / "other")


def test_export_refuses_what_it_cannot_use(made, tmp_path):
    step = made / "plain/step_2"
    with pytest.raises(ConfigError, match="exists already"):
        export_checkpoint(step, tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint folder"):
        export_checkpoint(tmp_path / "step_3", tmp_path / "out")
    damaged = tmp_path / "step_2"
    shutil.copytree(step, damaged)
    (damaged / "state/.metadata").write_bytes(b"x" * (damaged / "state/.metadata").stat().st_size)
    with pytest.raises(CheckpointError, match="is damaged"):
        export_checkpoint(damaged, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_on_a_full_disk_leaves_nothing(made, tmp_path, monkeypatch):
    """A full disk leaves no folder that looks like a model."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "write_beside", full)
    with pytest.raises(CheckpointError, match=r"out cannot be written: .*No space left"):
        export_checkpoint(made / "plain/step_2", tmp_path / "out")
    assert not list(tmp_path.iterdir())

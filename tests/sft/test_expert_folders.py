"""Folders of models with experts: read in the names in which they are published, and saved in the same names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from raylane.errors import CheckpointError
from raylane.sft.data.prepare import prepare
from raylane.training.checkpoint.export import Companions, export_state
from raylane.training.checkpoint.folders import Saved
from raylane.training.model.stored_form import read_sources
from raylane.workers.batch import BatchDict
from sft import tiny_run
from sft.model_types import EXPERTS, TYPES, folder_changes, new_folder

QUICK = ("qwen3_moe", "gpt_oss", "deepseek_v3")
IDS = torch.arange(2, 22)[None]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: values for file in folder.glob("*.safetensors") for name, values in load_file(file).items()}


def start(worker, folder: Path, model_folder: Path, changes=None):
    """Set up the worker for a model folder; return the configuration of the run."""
    config = tiny_run.config_of(folder, {**folder_changes(folder, model_folder), **(changes or {})})
    worker.setup(config, prepare(config), 8)
    return config


@pytest.mark.parametrize("model_type", TYPES)
def test_folder_is_exported_as_it_was_published(worker, folder, tmp_path, model_type):
    plain = new_folder(tmp_path / "published", model_type, TYPES[model_type])
    start(worker, folder, tmp_path / "published")
    worker.save_hf(str(tmp_path / "exported"))
    published, exported = tensors(tmp_path / "published"), tensors(tmp_path / "exported")
    assert set(exported) == set(published)
    assert all(torch.equal(exported[name], values) for name, values in published.items())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert torch.equal(again(IDS).logits, plain(IDS).logits)


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in TYPES]
)
def test_adapters_are_merged_into_published_weights(worker, folder, tmp_path, model_type):
    new_folder(tmp_path / "published", model_type, TYPES[model_type])
    lora = {"enabled": True, "dim": 4, "alpha": 8.0}
    start(worker, folder, tmp_path / "published", {"policy.dtensor_cfg.lora_cfg": lora})
    worker.train_step(0)
    worker.save_hf(str(tmp_path / "exported"))
    published, exported = tensors(tmp_path / "published"), tensors(tmp_path / "exported")
    assert {name: values.shape for name, values in exported.items()} == {
        name: values.shape for name, values in published.items()
    }
    changed = {name for name, values in published.items() if not torch.equal(exported[name], values)}
    assert changed, "the adapters were trained"
    assert not any(".experts." in name for name in changed), "only linear layers are adapted"
    batch = BatchDict(input_ids=IDS, position_ids=torch.arange(20)[None])
    with torch.no_grad():
        logits = worker.model.eval()(batch, None)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")(IDS).logits
    assert float((logits - merged).norm()) < 1e-5 * float(merged.norm())


def rewritten(folder: Path, change) -> Path:
    """Change the tensors of a folder of one file in place; return the folder."""
    (file,) = folder.glob("*.safetensors")
    save_file(change(load_file(file)), file, {"format": "pt"})
    return folder


def stacked(values: dict[str, torch.Tensor], layers: int = 2) -> dict[str, torch.Tensor]:
    """Return the weights of a Qwen3 model with the experts of each layer stacked by hand, as the model keeps them."""
    experts = {name for name in values if ".experts." in name}
    result = {name: tensor for name, tensor in values.items() if name not in experts}
    for layer in range(layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        of = {
            kind: torch.stack([values[f"{prefix}{number}.{kind}_proj.weight"] for number in range(4)])
            for kind in ("gate", "up", "down")
        }
        result[f"{prefix}gate_up_proj"] = torch.cat([of["gate"], of["up"]], dim=1)
        result[f"{prefix}down_proj"] = of["down"]
    return result


def test_folder_with_stacked_experts_is_read_too(worker, folder, tmp_path):
    """raylane wrote such folders before it knew the published names."""
    plain = new_folder(tmp_path, "qwen3_moe", EXPERTS["qwen3_moe"])
    start(worker, folder, rewritten(tmp_path, stacked))
    loaded = dict(worker.model.causal_lm.named_parameters())
    assert all(torch.equal(loaded[name], weight) for name, weight in plain.named_parameters())


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe"])
def test_part_of_stacked_experts_reads_these_experts_only(tmp_path, model_type):
    plain, seen = new_folder(tmp_path, model_type, EXPERTS[model_type]), []
    published, weights = tensors(tmp_path), dict(plain.named_parameters())

    def read(name: str) -> torch.Tensor:
        seen.append(name)
        return published[name]

    sources = read_sources(plain, weights, published)
    for name in ("model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"):
        assert torch.equal(sources[name].convert(plain, read, slice(1, 3)), weights[name][1:3])
    assert {name.split(".experts.")[1].split(".")[0] for name in seen} == {"1", "2"}
    assert len(seen) == len(set(seen)) == 6


EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: {name: values[name] for name in values if name != EXPERT}, r"holds 3 weights .* 4 experts"),
        (
            lambda values: {**values, EXPERT: values[EXPERT][:5].clone()},
            r"layers\.1\.mlp\.experts\.gate_up_proj cannot",
        ),
        (lambda values: {**values, EXPERT: values[EXPERT].to(torch.int8)}, r"quantised model \(.*experts\.2.* is I8"),
        (lambda values: {**values, **stacked(values)}, r"holds .*layers\.0\.mlp\.experts.* twice"),
        (
            lambda values: {name.replace("_proj.weight", "_proj.weight_scales"): values[name] for name in values},
            r"lacks .* The folder holds a quantised model",
        ),
    ],
    ids=["missing", "misshapen", "quantised", "twice", "scales"],
)
def test_folder_with_wrong_experts_is_refused(worker, folder, tmp_path, change, message):
    new_folder(tmp_path, "qwen3_moe", EXPERTS["qwen3_moe"])
    with pytest.raises(CheckpointError, match=message):
        start(worker, folder, rewritten(tmp_path, change))


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3"])
def test_checkpoint_is_exported_as_it_was_published(worker, folder, tmp_path, model_type):
    """Without the folder that the run started from: the buffers of routers are part of the state."""
    new_folder(tmp_path / "published", model_type, EXPERTS[model_type])
    config = start(worker, folder, tmp_path / "published")
    worker.save_state(str(tmp_path / "step/state"), 1)
    hf_config = worker.model.causal_lm.config
    companions = Companions(tiny_run.prepared_in(folder).tokenizer_dir, [1], None, torch.bfloat16)
    saved = Saved(1, tmp_path / "step", {}, {})
    export_state(saved, tmp_path / "out", config.policy, hf_config, companions, "merged")
    published, exported = tensors(tmp_path / "published"), tensors(tmp_path / "out")
    assert set(exported) == set(published)
    for name, values in published.items():
        dtype = torch.float32 if "e_score_correction_bias" in name else torch.bfloat16
        assert torch.equal(exported[name], values.to(dtype)), name

"""Which files of a Hugging Face folder are read: the index decides, and nothing is chosen by the order of a listing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from raylane.errors import CheckpointError
from raylane.training.model import hf_reader
from raylane.training.model.hf_reader import INDEX, read_weights, warn_of_unused, weight_files
from sft import tiny_run

ONE = {"a": torch.full((2, 2), 1.0)}
TWO = {"b": torch.full((3,), 2.0)}


def write(folder: Path, files: dict[str, dict[str, torch.Tensor]], index: dict[str, str] | None) -> Path:
    folder.mkdir(exist_ok=True)
    for name, tensors in files.items():
        save_file(tensors, folder / name, {"format": "pt"})
    if index is not None:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}), encoding="utf-8")
    return folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    shapes = {}
    for name, file in weight_files(folder).items():
        with safe_open(file, framework="pt") as stored:
            shapes[name] = stored.get_slice(name).get_shape()
    model = torch.nn.Module()
    for name, shape in shapes.items():
        model.register_parameter(name, torch.nn.Parameter(torch.full(shape, torch.nan)))
    warn_of_unused(model, folder, weight_files(folder))
    read_weights(model, folder, weight_files(folder))
    return {name: value.detach() for name, value in model.named_parameters()}


STRAY = {"zz.safetensors": {"a": torch.zeros(2, 2), "b": torch.zeros(3), "c": torch.zeros(1)}}


@pytest.mark.parametrize("stray", ["zz.safetensors", "consolidated.safetensors", "model.safetensors"])
def test_file_beside_an_index_is_not_read(tmp_path, caplog, stray):
    files = {"model-1.safetensors": ONE, "model-2.safetensors": TWO, stray: STRAY["zz.safetensors"]}
    found = read(write(tmp_path, files, {"a": "model-1.safetensors", "b": "model-2.safetensors"}))
    assert {name: set(values.flatten().tolist()) for name, values in found.items()} == {"a": {1.0}, "b": {2.0}}
    # transformers reads this one first, so both programs would not train the same model.
    assert ("holds model.safetensors beside" in caplog.text) is (stray == "model.safetensors")


def test_weight_in_two_indexed_files_is_read_from_its_own(tmp_path):
    files = {"model-1.safetensors": ONE, "model-2.safetensors": {**TWO, "a": torch.zeros(2, 2)}}
    for file, expected in (("model-1.safetensors", 1.0), ("model-2.safetensors", 0.0)):
        found = read(write(tmp_path, files, {"a": file, "b": "model-2.safetensors"}))
        assert set(found["a"].flatten().tolist()) == {expected}


def test_unreadable_stray_file_is_not_opened(tmp_path):
    folder = write(tmp_path, {"model-1.safetensors": ONE}, {"a": "model-1.safetensors"})
    (folder / "broken.safetensors").write_bytes(b"not safetensors")
    assert set(weight_files(folder)) == {"a"}


@pytest.mark.parametrize(
    ("files", "index", "message"),
    [
        ({"x.safetensors": ONE, "y.safetensors": ONE}, None, r"holds a twice, in x\.safetensors and in y\.safetensors"),
        ({"model-1.safetensors": ONE}, {"a": "model-1.safetensors", "b": "gone.safetensors"}, r"names the file gone\."),
        ({"model-1.safetensors": ONE}, {"a": "model-1.safetensors", "b": "model-1.safetensors"}, r"does not hold b"),
        ({"model-1.safetensors": ONE}, {"a": "../model-1.safetensors"}, r"names '\.\./model-1\.safetensors', which is"),
        ({"model-1.safetensors": ONE}, {}, r"names no weights"),
        ({}, None, r"holds no \.safetensors file"),
    ],
)
def test_folder_without_a_clear_file_is_refused(tmp_path, files, index, message):
    with pytest.raises(CheckpointError, match=message):
        weight_files(write(tmp_path, files, index))


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_damaged_index_is_refused(tmp_path, text):
    write(tmp_path, {"model-1.safetensors": ONE}, None)
    (tmp_path / INDEX).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read"):
        weight_files(tmp_path)


def tied_llama(is_tied: bool) -> LlamaForCausalLM:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=10, **sizes, tie_word_embeddings=is_tied))


@pytest.mark.parametrize("difference", [0.0, 1e-3])
def test_head_that_differs_from_a_tied_embedding_is_refused(tmp_path, monkeypatch, difference):
    """transformers keeps both of them, and this reader dropped the head without a word."""
    monkeypatch.setattr(hf_reader, "_COMPARED", 16, raising=False)
    tied_llama(is_tied=True).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    head = stored["model.embed_tokens.weight"].clone()
    head[-1, -1] += difference
    save_file({**stored, "lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
    if difference:
        with pytest.raises(CheckpointError, match=r"lm_head\.weight with other values .*tie_word_embeddings=false"):
            read_weights(tied_llama(is_tied=True), tmp_path, weight_files(tmp_path))
        untied = tied_llama(is_tied=False)
        read_weights(untied, tmp_path, weight_files(tmp_path))
        assert torch.equal(untied.lm_head.weight, head)
    else:
        tied = tied_llama(is_tied=True)
        read_weights(tied, tmp_path, weight_files(tmp_path))
        assert torch.equal(tied.lm_head.weight, head)


def test_weights_without_a_place_in_the_model_are_named(tmp_path, caplog):
    """A folder of another model was used in part, without a word."""
    tied_llama(is_tied=True).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    save_file({**stored, **buffer}, tmp_path / "model.safetensors", {"format": "pt"})
    warn_of_unused(tied_llama(is_tied=True), tmp_path, weight_files(tmp_path))
    assert not caplog.text
    lost = {f"model.layers.{number}.mlp.up_proj.weight": torch.ones(8, 8) for number in (3, 4)}
    save_file({**stored, **lost}, tmp_path / "model.safetensors", {"format": "pt"})
    warn_of_unused(tied_llama(is_tied=True), tmp_path, weight_files(tmp_path))
    assert "holds 2 weights that LlamaForCausalLM has no place for, such as model.layers.3.mlp" in caplog.text


def test_run_beside_a_stray_file_starts_from_the_index(worker, folder, tmp_path):
    """Zeros in a file that sorts last were trained without a word."""
    config = tiny_run.config_of(folder)
    prepared = tiny_run.prepared_in(folder)
    worker.setup(config, prepared, 8)
    worker.save_hf(str(tmp_path / "hf"))
    weights = {name: one.detach().clone() for name, one in worker.model.causal_lm.named_parameters()}
    save_file({name: torch.zeros_like(one) for name, one in weights.items()}, tmp_path / "hf/zz.safetensors")
    for one in worker.model.causal_lm.parameters():
        torch.nn.init.constant_(one, 5.0)
    read_weights(worker.model.causal_lm, tmp_path / "hf", weight_files(tmp_path / "hf"))
    assert all(torch.equal(one, weights[name]) for name, one in worker.model.causal_lm.named_parameters())

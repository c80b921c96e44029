"""One worker in this very process: its gradients against a plain Hugging Face model, its files, its self-check."""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from raylane.errors import (
    CheckpointDamagedError,
    CheckpointError,
    ConfigError,
    StepNotFiniteError,
    WorkerCallError,
)
from raylane.sft.data.mixing import open_rows
from raylane.sft.data.prepare import prepare
from raylane.sft.run import selfcheck
from raylane.training.checkpoint import state as state_module
from raylane.training.model import attention
from raylane.training.model.loss import CrossEntropy
from sft import tiny_run


def start(worker, folder, changes=None):
    config = tiny_run.config_of(folder, changes)
    prepared = prepare(config)
    worker.setup(config, prepared, 8)
    return config, prepared


@pytest.mark.claim("fine-tuning", "packed documents have the gradients of single documents")
@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama"])
def test_packed_gradients_equal_those_of_single_documents(worker, folder, model_type):
    """Packing cross-contamination and wrong normalisation (users' complaints 2 and 3) both show here."""
    config, prepared = start(worker, folder, {"policy.hf_config_overrides.model_type": model_type})
    batch = tiny_run.global_batch(config, prepared)
    assert int(batch["document_ids"].max()) >= 1, "rows hold several documents, or this shows nothing"
    wanted = tiny_run.reference_gradients(tiny_run.reference_model(config, prepared), batch)
    tiny_run.assert_same(worker.gradients(batch, 2), wanted)


def test_memory_options_change_no_gradient(worker, folder):
    changes = {"policy.hf_config_overrides.tie_word_embeddings": False}
    config, prepared = start(worker, folder, changes)
    batch = tiny_run.global_batch(config, prepared)
    wanted = tiny_run.reference_gradients(tiny_run.reference_model(config, prepared), batch)
    for rows in (1, 4, 8):
        tiny_run.assert_same(worker.gradients(batch, rows), wanted)
    for key, value in (("policy.loss_chunk_tokens", None), ("policy.dtensor_cfg.activation_checkpointing", True)):
        start(worker, folder, {**changes, key: value})
        tiny_run.assert_same(worker.gradients(batch, 2), wanted)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("policy.hf_config_overrides.attn_implementation", "eager"),
        ("policy.dtensor_cfg.shard_parameters", "always"),
        ("policy.dtensor_cfg.reduce_every_micro_batch", True),
    ],
)
def test_gradients_are_the_same_whatever_computes_or_reduces(worker, folder, key, value):
    config, prepared = start(worker, folder, {key: value})
    assert isinstance(worker.model, FSDPModule) is ("dtensor_cfg" in key), "one worker shards only if it must"
    batch = tiny_run.global_batch(config, prepared)
    wanted = tiny_run.reference_gradients(tiny_run.reference_model(config, prepared), batch)
    tiny_run.assert_same(worker.gradients(batch, 2), wanted)
    implementation = config.policy.hf_config_overrides.get("attn_implementation", "raylane")
    assert worker.model.causal_lm.config._attn_implementation == implementation


def test_the_same_documents_unpacked_give_the_same_gradients(worker, folder):
    config, prepared = start(worker, folder)
    batch = tiny_run.global_batch(config, prepared)
    packed = worker.gradients(batch, 4)
    rows = []
    for index in range(batch.size):
        for document in range(int(batch["document_ids"][index].max()) + 1):
            own = batch["document_ids"][index] == document
            rows.append({name: values[index][own] for name, values in batch.items()})
    fills = {"input_ids": prepared.pad_id, "labels": -100, "document_ids": -1, "position_ids": 0}
    alone = tiny_run.BatchDict.from_batches(
        [{name: values[None] for name, values in row.items()} for row in rows], pad_values=fills
    )
    tiny_run.assert_same(worker.gradients(alone, 1), packed)


def test_rows_with_nothing_supervised_count_for_nothing(worker, folder):
    config, prepared = start(worker, folder)
    batch = tiny_run.global_batch(config, prepared)
    wanted = worker.gradients(batch, 4)
    padded = batch.pad(12, fill={"input_ids": prepared.pad_id, "labels": -100, "document_ids": -1})
    tiny_run.assert_same(worker.gradients(padded, 4), wanted)


def test_training_learns_and_reports_what_it_did(worker, folder):
    start(worker, folder)
    before = worker.evaluate()["loss"]
    steps = [worker.train_step(number) for number in range(8)]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert worker.evaluate()["loss"] < before - 0.5
    first, second = steps[:2]
    assert first["dispatch_time_s"] == 0.0
    assert second["step_time_s"] == pytest.approx(
        second["data_time_s"] + second["dispatch_time_s"] + second["compute_time_s"]
    )
    assert 0 < first["supervised_tokens"] < first["tokens"] <= 8 * tiny_run.ROW_TOKENS


def test_validation_counts_every_token_once_whatever_the_batch(worker, folder):
    """The last, partial batch is filled with rows that count for nothing, not dropped."""
    start(worker, folder)
    whole = worker.evaluate()
    start(worker, folder, {"sft.val_global_batch_size": 3, "sft.val_micro_batch_size": 1})
    parts = worker.evaluate()
    assert parts["supervised_tokens"] == whole["supervised_tokens"]
    assert parts["loss"] == pytest.approx(whole["loss"], abs=1e-6)


def test_bfloat16_keeps_float32_masters_and_comes_close(worker, folder):
    config, prepared = start(worker, folder)
    batch = tiny_run.global_batch(config, prepared)
    exact, _ = worker.gradients(batch, 2)
    start(worker, folder, {"policy.precision": "bfloat16"})
    loss, gradients = worker.gradients(batch, 2)
    assert loss != exact
    assert loss == pytest.approx(exact, abs=0.02)
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    worker.train_step(0)


@pytest.mark.parametrize(
    ("capability", "precision", "warned"),
    [("AVX2", "bfloat16", True), ("AVX512", "bfloat16", False), ("AVX2", "float32", False)],
)
def test_slow_bfloat16_of_a_cpu_without_avx512_is_told(
    worker, folder, monkeypatch, caplog, capability, precision, warned
):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    start(worker, folder, {"policy.precision": precision})
    assert ("set policy.precision=float32" in caplog.text) is warned


def test_clipping_reports_the_norm_before_and_none_never_clips(worker, folder):
    start(worker, folder, {"policy.max_grad_norm": None})
    free = worker.train_step(0)
    start(worker, folder, {"policy.max_grad_norm": 0.01})
    clipped = worker.train_step(0)
    assert clipped["grad_norm"] == pytest.approx(free["grad_norm"], rel=1e-6)
    assert clipped["grad_norm"] > 0.01


@pytest.mark.parametrize("changes", [{}, {"policy.loss_chunk_tokens": None}], ids=["chunked", "whole"])
def test_accuracy_and_perplexity_equal_those_of_transformers(worker, folder, changes):
    config, prepared = start(worker, folder, changes)
    for number in range(6):
        metrics = worker.train_step(number)
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    model = tiny_run.reference_model(config, prepared)
    model.load_state_dict(worker.model.causal_lm.state_dict())
    rows = open_rows(prepared.validation, config.policy, prepared.pad_id)
    right, supervised, loss = 0, 0, 0.0
    for tokens, learned in (rows.cache.document(number) for number in range(len(rows.cache))):
        ids, places = torch.from_numpy(tokens.astype("int64"))[None], torch.from_numpy(learned.copy())[1:]
        with torch.no_grad():
            logits, labels = model(input_ids=ids).logits[0, :-1][places], ids[0, 1:][places]
        right += int((logits.argmax(dim=-1) == labels).sum())
        supervised += len(labels)
        loss += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
    measured = worker.evaluate()
    assert measured["token_accuracy"] == pytest.approx(right / supervised, abs=1e-12)
    assert 0.1 < measured["token_accuracy"] < 0.9
    assert measured["perplexity"] == pytest.approx(math.exp(loss / supervised), rel=1e-5)


def test_a_step_that_is_not_finite_touches_no_weight(worker, folder):
    config, prepared = start(worker, folder)
    worker.add_loss("broken", lambda logits, batch: logits.sum() * float("nan"))
    batch = tiny_run.global_batch(config, prepared)
    before = worker.gradients(batch, 2)[0]
    with pytest.raises(StepNotFiniteError, match=r"^step 6 failed: loss nan.*weights are unchanged") as caught:
        worker.train_batch(batch, 5, "broken", 2, False)
    assert isinstance(caught.value, FloatingPointError)
    assert worker.gradients(batch, 2)[0] == before


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_skipped_step_changes_neither_weights_nor_optimizer(worker, folder, optimizer):
    changes = {"sft.on_nan": "skip", "policy.optimizer.name": optimizer}
    config, prepared = start(worker, folder, changes)
    batch = tiny_run.global_batch(config, prepared)
    worker.train_step(0)
    expected = worker.train_step(2)["loss"], worker.train_step(3)["loss"]
    start(worker, folder, changes)
    worker.train_step(0)
    worker.add_loss("infinite", lambda logits, batch: logits.sum() * float("inf"))
    metrics = worker.train_batch(batch, 1, "infinite", 2, False)
    assert metrics["skipped"] == 1.0
    assert not math.isfinite(metrics["loss"])
    following = worker.train_step(2)
    assert "skipped" not in following
    assert (following["loss"], worker.train_step(3)["loss"]) == expected, "bit for bit"


def whole(parameter):
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def test_no_step_runs_after_one_that_failed(worker, folder):
    """Its gradients would be added to those of the next one."""
    start(worker, folder)

    def fail(logits, batch):
        raise RuntimeError("no loss")

    worker.add_loss("fail", fail)
    rows = worker.own_rows(0)
    with pytest.raises(RuntimeError, match="no loss"):
        worker.train_batch(rows, 0, "fail", None, False)
    with pytest.raises(WorkerCallError, match=r"an earlier step failed on rank 0.*Call recover\(\)"):
        worker.train_step(1)
    start(worker, folder)
    assert worker.train_step(0)["loss"] > 0


@pytest.mark.parametrize("model_type", ["gpt2"])
def test_other_models_start_as_transformers_makes_them(worker, folder, model_type):
    """gpt2's rule for output projections belongs to the model, not to these layers: 0.02 / sqrt(2 layers x 2)."""
    shape = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64, "model_type": model_type}
    start(worker, folder, {"policy.hf_config_overrides": shape})
    weights = dict(worker.model.causal_lm.named_parameters())
    assert abs(float(weights["transformer.h.0.mlp.c_proj.weight"].detach().std()) - 0.01) < 0.001
    assert worker.train_step(0)["loss"] > 0


@pytest.mark.claim("fine-tuning", "a Hugging Face folder that is written and read again is bit-equal")
@pytest.mark.parametrize(("tied", "shard"), [(True, "auto"), (False, "auto"), (True, "always"), (False, "always")])
def test_hugging_face_folder_out_and_in_is_bit_equal(worker, folder, tmp_path, tied, shard):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    sharding = {"policy.dtensor_cfg.shard_parameters": shard}
    changes = {"policy.hf_config_overrides.tie_word_embeddings": tied, **sharding}
    config, prepared = start(worker, folder, changes)
    worker.train_step(0)
    worker.save_hf(str(tmp_path / "hf"))
    batch = tiny_run.global_batch(config, prepared)
    trained = worker.gradients(batch, 4)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.chat_template is not None
    assert loaded.config.tie_word_embeddings is tied
    own = {name: whole(tensor) for name, tensor in worker.model.causal_lm.named_parameters()}
    assert all(torch.equal(parameter, own[name]) for name, parameter in loaded.named_parameters())

    start(
        worker,
        folder,
        {
            "policy.model_name": str(tmp_path / "hf"),
            "policy.hf_config_overrides": {},
            "policy.tokenizer": {"chat_template": None},
            **sharding,
        },
    )
    again = worker.gradients(batch, 4)
    assert again[0] == trained[0]
    assert all(torch.equal(again[1][name], gradient) for name, gradient in trained[1].items())


def test_export_keeps_generation_settings_and_end_tokens(worker, folder, tmp_path):
    """A base model stops at another token than the chat template ends turns with: its answers would never end."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    _, prepared = start(worker, folder)
    (end,) = prepared.end_ids
    worker.save_hf(str(tmp_path / "base"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "base").generation_config.eos_token_id == end
    other = prepared.pad_id
    assert other != end
    GenerationConfig(eos_token_id=other, top_p=0.8, do_sample=True).save_pretrained(tmp_path / "base")
    start(
        worker,
        folder,
        {
            "policy.model_name": str(tmp_path / "base"),
            "policy.hf_config_overrides": {},
            "policy.tokenizer": {"name": str(prepared.tokenizer_dir), "chat_template": None},
        },
    )
    worker.save_hf(str(tmp_path / "tuned"))
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").generation_config
    assert (tuned.eos_token_id, tuned.top_p, tuned.do_sample) == ([end, other], 0.8, True)


def test_a_bfloat16_folder_is_read_into_float32_masters(worker, folder, tmp_path):
    config, prepared = start(worker, folder)
    model = tiny_run.reference_model(config, prepared).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    for file in prepared.tokenizer_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    changes = {"policy.model_name": str(tmp_path), "policy.hf_config_overrides": {}, "policy.tokenizer": {}}
    start(worker, folder, changes)
    for name, parameter in worker.model.causal_lm.named_parameters():
        assert torch.equal(whole(parameter), model.get_parameter(name).float()), name


def test_a_folder_that_does_not_fit_is_refused_by_name(worker, folder, tmp_path):
    config, prepared = start(worker, folder)
    model = tiny_run.reference_model(config, prepared)
    changes = {"policy.model_name": str(tmp_path), "policy.hf_config_overrides": {}, "policy.tokenizer": {}}
    for file in prepared.tokenizer_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    model.config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds no .safetensors file"):
        start(worker, folder, changes)
    renamed = {f"inner.{name}": values.contiguous() for name, values in model.model.state_dict().items()}
    save_file(renamed, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks \d+ of \d+ weights of Qwen3ForCausalLM, e.g. \['model.embed"):
        start(worker, folder, changes)


def damaged_weights(worker, folder, tmp_path, damage):
    """Set up from a folder whose weights went through `damage`, a function from path to None."""
    start(worker, folder)
    worker.save_hf(str(tmp_path / "base"))
    damage(tmp_path / "base/model-00001-of-00001.safetensors")
    changes = {"policy.model_name": str(tmp_path / "base"), "policy.hf_config_overrides": {}, "policy.tokenizer": {}}
    start(worker, folder, changes)


@pytest.mark.parametrize("size", [4, 500, -100])
def test_truncated_weights_are_told_by_folder(worker, folder, tmp_path, size):
    def truncate(path):
        os.truncate(path, size % path.stat().st_size)

    with pytest.raises(CheckpointError, match=r"base/model-.*\.safetensors cannot be read.*Copy or download"):
        damaged_weights(worker, folder, tmp_path, truncate)


def test_quantised_weights_are_refused(worker, folder, tmp_path):
    """Read without their scales they are garbage of the right shape."""

    def quantise(path):
        tensors = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in load_file(path).items()}
        save_file(tensors, path)

    with pytest.raises(CheckpointError, match=r"a quantised model .*is F8_E4M3"):
        damaged_weights(worker, folder, tmp_path, quantise)


def test_weights_that_are_not_finite_are_called_so(worker, folder, tmp_path):
    def spoil(path):
        save_file({name: tensor * float("nan") for name, tensor in load_file(path).items()}, path)

    with pytest.raises(ConfigError, match="the loss is nan before the first step: the weights are not finite"):
        damaged_weights(worker, folder, tmp_path, spoil)


@pytest.mark.parametrize("shard", ["auto", "always"])
def test_state_goes_on_bit_for_bit(worker, folder, tmp_path, shard):
    changes = {"policy.dtensor_cfg.shard_parameters": shard}
    start(worker, folder, changes)
    for number in range(3):
        worker.train_step(number)
    worker.save_state(str(tmp_path / "state"), 3)
    wanted = [worker.train_step(number)["loss"] for number in range(3, 8)]
    start(worker, folder, changes)
    assert worker.load_state(str(tmp_path / "state")) == 3
    assert [worker.train_step(number)["loss"] for number in range(3, 8)] == wanted


def test_state_of_another_model_and_no_state_at_all_are_refused(worker, folder, tmp_path):
    start(worker, folder)
    worker.save_state(str(tmp_path / "state"), 0)
    start(worker, folder, {"policy.hf_config_overrides.intermediate_size": 64})
    with pytest.raises(CheckpointError, match="does not fit this model"):
        worker.load_state(str(tmp_path / "state"))
    with pytest.raises(CheckpointError, match="holds no saved state"):
        worker.load_state(str(tmp_path))


class Opener:
    """Pickles as a call of `open`, which makes a file: what a prepared checkpoint could do to whoever loads it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.claim("security", "no code of a prepared checkpoint runs")
def test_load_of_prepared_metadata_runs_no_code(worker, folder, tmp_path):
    start(worker, folder)
    worker.save_state(str(tmp_path / "state"), 0)
    (tmp_path / "state/.metadata").write_bytes(pickle.dumps(Opener(tmp_path / "was_run")))
    told = r"it names (_io|io)\.open, which no checkpoint of raylane contains"
    with pytest.raises(CheckpointError, match=told) as caught:
        worker.load_state(str(tmp_path / "state"))
    assert type(caught.value) is CheckpointError, "damage would let the run go on with an earlier one"
    assert not (tmp_path / "was_run").exists()


@pytest.mark.claim("security", "no code of a prepared checkpoint runs")
def test_load_of_a_prepared_value_runs_no_code(worker, folder, tmp_path, monkeypatch):
    """Values that are no tensors are pickles of their own inside the data files."""
    start(worker, folder)
    state = {"model": dict(worker.model.causal_lm.named_parameters()), "step": Opener(tmp_path / "was_run")}
    monkeypatch.setattr(state_module, "collect", lambda *_: state)
    worker.save_state(str(tmp_path / "state"), 0)
    monkeypatch.setattr(state_module, "collect", lambda *_: {**state, "step": 0})
    with pytest.raises(CheckpointDamagedError, match="Weights only load failed"):
        worker.load_state(str(tmp_path / "state"))
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_load_of_a_truncated_file_is_called_damaged(worker, folder, tmp_path, name):
    start(worker, folder)
    worker.save_state(str(tmp_path / "state"), 0)
    os.truncate(tmp_path / "state" / name, 300)
    with pytest.raises(CheckpointDamagedError, match=r"is damaged: .*Resume from an earlier checkpoint"):
        worker.load_state(str(tmp_path / "state"))


@pytest.mark.claim("security", "symbolic links in folders of a run are neither written through nor exported")
def test_export_does_not_follow_links_in_the_tokenizer_cache(worker, folder, tmp_path):
    _, prepared = start(worker, folder)
    (tmp_path / "private").write_text("a key")
    poisoned = tmp_path / "tokenizer"
    shutil.copytree(prepared.tokenizer_dir, poisoned)
    (poisoned / "added_tokens.json").symlink_to(tmp_path / "private")
    worker.vocabulary = dataclasses.replace(prepared, tokenizer_dir=poisoned)
    with pytest.raises(CheckpointError, match=r"added_tokens\.json is a symbolic link"):
        worker.save_hf(str(tmp_path / "hf"))
    assert not (tmp_path / "hf/notes.txt").exists()
    (tmp_path / "linked").symlink_to(prepared.tokenizer_dir)
    worker.vocabulary = dataclasses.replace(prepared, tokenizer_dir=tmp_path / "linked")
    with pytest.raises(CheckpointError, match=r"linked is a symbolic link"):
        worker.save_hf(str(tmp_path / "hf2"))


def test_the_self_check_finds_documents_that_see_each_other(worker, folder, monkeypatch):
    monkeypatch.setattr(attention, "document_lengths", lambda positions: [positions.numel()])
    for precision in ("float32", "bfloat16"):
        with pytest.raises(ConfigError, match="does not separate packed documents"):
            start(worker, folder, {"policy.precision": precision})


def test_the_self_check_finds_a_head_that_is_more_than_a_product(worker, folder):
    """Gemma 2 squashes its logits; the loss made from hidden states would pass over that without a word."""
    _, prepared = start(worker, folder)
    source = open_rows(prepared.train, tiny_run.config_of(folder).policy, prepared.pad_id)
    causal_lm = worker.model.causal_lm
    forward = causal_lm.forward

    def squashed(**inputs):
        out = forward(**inputs)
        out.logits = torch.tanh(out.logits / 0.1) * 0.1
        return out

    causal_lm.forward = squashed
    with pytest.raises(ConfigError, match="changes its logits after its output head"):
        selfcheck.check_model(worker.model, source, torch.device("cpu"), "float32")


MEASURE = """
import os, sys, torch
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from torch.distributed import TCPStore
from raylane.training.model import attention
from raylane.training.model import build
from raylane.sft.run import selfcheck
from raylane.sft.data.prepare import prepare
from raylane.sft.run.worker import SftWorker
from sft import tiny_run

def kib(name):
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[name].split()[0])

store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
config = tiny_run.config_of(Path(sys.argv[1]), {
    "policy.hf_config_overrides.vocab_size": 64_000, "policy.max_total_sequence_length": 512,
    "policy.hf_config_overrides.max_position_embeddings": 512,
    "policy.train_global_batch_size": 1, "policy.train_micro_batch_size": 1,
})
prepared = prepare(config)
worker = SftWorker("cpu")
check, selfcheck.check_model = selfcheck.check_model, lambda *_: None
worker.setup(config, prepared, 8)
check_again = lambda: check(worker.model, worker.train_rows, torch.device("cpu"), "float32")
for run in (check_again, lambda: worker.train_step(0)):
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set size
    start = kib("VmRSS")
    run()
    print(kib("VmHWM") - start)
worker.teardown()
"""


@pytest.mark.slow
@pytest.mark.processes
def test_self_check_needs_less_memory_than_a_step(folder):
    """Logits of whole rows at a real vocabulary (128,000 x 32,768 tokens) are more than any machine has."""
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), tests], capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, done.stderr
    check_kib, step_kib = map(int, done.stdout.split()[-2:])
    assert check_kib < step_kib / 2
    assert check_kib < 64_000 * 512 * 4 / 1024, "less than the logits of one row"


def test_evaluation_with_dropout_is_repeatable(worker, folder):
    """Evaluation mode switches dropout off; training has it on again afterwards."""
    config, prepared = start(worker, folder, {"policy.hf_config_overrides.attention_dropout": 0.3})
    before = worker.evaluate()
    assert worker.evaluate() == before
    batch = tiny_run.global_batch(config, prepared)
    evaluations = [worker.train_batch(batch, 0, None, 2, True)["loss"] for _ in range(2)]
    assert evaluations[0] == evaluations[1]
    trained = [worker.gradients(batch, 2)[0] for _ in range(2)]
    assert trained[0] != trained[1], "dropout is on while training"


@pytest.mark.claim("fine-tuning", "the loss in chunks of tokens has the value and gradient of torch's")
def test_chunked_cross_entropy_equals_torchs():
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 11)
    hidden, labels = torch.randn(2, 9, 8, requires_grad=True), torch.randint(0, 11, (2, 9))
    labels[0, :5] = -100
    wanted = CrossEntropy()(head(hidden), {"labels": labels})

    def summed(hidden, labels):
        logits = head(hidden)
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        return loss, (logits.argmax(dim=-1) == labels).sum()

    rows = CrossEntropy.supervised(labels, labels.device)
    (wanted_gradient,) = torch.autograd.grad(wanted, hidden)
    for chunk in (None, 1, 4, 100):
        loss_fn = CrossEntropy(chunk)
        loss = loss_fn.from_hidden(hidden, labels, summed, rows)
        (gradient,) = torch.autograd.grad(loss, hidden)
        right = (head(hidden).argmax(dim=-1) == labels).sum()
        assert [loss_fn.correct.take(labels.device).item() for _ in range(2)] == [right.item(), 0]
        torch.testing.assert_close(loss, wanted)
        torch.testing.assert_close(gradient, wanted_gradient)
    assert CrossEntropy(4).from_hidden(hidden, torch.full_like(labels, -100), summed, rows[:0]).item() == 0.0


class Getter:
    """Asks for an attribute of a class, as CPython before 3.11.4 asks for members of enumerations."""

    def __reduce__(self):
        return getattr, (torch.Size, "numel")


def test_metadata_gets_members_of_enumerations_only(worker, folder, tmp_path):
    start(worker, folder)
    worker.save_state(str(tmp_path / "state"), 0)
    (tmp_path / "state/.metadata").write_bytes(pickle.dumps(Getter()))
    with pytest.raises(CheckpointError, match="asks for 'numel' of"):
        worker.load_state(str(tmp_path / "state"))

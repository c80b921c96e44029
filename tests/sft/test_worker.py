"""One worker in this very process: its gradients against a plain Hugging Face model, its files, its self-check."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import TCPStore

from raylane.errors import CheckpointError, ConfigError
from raylane.sft import selfcheck
from raylane.sft.data import open_rows, prepare
from raylane.sft.loss import CrossEntropy
from raylane.sft.worker import SftWorker
from sft import tiny_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_run.write_data(folder)
    return folder


@pytest.fixture(scope="module")
def worker():
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    variables = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**variables, "TORCHELASTIC_USE_AGENT_STORE": True}.items():
            patch.setenv(name, str(value))
        worker = SftWorker("cpu")
        yield worker
        worker.teardown()


def start(worker, folder, changes=None):
    config = tiny_run.config_of(folder, changes)
    prepared = prepare(config)
    worker.setup(config, prepared, 8)
    return config, prepared


@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama"])
def test_packed_gradients_are_those_of_a_plain_model_on_each_document_alone(worker, folder, model_type):
    """Packing cross-contamination and wrong normalisation (users' complaints 2 and 3) both show here."""
    config, prepared = start(worker, folder, {"policy.hf_config_overrides.model_type": model_type})
    batch = tiny_run.global_batch(config, prepared)
    assert int(batch["document_ids"].max()) >= 1, "rows hold several documents, or this shows nothing"
    wanted = tiny_run.reference_gradients(tiny_run.reference_model(config, prepared), batch)
    tiny_run.assert_same(worker.gradients(batch, 2), wanted)


def test_micro_batches_chunks_recomputation_and_untied_head_change_no_gradient(worker, folder):
    changes = {"policy.hf_config_overrides.tie_word_embeddings": False}
    config, prepared = start(worker, folder, changes)
    batch = tiny_run.global_batch(config, prepared)
    wanted = tiny_run.reference_gradients(tiny_run.reference_model(config, prepared), batch)
    for rows in (1, 4, 8):
        tiny_run.assert_same(worker.gradients(batch, rows), wanted)
    for key, value in (("policy.loss_chunk_tokens", None), ("policy.dtensor_cfg.activation_checkpointing", True)):
        start(worker, folder, {**changes, key: value})
        tiny_run.assert_same(worker.gradients(batch, 2), wanted)


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


def test_clipping_reports_the_norm_before_and_none_never_clips(worker, folder):
    start(worker, folder, {"policy.max_grad_norm": None})
    free = worker.train_step(0)
    start(worker, folder, {"policy.max_grad_norm": 0.01})
    clipped = worker.train_step(0)
    assert clipped["grad_norm"] == pytest.approx(free["grad_norm"], rel=1e-6)
    assert clipped["grad_norm"] > 0.01


def test_a_step_that_is_not_finite_touches_no_weight(worker, folder):
    config, prepared = start(worker, folder)
    worker.add_loss("broken", lambda logits, batch: logits.sum() * float("nan"))
    batch = tiny_run.global_batch(config, prepared)
    before = worker.gradients(batch, 2)[0]
    with pytest.raises(FloatingPointError, match=r"loss nan.*weights were left as they are"):
        worker.train_batch(batch, 0, "broken", 2, False)
    assert worker.gradients(batch, 2)[0] == before


@pytest.mark.parametrize("tied", [True, False])
def test_hugging_face_folder_out_and_in_is_bit_equal(worker, folder, tmp_path, tied):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    changes = {"policy.hf_config_overrides.tie_word_embeddings": tied}
    config, prepared = start(worker, folder, changes)
    worker.train_step(0)
    worker.save_hf(str(tmp_path / "hf"))
    batch = tiny_run.global_batch(config, prepared)
    trained = worker.gradients(batch, 4)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.chat_template is not None
    assert loaded.config.tie_word_embeddings is tied
    own = {name: tensor.full_tensor() for name, tensor in worker._model.causal_lm.named_parameters()}
    assert all(torch.equal(parameter, own[name]) for name, parameter in loaded.named_parameters())

    start(
        worker,
        folder,
        {
            "policy.model_name": str(tmp_path / "hf"),
            "policy.hf_config_overrides": {},
            "policy.tokenizer": {"chat_template": None},
        },
    )
    again = worker.gradients(batch, 4)
    assert again[0] == trained[0]
    assert all(torch.equal(again[1][name], gradient) for name, gradient in trained[1].items())


def test_the_folder_stops_where_turns_end_and_keeps_how_the_model_generates(worker, folder, tmp_path):
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
    for name, parameter in worker._model.causal_lm.named_parameters():
        assert torch.equal(parameter.full_tensor(), model.get_parameter(name).float()), name


def test_a_folder_that_does_not_fit_is_refused_by_name(worker, folder, tmp_path):
    config, prepared = start(worker, folder)
    model = tiny_run.reference_model(config, prepared)
    changes = {"policy.model_name": str(tmp_path), "policy.hf_config_overrides": {}, "policy.tokenizer": {}}
    for file in prepared.tokenizer_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    model.config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds no .safetensors file"):
        start(worker, folder, changes)
    model.model.save_pretrained(tmp_path)  # the same weights under other names
    model.config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"lacks \d+ of \d+ weights of Qwen3ForCausalLM, e.g. \['model.embed"):
        start(worker, folder, changes)


def test_state_goes_on_bit_for_bit(worker, folder, tmp_path):
    start(worker, folder)
    for number in range(3):
        worker.train_step(number)
    worker.save_state(str(tmp_path / "state"), 3)
    wanted = [worker.train_step(number)["loss"] for number in range(3, 8)]
    start(worker, folder)
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


def test_the_self_check_finds_documents_that_see_each_other(worker, folder, monkeypatch):
    from raylane.sft import model as model_module

    plain = model_module._inputs

    def with_mask(batch):
        return {**plain(batch), "attention_mask": torch.ones_like(batch["input_ids"])}

    monkeypatch.setattr(model_module, "_inputs", with_mask)
    for precision in ("float32", "bfloat16"):
        with pytest.raises(ConfigError, match="packed documents are not kept apart"):
            start(worker, folder, {"policy.precision": precision})


def test_the_self_check_finds_a_head_that_is_more_than_a_product(worker, folder):
    """Gemma 2 squashes its logits; the loss made from hidden states would pass over that without a word."""
    _, prepared = start(worker, folder)
    source = open_rows(prepared.train, tiny_run.config_of(folder).policy, prepared.pad_id)
    causal_lm = worker._model.causal_lm
    forward = causal_lm.forward

    def squashed(**inputs):
        out = forward(**inputs)
        out.logits = torch.tanh(out.logits / 0.1) * 0.1
        return out

    causal_lm.forward = squashed
    with pytest.raises(ConfigError, match="does more to its logits than its output head"):
        selfcheck.check_model(worker._model, source, torch.device("cpu"), "float32")


def test_chunked_cross_entropy_equals_torchs():
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 11)
    hidden, labels = torch.randn(2, 9, 8, requires_grad=True), torch.randint(0, 11, (2, 9))
    labels[0, :5] = -100
    wanted = CrossEntropy()(head(hidden), {"labels": labels})
    (wanted_gradient,) = torch.autograd.grad(wanted, hidden)
    for chunk in (None, 1, 4, 100):
        loss = CrossEntropy(chunk).from_hidden(hidden, labels, head)
        (gradient,) = torch.autograd.grad(loss, hidden)
        torch.testing.assert_close(loss, wanted)
        torch.testing.assert_close(gradient, wanted_gradient)
    assert CrossEntropy(4).from_hidden(hidden, torch.full_like(labels, -100), head).item() == 0.0

"""Model types of transformers, built from small configurations, against their own eager attention.

Every document goes through a plain model of transformers by itself; loss and every gradient must be the same.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from raylane.errors import ConfigError
from raylane.sft.data.prepare import prepare
from raylane.sft.data.rows import RowSource
from raylane.sft.run import selfcheck
from raylane.training.config.model_types import DENSE, EVERY, MODEL_TYPES
from raylane.training.model import attention, hf_config
from raylane.training.model.attention import PackedRows
from raylane.training.run.micro_batches import FixedRows
from sft import model_types_page, tiny_run
from sft.model_types import LONGROPE, SIZES, TYPES


def start(worker: Any, folder: Any, model_type: str, sizes: dict[str, Any], changes: dict[str, Any] | None = None):
    """Set up the worker for a model of this type; return the global batch of its first step."""
    shape = {"model_type": model_type, **SIZES, **sizes}
    config = tiny_run.config_of(folder, {"policy.hf_config_overrides": shape, **(changes or {})})
    prepared = prepare(config)
    worker.setup(config, prepared, 8)
    return tiny_run.global_batch(config, prepared)


def assert_equal_to_eager(worker: Any, batch: Any, rows: int) -> None:
    """Assert that loss and gradients are those of a plain model with the same weights and eager attention."""
    trained = worker.model.causal_lm
    plain = AutoModelForCausalLM.from_config(
        copy.deepcopy(trained.config), dtype=torch.float32, attn_implementation="eager"
    )
    plain.load_state_dict(trained.state_dict())
    loss, gradients = worker.gradients(batch, rows)
    expected_loss, expected = tiny_run.reference_gradients(plain.train(), batch)
    assert abs(loss - expected_loss) < 1e-5
    for name, gradient in expected.items():
        assert gradient is not None, name
        assert float((gradients[name] - gradient).norm()) < 1e-5 * max(1.0, float(gradient.norm())), name


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize("model_type", TYPES)
def test_model_type_equals_transformers_eager(worker, folder, model_type, packing):
    changes = {"policy.sequence_packing.enabled": packing}
    assert_equal_to_eager(worker, start(worker, folder, model_type, TYPES[model_type], changes), 2)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", ["doge"])
def test_remedy_of_a_refused_type_equals_eager(worker, folder, model_type, implementation):
    """Layers with masks of their own cannot use raylane's attention."""
    with pytest.raises(ConfigError, match=r"attn_implementation to (sdpa or eager|eager or sdpa) of transformers"):
        start(worker, folder, model_type, {})
    batch = start(worker, folder, model_type, {"attn_implementation": implementation})
    loss, _ = worker.gradients(batch, 2)
    plain = AutoModelForCausalLM.from_config(
        copy.deepcopy(worker.model.causal_lm.config), dtype=torch.float32, attn_implementation="eager"
    )
    plain.load_state_dict(worker.model.causal_lm.state_dict())
    totals = []
    for ids, labels, documents in zip(batch["input_ids"], batch["labels"], batch["document_ids"], strict=True):
        for document in range(int(documents.max()) + 1):
            logits = plain(input_ids=ids[documents == document][None]).logits[0]
            of_document = labels[documents == document]
            totals.append(torch.nn.functional.cross_entropy(logits, of_document, reduction="sum").detach())
    supervised = int((batch["labels"] != -100).sum())
    assert abs(loss - float(torch.stack(totals).sum()) / supervised) < 1e-5


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_model_without_a_base_model_is_refused(worker, folder, precision):
    """Llama 4 ended with an AttributeError."""
    with pytest.raises(
        ConfigError, match=r"Llama4ForCausalLM .*(Use llama|Use an architecture that can be trained: llama)"
    ):
        start(worker, folder, "llama4_text", {}, {"policy.precision": precision})


def test_table_holds_exactly_the_tested_types():
    assert set(MODEL_TYPES) == set(TYPES)
    assert all(MODEL_TYPES[name] == EVERY for name in DENSE)
    without_reason = [of_type for of_type in MODEL_TYPES.values() if not of_type.reason]
    assert {replace(of_type, experts=False) for of_type in without_reason} == {EVERY}


def test_page_of_model_types_is_up_to_date():
    page = Path(__file__).parents[2] / "docs/reference/model-types.md"
    assert page.read_text(encoding="utf-8") == model_types_page.markdown(), f"run {model_types_page.COMMAND}"


def test_proofs_of_the_page_exist():
    for _, tests, _ in model_types_page.PROOFS:
        for file, name in (test.split("::") for test in tests):
            assert f"def {name}(" in (Path(__file__).parent / file).read_text(encoding="utf-8")


def attend_one_row(**arguments: Any) -> Any:
    states = torch.randn(1, 2, 4, 8)
    plan = {"packed_rows": PackedRows.of(torch.arange(4)[None])}
    module = SimpleNamespace(is_causal=arguments.pop("module_is_causal", True))
    mask = arguments.pop("attention_mask", None)
    return attention.attend(module, states, states, states, mask, **{**plan, **arguments})


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"sinks": torch.zeros(2)}, "sinks"),
        ({"output_attentions": True}, "output_attentions"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "attention_mask"),
        ({"is_causal": False}, "is_causal"),
        ({"module_is_causal": False}, "is_causal"),
    ],
)
def test_attention_with_an_unknown_argument_is_refused(arguments, name):
    with pytest.raises(ConfigError, match=rf"SimpleNamespace passes {name}, .*attn_implementation to eager or sdpa"):
        attend_one_row(**arguments)
    with pytest.raises(ConfigError, match="tell the documents of a row apart"):
        attend_one_row(packed_rows=None)
    attend_one_row(indices=None, output_attentions=False, position_ids=torch.arange(4)[None], is_causal=True)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("dropped", ["sinks", "window"])
def test_self_check_finds_a_dropped_argument(worker, folder, monkeypatch, precision, dropped):
    complete = attention._one_piece

    def incomplete(query, key, value, scoring):
        return complete(query, key, value, scoring._replace(**{dropped: None}))

    monkeypatch.setattr(attention, "_one_piece", incomplete)
    with pytest.raises(ConfigError, match="attn_implementation=raylane is wrong for this model"):
        start(worker, folder, "gpt_oss", TYPES["gpt_oss"], {"policy.precision": precision})


def row_source(worker: Any, packs: list[tuple[int, ...]]) -> RowSource:
    source = worker.train_rows
    return RowSource(source.cache, packs, source.row_tokens, source.pad_id)


def test_self_check_compares_several_rows_and_edges(worker, folder):
    start(worker, folder, "llama", {})
    lengths = worker.train_rows.cache.lengths
    order = lengths.argsort(kind="stable").tolist()
    short, longest = order[:8], int(lengths.argmax())
    middle = order[len(order) // 2]
    packs = [(short[0],), (short[1], short[2]), (middle, longest, short[3]), (short[4], short[5])]
    compared = selfcheck.compared_packs(row_source(worker, packs))
    assert compared == [packs[1], packs[2], packs[0]], "the first pair, the longest document, the most padding"
    assert selfcheck.compared_documents(row_source(worker, packs), packs[2]) == [0, 1, 2]
    assert selfcheck.compared_documents(row_source(worker, packs), packs[0]) == [0]


@pytest.mark.parametrize("place", ["longest document", "last document of a padded row"])
def test_self_check_finds_an_error_in_a_later_row(worker, folder, monkeypatch, place):
    """The first row with two documents is right."""
    start(worker, folder, "llama", {})
    lengths = worker.train_rows.cache.lengths
    order = lengths.argsort(kind="stable").tolist()
    source = row_source(worker, [(order[0], order[1]), (order[2], order[-1]), (order[3],)])
    limit = int(lengths[order[-1]])
    complete = attention._rows

    def wrong(query, key, value, of_lengths, of_row, scoring):
        out = complete(query, key, value, of_lengths, of_row, scoring)
        padded = len(of_lengths) > 1 and of_lengths[0] == lengths[order[3]]
        if (limit in of_lengths) if place == "longest document" else padded:
            return out * 1.01
        return out

    monkeypatch.setattr(attention, "_rows", wrong)
    with pytest.raises(ConfigError, match=r"is wrong for this model|does not separate packed documents"):
        selfcheck.check_model(worker.model, source, torch.device("cpu"), "float32", FixedRows(1))


def test_longrope_of_long_rows_is_refused(worker, folder):
    """Documents beyond the length of pre-training change the frequencies of all that share their micro-batch."""
    parameters = {**LONGROPE["rope_parameters"], "original_max_position_embeddings": 26}
    shape = {"rope_parameters": parameters, "original_max_position_embeddings": 26}
    with pytest.raises(ConfigError, match=r"rope_type=longrope .* Set it to at most 26, or policy\.sequence_packing"):
        start(worker, folder, "phi3", shape)
    alone = {"policy.sequence_packing.enabled": False, "policy.train_micro_batch_size": 1}
    batch = start(worker, folder, "phi3", shape, alone)
    lengths = (batch["document_ids"] >= 0).sum(dim=1)
    assert int(lengths.min()) <= 26 < int(lengths.max()), "both sets of frequencies"
    assert_equal_to_eager(worker, batch, 1)


def test_dynamic_rope_of_long_rows_is_refused(folder, tmp_path):
    """Its frequencies stay those of the longest row so far, so a loss would depend on the steps before."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    LlamaConfig(**{**SIZES, "max_position_embeddings": 16, "rope_parameters": rope}).save_pretrained(tmp_path)
    changes = {"policy.model_name": str(tmp_path), "policy.hf_config_overrides": {}, "policy.tokenizer": {}}
    with pytest.raises(ConfigError, match=r"rope_type=dynamic .* Set it to at most 16$"):
        hf_config.model_config(tiny_run.config_of(folder, changes).policy, 320)


def test_attention_names_are_those_of_transformers():
    assert set(selfcheck._COMPARED) < set(hf_config.ATTENTION)

"""Model types divided among workers: loss and gradients are those of transformers' eager attention in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from raylane.errors import ConfigError
from raylane.sft.data.prepare import prepare
from raylane.training.config.model_types import MODEL_TYPES
from raylane.training.model.hf_config import model_config
from sft import tiny_run
from sft.layouts import CP, EP, FSDP, PP, REPLICAS, SP, TP, covering_set
from sft.model_types import EXPERTS, TYPES, folder_changes, new_folder

SEQUENCES = "sequence_parallel"
DIVIDED = list(TYPES)
WAYS = {"tensors": {TP: 2}, "sequences": {TP: 2, **SP}, "context": {CP: 2}, "stages": {PP: 2}, "experts": {EP: 2}}
"""Settings of two workers for each field of `Divisions`."""
CLASSES = {
    "own attention": {"deepseek_v3", "phi3", "stablelm"},
    "convolutions": {"lfm2", "lfm2_moe"},
    "own experts": {"gpt_oss"},
    "experts": EXPERTS.keys() - {"deepseek_v3", "lfm2_moe", "gpt_oss"},
}
"""Types whose modules are divided by code of their own; all others are of the class "dense"."""
ROWS = {"policy.train_global_batch_size": 4, "policy.train_micro_batch_size": 1}


def settings_of(way: str) -> tuple[int, dict[str, Any]]:
    """Return the number of workers and the settings of a way to divide a model."""
    world = 4 if "copies" in way else 2
    copies = {"copies": {REPLICAS: 2, **FSDP}, "experts and copies": {REPLICAS: 2, EP: 2}}
    settings = {**WAYS, **copies}.get(way, FSDP)
    changes = {f"policy.dtensor_cfg.{key}": value for key, value in settings.items()}
    return world, {"cluster.num_workers": world, **changes}


def ways_of(model_type: str) -> list[str]:
    """Return the ways to divide a type that the table allows."""
    ways = [way for way in WAYS if getattr(MODEL_TYPES[model_type], way)]
    return ["fsdp2", "copies", *ways, *(["experts and copies"] if MODEL_TYPES[model_type].experts else [])]


def features_of(case: tuple[str, str]) -> set[tuple[str, str]]:
    """Return what a case covers: its type, and its way to divide types of this class."""
    model_type, way = case
    of_class = next((name for name, types in CLASSES.items() if model_type in types), "dense")
    return {("type", model_type), (of_class, way)}


MATRIX = [(model_type, way) for model_type in DIVIDED for way in ways_of(model_type)]
COVERING = covering_set(MATRIX, [], features_of, lambda case: settings_of(case[1])[0])
"""Each type, and each way to divide types of each class, in at least one case; `make test-matrix` runs all others."""


def cases() -> Iterator[Any]:
    for model_type, way in MATRIX:
        marks = [] if (model_type, way) in COVERING else [pytest.mark.matrix]
        yield pytest.param(model_type, way, marks=marks, id=f"{model_type}-{way}")


def test_covering_set_has_each_type_and_each_way_of_each_class() -> None:
    assert {model_type for model_type, _ in COVERING} == set(DIVIDED)
    assert {feature for case in COVERING for feature in features_of(case)} == {
        feature for case in MATRIX for feature in features_of(case)
    }
    assert len(COVERING) <= len(MATRIX) / 3


@dataclass(frozen=True)
class Reference:
    """A model folder, and what transformers' eager attention computes with it, one document at a time."""

    folder: Path
    loss: float
    gradients: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def references(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    @functools.cache
    def reference(model_type: str) -> Reference:
        model_folder = tmp_path_factory.mktemp(model_type)
        plain = new_folder(model_folder, model_type, TYPES[model_type])
        plain.set_attn_implementation("eager")
        config = tiny_run.config_of(folder, {**folder_changes(folder, model_folder), **ROWS})
        batch = tiny_run.global_batch(config, prepare(config))
        return Reference(model_folder, *tiny_run.reference_gradients(plain.train(), batch))

    return reference


def gradients_of(worker: Any, folder: Path, changes: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients of step 0; runs on every rank."""
    config = tiny_run.config_of(folder, changes)
    worker.setup(config, prepare(config), 8)
    return worker.gradients(worker.own_rows(0), 1)


@pytest.mark.processes
@pytest.mark.parametrize(("model_type", "way"), list(cases()))
def test_divided_type_equals_transformers_eager(groups, folder, references, model_type, way):
    reference, (world, settings) = references(model_type), settings_of(way)
    changes = {**folder_changes(folder, reference.folder), **ROWS, **settings}
    results = groups.of(world).run(gradients_of, folder, changes)
    gradients = {name: gradient for _, of_rank in results for name, gradient in of_rank.items()}
    assert all(abs(loss - reference.loss) < 1e-5 for loss, _ in results)
    for name, gradient in reference.gradients.items():
        assert float((gradients[name] - gradient).norm()) < 1e-5 * max(1.0, float(gradient.norm())), name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model_type", [name for name, of_type in MODEL_TYPES.items() if of_type.reason])
def test_type_that_cannot_be_divided_names_the_reason(folder, model_type, way):
    changes = {
        "cluster.num_workers": 2,
        "policy.hf_config_overrides.model_type": model_type,
        **{f"policy.dtensor_cfg.{key}": value for key, value in WAYS[way].items()},
    }
    if getattr(MODEL_TYPES[model_type], way):
        tiny_run.config_of(folder, changes)
        return
    cause = "" if way == "experts" else r" \(its"
    key = SEQUENCES if way == "sequences" and MODEL_TYPES[model_type].tensors else next(iter(WAYS[way]))
    with pytest.raises(ConfigError, match=rf"'{model_type}' cannot be divided by policy\.dtensor_cfg\.{key}{cause}"):
        tiny_run.config_of(folder, changes)


def router_loss(logits: list[torch.Tensor], chosen: int) -> torch.Tensor:
    """Return the loss of equations 4 to 6 of arXiv:2101.03961 for logits [tokens of all layers, E]."""
    shares = torch.cat(logits).softmax(dim=-1)
    experts = shares.shape[-1]
    used = torch.nn.functional.one_hot(shares.topk(chosen, dim=-1).indices, experts).sum(dim=1).float().mean(dim=0)
    return experts * (used * shares.mean(dim=0)).sum()


def with_router_loss(plain: Any, batch: Any, rows: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients of a global batch in micro-batches of so many rows, one document at a time."""
    total, supervised = torch.zeros(()), int((batch["labels"] != -100).sum())
    for start in range(0, batch["labels"].shape[0], rows):
        logits, losses = [], []
        micro = {name: values[start : start + rows] for name, values in batch.items()}
        for ids, labels, documents in zip(micro["input_ids"], micro["labels"], micro["document_ids"], strict=True):
            for document in range(int(documents.max()) + 1):
                output = plain(input_ids=ids[documents == document][None], output_router_logits=True)
                of_document = labels[documents == document]
                losses.append(torch.nn.functional.cross_entropy(output.logits[0], of_document, reduction="sum"))
                expected = router_loss(list(output.router_logits), plain.num_experts_per_tok)
                assert torch.allclose(output.aux_loss, expected), "the formula is that of transformers"
                logits += output.router_logits
        weight = plain.router_aux_loss_coef * int((micro["labels"] != -100).sum())
        total = total + torch.stack(losses).sum() + weight * router_loss(logits, plain.num_experts_per_tok)
    (total / supervised).backward()
    return float(total.detach()) / supervised, {name: weight.grad for name, weight in plain.named_parameters()}


ROUTED = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss")
ROUTER_KEYS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize("model_type", ROUTED)
def test_router_loss_equals_that_of_transformers(worker, folder, tmp_path, model_type, packing):
    plain = new_folder(tmp_path, model_type, {**EXPERTS[model_type], **ROUTER_KEYS})
    plain.set_attn_implementation("eager")
    changes = {
        **folder_changes(folder, tmp_path),
        "policy.sequence_packing.enabled": packing,
        "policy.dtensor_cfg.activation_checkpointing": "full" if packing else False,
    }
    config = tiny_run.config_of(folder, changes)
    prepared = prepare(config)
    worker.setup(config, prepared, 8)
    batch = tiny_run.global_batch(config, prepared)
    tiny_run.assert_same(worker.gradients(batch, 2), with_router_loss(plain.train(), batch, 2))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("way", ["fsdp2", "copies", "tensors", "sequences"])
def test_router_loss_of_divided_models_is_the_same(groups, folder, tmp_path, way):
    plain = new_folder(tmp_path, "qwen3_moe", {**EXPERTS["qwen3_moe"], **ROUTER_KEYS})
    plain.set_attn_implementation("eager")
    world, settings = settings_of(way)
    changes = {**folder_changes(folder, tmp_path), **ROWS, **settings}
    config = tiny_run.config_of(folder, changes)
    expected = with_router_loss(plain.train(), tiny_run.global_batch(config, prepare(config)), 1)
    for result in groups.of(world).run(gradients_of, folder, changes)[:1]:
        tiny_run.assert_same(result, expected)


@pytest.mark.parametrize("way", ["context", "stages"])
def test_router_loss_of_divided_rows_is_refused(folder, tmp_path, way):
    new_folder(tmp_path, "mixtral", {**EXPERTS["mixtral"], **ROUTER_KEYS})
    config = tiny_run.config_of(folder, {**folder_changes(folder, tmp_path), **ROWS, **settings_of(way)[1]})
    with pytest.raises(ConfigError, match=r"loss of its routers needs all layers and whole rows .*_parallel_size=2"):
        model_config(config.policy, 320)

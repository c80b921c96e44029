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
from sft import tiny_run
from sft.layouts import CP, FSDP, PP, REPLICAS, SP, TP
from sft.model_types import EXPERTS, SPECIAL, folder_changes, new_folder
from sft.ranks import RankGroups

SEQUENCES = "sequence_parallel"
TYPES = {**EXPERTS, **SPECIAL}
WAYS = {"tensors": {TP: 2}, "sequences": {TP: 2, **SP}, "context": {CP: 2}, "stages": {PP: 2}}
"""Settings of two workers for each field of `Divisions`."""
QUICK = [("gpt_oss", "tensors"), ("qwen3_moe", "sequences"), ("deepseek_v3", "copies"), ("lfm2_moe", "fsdp2")]
ROWS = {"policy.train_global_batch_size": 4, "policy.train_micro_batch_size": 1}


def cases() -> Iterator[Any]:
    """Yield each type with each way to divide it that the table allows; `make test` runs those in `QUICK`."""
    for model_type in TYPES:
        ways = [way for way in WAYS if getattr(MODEL_TYPES[model_type], way)]
        for way in ("fsdp2", "copies", *ways):
            marks = [] if (model_type, way) in QUICK else [pytest.mark.slow]
            yield pytest.param(model_type, way, marks=marks, id=f"{model_type}-{way}")


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


@pytest.fixture(scope="module")
def groups() -> Iterator[RankGroups]:
    with RankGroups() as groups:
        yield groups


def gradients_of(worker: Any, folder: Path, changes: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients of step 0; runs on every rank."""
    config = tiny_run.config_of(folder, changes)
    worker.setup(config, prepare(config), 8)
    return worker.gradients(worker.own_rows(0), 1)


@pytest.mark.processes
@pytest.mark.parametrize(("model_type", "way"), list(cases()))
def test_divided_type_equals_transformers_eager(groups, folder, references, model_type, way):
    reference, world = references(model_type), 4 if way == "copies" else 2
    settings = {REPLICAS: 2, **FSDP} if way == "copies" else WAYS.get(way, FSDP)
    changes = {
        **folder_changes(folder, reference.folder),
        **ROWS,
        "cluster.num_workers": world,
        **{f"policy.dtensor_cfg.{key}": value for key, value in settings.items()},
    }
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
    key = SEQUENCES if way == "sequences" and MODEL_TYPES[model_type].tensors else next(iter(WAYS[way]))
    with pytest.raises(ConfigError, match=rf"'{model_type}' cannot be divided by policy\.dtensor_cfg\.{key} \(its"):
        tiny_run.config_of(folder, changes)

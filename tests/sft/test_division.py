"""Decisions about the division of a run: axes, stages, the plan of tensor parallelism, and sizes that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raylane.errors import ConfigError
from raylane.training.config import layout
from raylane.training.config.policy import DTensorConfig
from raylane.training.parallel import tensor_parallel
from raylane.training.parallel.mesh import AXES, ParallelDims
from raylane.training.parallel.stages import Layers, layer_ranges, own_stages
from sft import tiny_run


def test_ranks_of_a_layout_are_row_major() -> None:
    dims = ParallelDims(pp=2, dp_replicate=1, dp_shard=2, cp=1, tp=2)
    assert (dims.world, dims.readers, dims.copies) == (8, 2, 4)
    assert [dims.coordinates(rank)["tp"] for rank in range(8)] == [0, 1] * 4
    assert [dims.coordinates(rank)["pp"] for rank in range(8)] == [0] * 4 + [1] * 4
    assert [dims.reader(rank) for rank in range(8)] == [0, 0, 1, 1] * 2
    assert dims.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert dims.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_the_drivers_axes_place_ranks_as_the_workers_do() -> None:
    dims = ParallelDims(2, 2, 3, 2, 2)
    sharding = dims.named_sharding
    for rank in range(dims.world):
        assert sharding.get_worker_coords(rank) == dims.coordinates(rank)
    assert tuple(sharding.names) == AXES


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="every size must be at least 1"):
        ParallelDims(tp=0)


@pytest.mark.parametrize(("layers", "stages"), [(4, 2), (5, 2), (7, 4), (8, 8)])
def test_stages_cover_all_layers_in_order(layers: int, stages: int) -> None:
    ranges = layer_ranges(layers, stages)
    assert [layer for some in ranges for layer in some] == list(range(layers))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_workers_hold_every_nth_stage() -> None:
    assert [own_stages(worker, 2, 3) for worker in range(2)] == [[0, 2, 4], [1, 3, 5]]
    assert DTensorConfig(pipeline_schedule="interleaved_1f1b").stages_per_worker == 2
    assert DTensorConfig(pipeline_schedule="1f1b").stages_per_worker == 1


def test_layers_keep_their_numbers() -> None:
    some = Layers({4: nn.Linear(1, 1), 5: nn.Linear(1, 1)})
    assert sorted(name for name, _ in some.named_parameters()) == ["4.bias", "4.weight", "5.bias", "5.weight"]
    assert len(list(some)) == 2
    assert [name for name, _ in some[:1].named_children()] == ["4"]
    assert some[1] is list(some)[1]


def test_a_module_without_a_place_in_the_plan_is_refused() -> None:
    assert tensor_parallel.plan(["self_attn.q_proj", "input_layernorm"]) == {
        "self_attn.q_proj": "columns",
        "input_layernorm": "norm",
    }
    with pytest.raises(ConfigError, match=r"does not know how to divide mlp\.router of this model"):
        tensor_parallel.plan(["self_attn.q_proj", "mlp.router"])


D = "policy.dtensor_cfg."


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({D + "tensor_parallel_size": 2}, r"num_workers=1 is no multiple .*tensor_parallel_size=2; use 2 workers"),
        ({"cluster.num_workers": 8, D + "tensor_parallel_size": 8}, r"num_attention_heads=4 does not .* use 1, 2, 4"),
        (
            {"cluster.num_workers": 2, D + "context_parallel_size": 2, "policy.max_total_sequence_length": 66},
            r"max_total_sequence_length=66 does not divide by 4.* use 64 or 68",
        ),
        ({D + "sequence_parallel": True}, r"sequence_parallel=true .* but tensor_parallel_size=1"),
        (
            {
                "cluster.num_workers": 2,
                D + "context_parallel_size": 2,
                "policy.hf_config_overrides.attn_implementation": "sdpa",
            },
            r"context_parallel_size=2 works with raylane's attention only",
        ),
        (
            {"cluster.num_workers": 4, D + "pipeline_parallel_size": 4},
            r"num_hidden_layers=2 is less than the 4 stages",
        ),
        (
            {"cluster.num_workers": 2, D + "pipeline_parallel_size": 2, "policy.train_micro_batch_size": 8},
            r"=8 makes 1 micro-batches, but .*=1f1b on 2 workers needs at least 2; use 16 rows",
        ),
        (
            {"cluster.num_workers": 2, D + "pipeline_parallel_size": 2, D + "pipeline_stages_per_worker": 2},
            r"pipeline_schedule=1f1b needs 1 stage on each worker",
        ),
        (
            {"cluster.num_workers": 2, D + "pipeline_parallel_size": 2, D + "reduce_every_micro_batch": True},
            r"reduce_every_micro_batch=true does not work in a pipeline",
        ),
        (
            {
                "cluster.num_workers": 2,
                D + "tensor_parallel_size": 2,
                "policy.hf_config_overrides.model_type": "gpt_neox",
            },
            r"a model of type 'gpt_neox' cannot be divided",
        ),
    ],
)
def test_sizes_that_do_not_fit_name_what_would(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_run.config_of(tmp_path, changes)


def test_the_sizes_of_a_model_folder_are_checked(tmp_path: Path) -> None:
    changes = {"cluster.num_workers": 3, D + "tensor_parallel_size": 3, "policy.train_global_batch_size": 6}
    overrides = {"policy.hf_config_overrides": {}, "policy.tokenizer": {}, "policy.model_name": str(tmp_path)}
    config = tiny_run.config_of(tmp_path, {**changes, **overrides})
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        layout.check_model_folder(config)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_attention_heads": 8}')
    with pytest.raises(ConfigError, match=r"num_attention_heads=8 does not divide .*=3; use 1, 2, 4, 8"):
        layout.check_model_folder(config)


@pytest.mark.parametrize(
    ("changes", "shape", "micro", "message"),
    [
        (
            {D + "context_parallel_size": 2},
            (8, 62),
            None,
            r"rows of 62 tokens do not divide by 4.* pad them to 60 or 64",
        ),
        ({D + "tensor_parallel_size": 2, D + "sequence_parallel": True}, (8, 63), None, "do not divide by 2"),
        ({D + "pipeline_parallel_size": 2}, (8, 64), 8, "a batch of 8 rows makes 1 micro-batches.* use 16 rows"),
    ],
)
def test_batches_of_the_driver_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, Any], shape: tuple[int, int], micro: int | None, message: str
) -> None:
    config = tiny_run.config_of(tmp_path, {"cluster.num_workers": 2, **changes})
    layout.check_batch(config, {"input_ids": torch.zeros(8, 64)}, None, evaluates=False)
    with pytest.raises(ValueError, match=message):
        layout.check_batch(config, {"input_ids": torch.zeros(shape)}, micro, evaluates=False)


def test_lists_in_a_batch_for_a_pipeline_are_refused(tmp_path: Path) -> None:
    config = tiny_run.config_of(tmp_path, {"cluster.num_workers": 2, D + "pipeline_parallel_size": 2})
    with pytest.raises(ValueError, match="the batch holds lists: names; remove them"):
        layout.check_batch(config, {"input_ids": torch.zeros(8, 64), "names": ["a"]}, None, evaluates=True)

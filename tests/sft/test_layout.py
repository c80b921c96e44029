"""Sizes that do not fit together are refused before anything starts; each message names both values and the remedy."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from raylane.errors import ConfigError
from raylane.training.config.layout import micro_batches
from sft.conversations import config

CASES: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"cluster": {"num_workers": 4}, "policy": {"dtensor_cfg": {"dp_replicate_size": 3}}},
        ["cluster.num_workers=4", "dp_replicate_size=3", "use 3 or 6 workers"],
    ),
    (
        {"policy": {"precision": "bfloat16", "dtensor_cfg": {"shard_parameters": "never"}}},
        ["policy.precision=bfloat16 needs FSDP2", "set shard_parameters to auto or always, or change policy.precision"],
    ),
    (
        {"cluster": {"num_workers": 3, "num_nodes": 2}},
        ["cluster.num_workers=3", "cluster.num_nodes=2", "use 2 or 4 workers"],
    ),
    (
        {"cluster": {"num_workers": 4, "gpus_per_node": 1}, "policy": {"train_global_batch_size": 4}},
        ["cluster.num_workers=4", "cluster.gpus_per_node=1", "at most 1 workers"],
    ),
    (
        {"cluster": {"num_workers": 2}, "policy": {"train_global_batch_size": 6, "train_micro_batch_size": 2}},
        ["train_global_batch_size=6", "train_micro_batch_size=2", "cluster.num_workers=2 = 4", "of 4 or 8"],
    ),
    (
        {
            "cluster": {"num_workers": 2},
            "sft": {"val_at_end": True, "val_global_batch_size": 5, "val_micro_batch_size": 2},
            "data": {"validation_fraction": 0.1},
        },
        ["val_global_batch_size=5", "val_micro_batch_size=2", "cluster.num_workers=2", "of 4 or 8"],
    ),
    (
        {"policy": {"max_total_sequence_length": 100, "make_sequence_length_divisible_by": 64}},
        ["max_total_sequence_length=100", "make_sequence_length_divisible_by=64", "use 64 or 128"],
    ),
    (
        {"policy": {"hf_config_overrides": {"max_position_embeddings": 64}}},
        ["max_total_sequence_length=128", "max_position_embeddings=64"],
    ),
    (
        {"policy": {"hf_config_overrides": {"hidden_size": 17}}},
        ["hidden_size=17", "num_attention_heads=2", "use 16 or 18"],
    ),
    (
        {"policy": {"hf_config_overrides": {"num_attention_heads": 4, "num_key_value_heads": 3}}},
        ["num_attention_heads=4", "num_key_value_heads=3"],
    ),
    (
        {"policy": {"dtensor_cfg": {"cpu_offload": True}}},
        ["cpu_offload=true", "gpus_per_node=0", "set cpu_offload to false"],
    ),
    ({"sft": {"max_num_epochs": None}}, ["max_num_steps", "max_num_epochs", "never end", "set one"]),
    (
        {
            "sft": {"val_period": 50},
            "data": {"validation_fraction": 0.1},
            "checkpointing": {"keep_top_k": 2, "save_period": 75},
        },
        ["keep_top_k=2", "save_period=75", "val_period=50", "make save_period a multiple of val_period"],
    ),
    ({"checkpointing": {"keep_top_k": 2}}, ["keep_top_k=2", "metric_name='val:loss'", "set sft.val_period"]),
]


@pytest.mark.parametrize(("sections", "words"), CASES)
def test_a_mismatch_names_both_values_and_the_remedy(tmp_path: Path, sections: dict, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        config(tmp_path, **sections)
    for word in words:
        assert word in str(error.value)


def test_all_mismatches_are_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        config(
            tmp_path,
            policy={"make_sequence_length_divisible_by": 100, "train_global_batch_size": 3},
            cluster={"num_workers": 2},
        )
    assert len(error.value.fields["problems"]) == 2


def test_run_without_validation_data_validates_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each of these keys was an error of its own, one after the other."""
    caplog.set_level(logging.INFO, "raylane")
    validation = {"val_period": 5, "val_at_start": True, "val_at_end": True, "sample_prompts": "Why?"}
    made = config(tmp_path, sft=validation, checkpointing={"keep_top_k": 2})
    assert (made.sft.val_period, made.sft.val_at_start, made.sft.val_at_end) == (0, False, False)
    assert (made.sft.sample_prompts, made.checkpointing.metric_name) == ((), "train:loss")
    (line,) = caplog.messages
    assert line.startswith("nothing is validated: data.validation is null and data.validation_fraction is 0: ")
    assert all(f"sft.{key}" in line for key in validation)
    kept = config(tmp_path, sft=validation, data={"validation_fraction": 0.1})
    assert (kept.sft.val_period, kept.checkpointing.metric_name, len(caplog.messages)) == (5, "val:loss", 1)


def test_validation_sizes_do_not_matter_where_nothing_validates(tmp_path: Path) -> None:
    config(tmp_path, sft={"val_global_batch_size": 7, "val_micro_batch_size": 2})


def test_a_head_size_of_its_own_frees_the_hidden_size(tmp_path: Path) -> None:
    config(tmp_path, policy={"hf_config_overrides": {"hidden_size": 17, "head_dim": 8}})


def test_micro_batches_divide_or_say_why() -> None:
    assert micro_batches(16, 2, 4) == 2
    with pytest.raises(ValueError, match="12 rows is no multiple of micro batch 2 x 4 workers = 8"):
        micro_batches(12, 2, 4)

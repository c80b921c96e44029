"""Files and command lines of NeMo-RL: what requests nothing is left out, other spellings are understood."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.nemo.upstream_file import NEMO_FILE

from raylane.errors import ConfigError
from raylane.nemo.dialect import NEMO_RL
from raylane.nemo.keys import OTHERWISE, RENAMES, RULES, is_nemo_key, refusal
from raylane.nemo.translate import Problem, translate
from raylane.sft.config.load import load_config
from raylane.sft.config.schema import SftRunConfig
from raylane.training.config.keys import key_paths
from raylane.training.config.overrides import read_yaml
from sft.conversations import document

OWN_DATA = ["data.train=train.jsonl", "data.validation=held_out.jsonl"]


@pytest.fixture
def their_file(tmp_path: Path) -> Path:
    path = tmp_path / "theirs.yaml"
    path.write_text(NEMO_FILE)
    return path


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(document(tmp_path)))
    return path


def only_problem(section: dict[str, Any]) -> Problem:
    (problem,) = translate(section).problems
    return problem


def test_load_of_a_pasted_file_understands_it(their_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "raylane")
    config = load_config(their_file, [*OWN_DATA, "policy.train_micro_batch_size=4"], NEMO_RL)
    assert config.policy.optimizer.name == "adamw"
    assert config.policy.sequence_packing.algorithm == "first_fit_decreasing"
    assert config.checkpointing.metric_name == "val:loss"
    assert (config.data.train, config.data.validation) == (("train.jsonl",), "held_out.jsonl")
    assert config.policy.max_grad_norm == 0.5
    assert config.cluster.num_workers == 2
    assert config.logger.wandb.name is None
    assert "NeMo-RL keys ignored or replaced: logger.wandb.name, policy.megatron_cfg, policy.dtensor" in caplog.text
    assert "set as in NeMo-RL: policy.scheduler.name=constant (the learning rate" in caplog.text


def test_their_file_keeps_the_behaviour_of_nemo_rl(their_file: Path) -> None:
    config = load_config(their_file, OWN_DATA, NEMO_RL)
    assert config.policy.scheduler.name == "constant"
    assert config.policy.optimizer.weight_decay_on == "all"
    assert config.data.overlong == "drop"
    words = [*OWN_DATA, "policy.scheduler={name: linear}", "data.overlong=split"]
    config = load_config(their_file, words, NEMO_RL)
    assert (config.policy.scheduler.name, config.data.overlong) == ("linear", "split")


def test_own_file_with_a_pasted_command_line_keeps_defaults(own_file: Path) -> None:
    words = ["policy.dtensor_cfg._v2=true", "++policy.dtensor_cfg.tensor_parallel_size=1", "logger.monitor_gpus=True"]
    words += ["policy.megatron_cfg.enabled=false", "policy.optimizer.name=torch.optim.AdamW", "data.num_workers=8"]
    assert load_config(own_file, words, NEMO_RL) == load_config(own_file)


def test_null_template_joins_the_messages_in_their_file(their_file: Path) -> None:
    template = load_config(
        their_file, [*OWN_DATA, "policy.tokenizer.chat_template=null"], NEMO_RL
    ).policy.tokenizer.chat_template
    assert template is not None
    assert "{% generation %}{{ message.content }}{% endgeneration %}" in template


def test_mandatory_value_that_is_missing_is_named(own_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.validation is \?\?\?, a value that must be given"):
        load_config(own_file, ["data.validation='???'"], NEMO_RL)


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"policy": {"dtensor_cfg": {"moe_parallelizer": {"a": 1}}}}, "experts are divided by"),
        ({"policy": {"dtensor_cfg": {"enabled": False}}}, "it is always on"),
        ({"checkpointing": {"is_peft": True}}, r"set policy\.dtensor_cfg\.lora_cfg instead"),
        ({"policy": {"dtensor_cfg": {"automodel_kwargs": {"backend": {}}}}}, "loaded by transformers"),
        ({"policy": {"megatron_cfg": {"enabled": True, "fp8_cfg": {"enabled": True}}}}, "fp8 is not supported"),
        ({"policy": {"megatron_cfg": {"enabled": True, "expert_model_parallel_size": 2}}}, "have no experts here"),
        (
            {"policy": {"megatron_cfg": {"enabled": True, "peft": {"enabled": True, "target_modules": ["mixer"]}}}},
            "its layers have no equal",
        ),
        ({"policy": {"sequence_packing": {"train_mb_tokens": 5000}}}, "policy.train_micro_batch_size tokens"),
        ({"policy": {"sequence_packing": {"sequence_length_round": 1000}}}, "must be a multiple of it"),
        ({"policy": {"optimizer": {"name": "torch.optim.SGD"}}}, r"only torch\.optim\.AdamW is supported"),
        ({"policy": {"optimizer": None}}, "no optimizer is named"),
        ({"policy": {"ray_compiled_graph": {"enabled": "yes"}}}, r"use policy\.compiled_graph\.mode"),
        ({"data": {"max_input_seq_length": 5}}, r"use policy\.max_total_sequence_length"),
        ({"sft": {"only_unmask_final": True}}, "set weight: 0 on all assistant messages but the last one"),
        ({"logger": {"mlflow_enabled": True}}, "MLflow is not supported"),
        ({"checkpointing": {"checkpoint_must_save_by": "0:1:0:0"}}, "send SIGTERM when time is up"),
        ({"cluster": {"segment_size": 4}}, "placement by NVLink domain is not supported"),
        ({"grpo": {"num_steps": 1}}, "write one for `raylane grpo`"),
        ({"sft": {"num_steps": 1, "max_num_steps": 2}}, r"sft\.max_num_steps=2 is set too"),
    ],
)
def test_key_that_requests_a_missing_feature_is_refused(
    section: dict[str, Any], told: str, own_file: Path, tmp_path: Path
) -> None:
    assert not any(not note.is_set for note in translate(section).notes)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"defaults": own_file.name, **section}))
    with pytest.raises(ConfigError, match=told) as error:
        load_config(path, (), NEMO_RL)
    assert str(error.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("++policy.dtensor_cfg.moe_parallelizer.a=1", "experts are divided by"),
        ("data.max_input_seq_length=5", r"use policy\.max_total_sequence_length"),
        ("data.train.dataset_name=squad", "'data' is a single value|holds .* which has no keys"),
    ],
)
def test_override_that_requests_a_missing_feature_is_refused(own_file: Path, word: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config(own_file, [word], NEMO_RL)


def test_spellings_of_the_same_thing_are_understood(own_file: Path) -> None:
    words = ["policy.dtensor_cfg.env_vars={A:1}", "++policy.dtensor_cfg.defer_fsdp_grad_sync=false"]
    words += ["checkpointing.save_consolidated=false", "policy.activation_checkpointing_enabled=true"]
    words += ["checkpointing.keep_top_k=null", "sft.num_steps=9", "policy.scheduler=null"]
    words += ["policy.tokenizer.chat_template_kwargs={enable_thinking:false}"]
    config = load_config(own_file, words, NEMO_RL)
    assert config.cluster.env_vars == {"A": "1"}
    assert config.policy.dtensor_cfg.reduce_every_micro_batch
    assert config.policy.dtensor_cfg.activation_checkpointing
    assert not config.checkpointing.save_hf
    assert config.checkpointing.keep_latest_k == 1_000_000
    assert config.sft.max_num_steps == 9
    assert config.policy.tokenizer.chat_template_kwargs == {"enable_thinking": False}


def test_metric_name_null_keeps_the_latest() -> None:
    made = translate({"checkpointing": {"metric_name": None, "keep_top_k": 3}})
    assert made.document == {"checkpointing": {"keep_latest_k": 3}}


@pytest.mark.parametrize(("enabled", "mode"), [("true", "preferred"), ("false", "off")])
def test_ray_compiled_graph_becomes_compiled_graph(own_file: Path, enabled: str, mode: str) -> None:
    section = "policy.ray_compiled_graph"
    words = [f"++{section}.enabled={enabled}", f"++{section}.warmup_seq_len=64", f"++{section}.warmup_gbs=4"]
    graph = load_config(own_file, [*words, f"++{section}.overlap_communication=false"], NEMO_RL).policy.compiled_graph
    assert (graph.mode, graph.warmup_seq_len, graph.warmup_gbs, graph.overlap_communication) == (mode, 64, 4, False)
    with pytest.raises(
        ConfigError, match=r"the sections policy\.ray_compiled_graph and policy\.compiled_graph are both"
    ):
        load_config(own_file, [words[0], "policy.compiled_graph.inflight=3"], NEMO_RL)
    with pytest.raises(ConfigError, match=r"unknown key 'policy\.compiled_graph\.enable'"):
        load_config(own_file, [f"++{section}.enable=true"], NEMO_RL)


def test_override_mark_replaces_a_section(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("data: {train: {dataset_name: squad}, shuffle: false}")
    (tmp_path / "top.yaml").write_text("defaults: base.yaml\ndata: {_override_: true, train: a.jsonl}")
    assert read_yaml(tmp_path / "top.yaml") == {"data": {"train": "a.jsonl"}}


# ------------------------------------------------------------------------------------------------------ data sets


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        (
            {"train": {"data_path": "a.jsonl", "dataset_name": "openai_format", "chat_key": "talk", "tool_key": None}},
            {"train": "a.jsonl", "messages_key": "talk"},
        ),
        (
            {"train": {"data_path": "a.jsonl", "input_key": "q"}, "default": {"dataset_name": "ResponseDataset"}},
            {"train": "a.jsonl", "input_key": "q", "output_key": "output"},
        ),
        (
            {"train": [{"data_path": "a.jsonl"}, {"data_path": "b.jsonl", "split": "train"}], "validation": None},
            {"train": ["a.jsonl", "b.jsonl"], "validation": None},
        ),
        (
            {"train": {"data_path": "a.jsonl", "split_validation_size": 0.1, "seed": 1}},
            {"train": "a.jsonl", "validation_fraction": 0.1},
        ),
        (  # as in 2025
            {"dataset_name": "openai_format", "train_data_path": "a", "val_data_path": "b", "chat_key": "talk"},
            {"train": "a", "validation": "b", "messages_key": "talk"},
        ),
        ({"train": ["a", "b"], "messages_key": "m"}, {"train": ["a", "b"], "messages_key": "m"}),
    ],
)
def test_data_sections_become_file_names_and_keys(section: dict[str, Any], keys: dict[str, Any]) -> None:
    made = translate({"data": section})
    assert not made.problems
    assert made.document["data"] == keys


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"train": {"dataset_name": "squad"}}, r"'squad' is a data set that NeMo-RL downloads.*by --map squad=PATH"),
        ({"train": {"dataset_name": "squad", "data_path": "a"}}, "'squad' is a data set that NeMo-RL downloads"),
        ({"train": {"dataset_name": "ResponseDataset"}}, r"data\.train\.data_path is not set"),
        ({"train": {"data_path": "a", "system_prompt": "Be kind."}}, "put its effect into the data"),
        ({"train": {"data_path": "a", "tool_key": "functions"}}, "tool_key='functions' is not supported"),
        ({"train": {"data_path": "a", "split_validation_size": 256}}, "must be less than 1"),
        ({"validation": [{"data_path": "a"}, {"data_path": "b"}]}, "join them into one"),
        (
            {"train": {"data_path": "a", "chat_key": "x"}, "validation": {"data_path": "b", "chat_key": "y"}},
            "messages_key='x' and 'y': all files must have the same",
        ),
    ],
)
def test_data_section_that_cannot_be_read_is_refused(section: dict[str, Any], told: str) -> None:
    problem = only_problem({"data": section})
    assert problem.must_set is not None
    assert re.search(told, problem.text)


def test_old_data_set_by_name_is_one_problem_each() -> None:
    made = translate({"data": {"dataset_name": "squad", "shuffle": True}})
    assert [problem.must_set for problem in made.problems] == ["data.train", "data.validation"]
    assert made.document["data"] == {"shuffle": True}


# -------------------------------------------------------------------------------------------------------- the tables


def test_tables_name_only_keys_that_the_schema_lacks() -> None:
    known = set(key_paths(SftRunConfig))
    foreign = {*(rule.key for rule in RULES), *RENAMES, *OTHERWISE}
    assert not foreign & known
    assert set(RENAMES.values()) <= known
    assert all(is_nemo_key(key) and refusal(key) for key in foreign)


def test_rules_have_one_reason_for_each_answer() -> None:
    assert len({rule.key for rule in RULES}) == len(RULES)
    for rule in RULES:
        refuses_something = not rule.harmless({"enabled": True}) or not rule.harmless(-1)
        assert bool(rule.why_refused) == refuses_something, rule.key

"""The configuration tree: strict, frozen, the same after a round trip; and the page that describes it."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pydantic
import pytest
import yaml
from tests.config_page import HEADS, PAGES, reference_markdown

from raylane.errors import ConfigError
from raylane.sft.config.load import build_config, load_config
from raylane.sft.config.schema import SftRunConfig
from raylane.training.config.keys import key_paths
from raylane.training.config.load import dump
from raylane.training.run.policy import worker_options
from sft.conversations import config, document

ROOT = Path(__file__).parents[2]


def test_a_file_with_overrides_becomes_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(document(tmp_path)))
    made = load_config(path, ["sft.seed=7", "data.train=[a, b]", "policy.optimizer.kwargs.betas=[0.9, 0.95]"])
    assert made.sft.seed == 7
    assert made.data.train == ("a", "b")
    assert made.policy.optimizer.kwargs.betas == (0.9, 0.95)


def test_nothing_can_be_written_to_it(tmp_path: Path) -> None:
    made = config(tmp_path)
    for section, key in ((made, "sft"), (made.sft, "seed"), (made.policy.optimizer.kwargs, "lr")):
        with pytest.raises(pydantic.ValidationError, match="frozen"):
            setattr(section, key, None)


def test_it_survives_dump_build_and_pickle(tmp_path: Path) -> None:
    made = config(tmp_path, policy={"optimizer": {"kwargs": {"fused": True}}})
    assert build_config(dump(made)) == made
    assert pickle.loads(pickle.dumps(made)) == made
    assert dump(made)["policy"]["optimizer"]["kwargs"]["fused"] is True


def test_a_dump_is_a_copy(tmp_path: Path) -> None:
    made = config(tmp_path)
    dump(made)["policy"]["hf_config_overrides"]["hidden_size"] = 99
    assert made.policy.hf_config_overrides["hidden_size"] == 16


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"sft": {"seed": "abc"}}, ["sft.seed", "integer", "'abc'"]),
        ({"sft": {"seed": -1}}, ["sft.seed", "-1"]),
        ({"sft": {"feed": "worker"}}, ["sft.feed", "'workers' or 'driver'", "'worker'"]),
        ({"sft": {"max_stps": 1}}, ["sft.max_stps", "sft.max_num_steps"]),
        ({"policy": {"precision": "fp8"}}, ["policy.precision", "'float32' or 'bfloat16'"]),
        ({"policy": {"optimizer": {"kwargs": {"weigth_decay": 1}}}}, ["weigth_decay", "weight_decay"]),
        ({"policy": {"max_total_sequence_length": 1}}, ["policy.max_total_sequence_length"]),
        ({"policy": {"max_grad_norm": float("nan")}}, ["policy.max_grad_norm"]),
        ({"policy": {"tokenizer": {"name": "x"}}}, ["tokenizer.name='x'", "train_vocab_size=400", "remove one"]),
        ({"policy": {"tokenizer": {"train_vocab_size": None}}}, ["tokenizer.name", "train_vocab_size"]),
        ({"policy": {"model_name": "folder"}}, ["train_vocab_size=400", "'folder'"]),
        ({"policy": {"hf_config_overrides": {"model_type": None}}}, ["model_type"]),
        ({"data": {"validation": "v", "validation_fraction": 0.1}}, ["'v'", "0.1", "remove one"]),
        ({"data": {"train": []}}, ["data.train"]),
        ({"data": {"train": "a\0b"}}, ["train holds a null character"]),
        (
            {"policy": {"publish_weights": {"nmae": "x"}}},
            ["policy.publish_weights.nmae", "policy.publish_weights.name"],
        ),
        ({"policy": {"publish_weights": {"name": ""}}}, ["policy.publish_weights.name", "at least 1 character"]),
        ({"policy": {"publish_weights": {"name": "x", "keep": 1}}}, ["policy.publish_weights.keep", "equal to 2"]),
        ({"policy": {"publish_weights": {"name": "x", "every": 0}}}, ["policy.publish_weights.every", "than 0"]),
        ({"policy": {"publish_weights": {"name": "x", "dtype": "fp8"}}}, ["publish_weights.dtype", "'bfloat16'"]),
        ({"policy": {"publish_weights": {"every": 5}}}, ["policy.publish_weights", "every=5 is set, but name is null"]),
        ({"sft": {"seed": True}}, ["sft.seed", "must be an integer, got true"]),
        ({"sft": {"seed": 2**63}}, ["sft.seed", "less than"]),
    ],
)
def test_values_that_cannot_be_are_refused_by_key_and_value(tmp_path: Path, sections: dict, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        config(tmp_path, **sections)
    for word in words:
        assert word in str(error.value)


def test_num_workers_unset_is_one_for_each_gpu(tmp_path: Path) -> None:
    sizes = {"policy": {"train_global_batch_size": 48}}
    assert config(tmp_path, **sizes, cluster={"gpus_per_node": 8, "num_nodes": 2}).cluster.num_workers == 16
    assert config(tmp_path, **sizes, cluster={"gpus_per_node": 8, "num_workers": 2}).cluster.num_workers == 2
    assert config(tmp_path, **sizes, cluster={"num_nodes": 3, "num_workers": None}).cluster.num_workers == 3
    assert config(tmp_path).cluster.num_workers == 1
    with pytest.raises(ConfigError, match=r"cluster\.gpus_per_node.*integer"):
        config(tmp_path, cluster={"gpus_per_node": "many"})


def test_workers_get_environment_and_time_from_the_file(tmp_path: Path) -> None:
    cluster = {"env_vars": {"NCCL_P2P_DISABLE": 1}, "start_timeout_s": 900, "num_workers": 2, "num_nodes": 2}
    options = worker_options(config(tmp_path, cluster=cluster))
    assert options.env_vars["NCCL_P2P_DISABLE"] == "1"
    assert (options.start_timeout_s, options.workers_per_node) == (900, 1)
    with pytest.raises(ConfigError, match="env_vars names RANK, which raylane sets for each worker"):
        config(tmp_path, cluster={"env_vars": {"RANK": "0"}})


@pytest.mark.parametrize("kind", HEADS)
def test_the_reference_pages_are_what_the_models_say(kind: str) -> None:
    assert (PAGES / f"{kind}-config.md").read_text() == reference_markdown(kind), "run: python tests/config_page.py"


def test_every_key_has_a_row_with_a_meaning() -> None:
    meanings, section = {}, ""
    for line in [*reference_markdown("training").splitlines(), *reference_markdown("sft").splitlines()]:
        if line.startswith("#"):
            section = line.lstrip("# ")
        elif row := re.match(r"\| `(\w+)` \| .+? \| .+? \| (.*) \|$", line):
            meanings[f"{section}.{row[1]}"] = row[2]
    paths = set(key_paths(SftRunConfig))
    sections = {path.rpartition(".")[0] for path in paths}
    assert meanings.keys() == paths - sections
    assert all(meanings.values())


def test_every_example_loads() -> None:
    examples = sorted((ROOT / "examples").glob("sft_*.yaml"))
    assert examples
    for example in examples:
        load_config(example)

"""`raylane sft MODEL DATA`: the configuration that a model and data give, and what is shown before training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from raylane.errors import ConfigError
from raylane.nemo.dialect import NEMO_RL
from raylane.sft.config.load import build_config, load_config
from raylane.sft.config.starter import is_override, names_model, starter, starter_document
from sft.conversations import question, tokenizer, write_jsonl


def write_model(folder: Path) -> Path:
    """Write a tiny model, as it would come from the hub."""
    tokenizer().save(folder)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}
    model = AutoConfig.for_model("qwen3", vocab_size=tokenizer().vocab_size, **shape, **heads)
    AutoModelForCausalLM.from_config(model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("gpus", [0, 3, 8])
def test_starter_is_a_configuration_that_fits(gpus: int) -> None:
    made = build_config(
        starter_document("hf:a/b", {"max_position_embeddings": 40_960}, ["a.jsonl", "b"], "runs/b", gpus)
    )
    assert [source.path for source in made.data.train_sources] == ["a.jsonl", "b"]
    assert (made.policy.max_total_sequence_length, made.cluster.num_workers) == (2048, max(1, gpus))
    assert made.policy.train_global_batch_size >= 8
    assert made.policy.precision == ("bfloat16" if gpus else "float32")


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("sft.seed=1", True),
        ("+a.b=c", True),
        ("++a=c", True),
        ("~logger.log_dir", True),
        ("data.jsonl", False),
        ("parts/day=3/a.jsonl", False),
        ("s3://bucket/a=b.jsonl", False),
        ("org/name", False),
    ],
)
def test_data_and_overrides_are_told_apart(word: str, expected: bool) -> None:
    assert is_override(word) is expected


def test_starter_has_the_options_of_the_command(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started by its path, it is the same run."""
    monkeypatch.chdir(tmp_path)
    assert names_model(str(model))
    assert names_model("hf:a/b")
    assert not names_model("run.yaml")
    made = starter(str(model), ["a.jsonl", "sft.seed=3", "~policy.scheduler"], 0, NEMO_RL)
    assert made.path == Path("runs/tiny/run.yaml")
    assert not Path("runs").exists()  # nothing is written before the data could be read
    made.write()
    again = load_config(made.path, (), NEMO_RL)
    assert again == made.config()
    assert (again.sft.seed, again.policy.max_total_sequence_length) == (3, 128)
    with pytest.raises(ConfigError, match=r"no data is named\. .*raylane sft hf:a/b data\.jsonl"):
        starter("hf:a/b", ["sft.seed=1"], 0)


@pytest.mark.parametrize(
    ("words", "has_run", "edit", "reason"),
    [
        (["dta.jsonl"], False, "", None),
        (["data.jsonl", "sft.seed=2"], True, "", None),
        (["dta.jsonl"], True, "", "and the run beside it is of another model or other data"),
        (["data.jsonl"], False, "# mine", "with your changes"),
        (["data.jsonl"], True, "# mine", "with your changes"),
    ],
)
def test_starter_replaces_only_what_nobody_needs(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    has_run: bool,
    edit: str,
    reason: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    first = starter(str(model), words, 0)
    first.write()
    first.path.write_text(first.text() + edit)
    if has_run:
        (first.path.parent / "checkpoints").mkdir()
    second = starter(str(model), ["data.jsonl"], 0)
    if reason is None:
        second.write()
        assert first.path.read_text() == second.text()
    else:
        with pytest.raises(
            ConfigError, match=rf"runs/tiny/run\.yaml exists, {reason}\. Start it by `raylane sft runs/"
        ):
            second.write()
        assert first.path.read_text() == first.text() + edit


def run_raylane(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "raylane", *words],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.processes
def test_model_of_the_hub_is_taken_from_the_cache(model: Path, tmp_path: Path) -> None:
    """The cache has the layout that huggingface_hub documents; the hub itself is out of reach."""
    cached = tmp_path / "hub" / "models--somebody--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    (cached / "snapshots").mkdir()
    write_model(cached / "snapshots" / ("0" * 40))
    write_jsonl(tmp_path / "data.jsonl", [question(seed) for seed in range(9)])
    variables = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    dry = run_raylane(tmp_path, "sft", "hf:somebody/tiny", "data.jsonl", "sft.seed=3", "--dry-run", **variables)
    assert dry.returncode == 0, dry.stderr
    shown = yaml.safe_load(dry.stdout.split("mesh  ")[0])
    assert (shown["sft"]["seed"], shown["data"]["train"]) == (3, ["data.jsonl"])
    assert "first batch: 8 documents, the first 8 of them:" in dry.stdout
    assert dry.stdout.count("[[Answer ") == 8
    assert [path.name for path in (tmp_path / "runs" / "tiny").iterdir()] == ["cache"]
    gone = run_raylane(tmp_path, "sft", "hf:somebody/none", "data.jsonl", **variables)
    assert gone.returncode != 0
    assert "MODEL=hf:somebody/none cannot be had" in gone.stderr
    assert "Traceback" not in gone.stderr


def test_broken_model_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: "):
        starter("model", ["a.jsonl"], 0)
    content: dict[str, Any] = {"max_position_embeddings": None}
    (tmp_path / "model" / "config.json").write_text(json.dumps(content))
    assert starter("model", ["a.jsonl"], 0).config().policy.max_total_sequence_length == 2048

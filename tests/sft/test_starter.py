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
from raylane.sft.config.load import build_config
from raylane.sft.config.starter import is_override, names_model, starter_document, write_starter
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


def test_starter_is_written_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert names_model(str(model))
    assert names_model("hf:a/b")
    assert not names_model("run.yaml")
    path, overrides = write_starter(str(model), ["a.jsonl", "sft.seed=1"], 0)
    assert (path, overrides) == (Path("runs/tiny/run.yaml"), ["sft.seed=1"])
    assert yaml.safe_load(path.read_text())["policy"]["max_total_sequence_length"] == 128
    write_starter(str(model), ["a.jsonl"], 0)
    with pytest.raises(
        ConfigError, match=r"runs/tiny/run\.yaml exists, for other data .*`raylane sft runs/tiny/run.yaml`"
    ):
        write_starter(str(model), ["b.jsonl"], 0)
    with pytest.raises(ConfigError, match=r"no data is named\. .*raylane sft hf:a/b data\.jsonl"):
        write_starter("hf:a/b", ["sft.seed=1"], 0)


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
    assert sorted(path.name for path in (tmp_path / "runs" / "tiny").iterdir()) == ["cache", "run.yaml"]
    gone = run_raylane(tmp_path, "sft", "hf:somebody/none", "data.jsonl", **variables)
    assert gone.returncode != 0
    assert "MODEL=hf:somebody/none cannot be had" in gone.stderr
    assert "Traceback" not in gone.stderr


def test_broken_model_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: "):
        write_starter("model", ["a.jsonl"], 0)
    content: dict[str, Any] = {"max_position_embeddings": None}
    (tmp_path / "model" / "config.json").write_text(json.dumps(content))
    assert write_starter("model", ["a.jsonl"], 0)[0].is_file()

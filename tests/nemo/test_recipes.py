"""Import of NeMo-RL's fine-tuning recipes: which are complete with local paths for names, and what the others lack.

recipes.txt has their keys and values.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from raylane.nemo.dialect import NEMO_RL
from raylane.nemo.import_config import ImportedConfig, import_config
from raylane.sft.config.load import load_config

PROMPT = "examples/prompts/math.txt"
DATA_SETS = ("squad", "OpenMathInstruct-2", "tulu3_sft_mixture", "Nemotron-Cascade-2-SFT-Math", "clevr-cogent")
INCOMPLETE = {
    "sft-gpt-oss-20b-1n4g-fsdp4ep4-automodel.yaml": "policy.dequantize_base_checkpoint",
    "sft-gpt-oss-20b-1n8g-fsdp8ep8-automodel.yaml": "policy.dequantize_base_checkpoint",
    "sft-qwen3-0.6B-1n8g-megatron-yarn-128k.yaml": "data.train.max_samples",
    "sft_avlm.yaml": "data.train.dataset_name='daily-omni'",
}
"""Recipes that do not import completely, and the key that prevents it."""


def recipes() -> dict[str, dict[str, Any]]:
    """Return the keys and values of each recipe."""
    parts: dict[str, dict[str, Any]] = {}
    name = ""
    for line in Path(__file__).with_name("recipes.txt").read_text().splitlines():
        if line.startswith("["):
            name = line.strip("[]")
            parts[name] = dict(parts["sft.yaml"]) if "sft.yaml" in parts else {}
        elif line and not line.startswith("#"):
            key, _, value = line.partition(" = ")
            if value == "-":
                del parts[name][key]
            else:
                parts[name][key] = json.loads(value)
    return parts


def write(folder: Path, values: dict[str, Any]) -> Path:
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *parents, last = key.split(".")
        section = nested
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(nested))
    return path


RECIPES = recipes()


def imported(tmp_path: Path, name: str) -> ImportedConfig:
    (tmp_path / "math.txt").write_text("Solve this.\n\n{}\n")
    names = {PROMPT: str(tmp_path / "math.txt"), **{data: str(tmp_path / f"{data}.jsonl") for data in DATA_SETS}}
    return import_config(write(tmp_path, RECIPES[name]), (), names)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_imports_or_names_what_is_missing(tmp_path: Path, name: str) -> None:
    result = imported(tmp_path, name)
    if name in INCOMPLETE:
        assert any(sentence.startswith(INCOMPLETE[name]) for sentence in result.to_do)
    else:
        assert result.to_do == ()
        # What was written is what raylane loads, whichever dialect reads it.
        (tmp_path / "own.yaml").write_text(result.yaml("recipe.yaml"))
        config = load_config(tmp_path / "own.yaml", (), NEMO_RL)
        assert config.policy.model_name is not None
        assert config.policy.model_name.startswith("hf:")
    assert not [problem.text for problem in result.refused if "unknown key" in problem.text]


def test_most_recipes_are_complete() -> None:
    assert len(RECIPES) == 29
    assert len(RECIPES) - len(INCOMPLETE) == 25


def test_recipe_keeps_what_it_asks_for(tmp_path: Path) -> None:
    config = imported(tmp_path, "sft-llama3.1-8b-1n8g-megatron-lora.yaml").document["policy"]["dtensor_cfg"]["lora_cfg"]
    asked = {"dim": 128, "alpha": 128, "dropout_position": "post", "lora_A_init": "xavier"}
    assert config == {"enabled": True, **asked}
    result = imported(tmp_path, "sft-qwen2.5-math7b-2n8g-megatron.yaml")
    assert result.document["policy"]["dtensor_cfg"]["context_parallel_size"] == 2
    assert "megatron_cfg" not in result.document["policy"]
    reasons = {note.key: note.reason for note in result.notes}
    assert reasons["policy.megatron_cfg"].startswith("raylane's own layers train instead, for context_parallel_size=2")
    assert result.document["data"]["prompt"].endswith("math.txt")
    assert (result.document["data"]["input_key"], result.document["data"]["output_key"]) == (
        "problem",
        "generated_solution",
    )

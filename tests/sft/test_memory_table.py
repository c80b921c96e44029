"""Plans of large models, as `raylane plan` makes them, equal the table of the documentation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from raylane.sft.config.schema import SftRunConfig
from raylane.sft.data.prepare import prepare
from raylane.sft.run.planning import plan_run, render
from sft import tiny_run

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "memory.md"
ROUNDS, ROW_TOKENS = 8, 4096
D = "policy.dtensor_cfg."

SHAPES = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
"""Sizes of Llama 3.1 (Dubey et al., arXiv:2407.21783, table 3); both have 8 key-value heads and 128,256 words."""
PARAMETERS = {"8B": "8,030,261,248", "70B": "70,553,706,496"}

FULL, EACH = {D + "activation_checkpointing": True}, {D + "reduce_every_micro_batch": True}
TP8 = {D + "tensor_parallel_size": 8, D + "sequence_parallel": True}
LORA = {D + "lora_cfg": {"enabled": True, "dim": 16}}

# Model, GPUs, words for the layout, settings.
LAYOUTS: list[tuple[str, int, str, dict[str, Any]]] = [
    ("8B", 8, "FSDP 8", {}),
    ("8B", 8, "FSDP 8, checkpointing", FULL),
    ("8B", 8, "FSDP 8, checkpointing, reduce each", {**FULL, **EACH}),
    ("8B", 64, "FSDP 64, checkpointing, reduce each", {**FULL, **EACH}),
    ("8B", 64, "HSDP 8 x 8, checkpointing, reduce each", {**FULL, **EACH, D + "dp_replicate_size": 8}),
    ("70B", 8, "FSDP 8, checkpointing, reduce each", {**FULL, **EACH}),
    ("70B", 8, "LoRA 16, FSDP 8, checkpointing", {**LORA, **FULL}),
    ("70B", 64, "FSDP 64, checkpointing", FULL),
    ("70B", 64, "FSDP 64, checkpointing, reduce each", {**FULL, **EACH}),
    ("70B", 64, "TP 8 with SP, FSDP 8, checkpointing, reduce each", {**TP8, **FULL, **EACH}),
    ("70B", 64, "TP 8 with SP, PP 4, FSDP 2, checkpointing", {**TP8, **FULL, D + "pipeline_parallel_size": 4}),
]
COLUMNS = ("parameters", "gradients", "unreduced", "optimizer", "gathered", "activations", "logits")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with a configuration and a tokenizer, but no weights."""
    folder = tmp_path_factory.mktemp("models")
    tiny_run.write_conversations(folder / "train.jsonl", 600, seed=1)
    tiny_run.write_conversations(folder / "validation.jsonl", 21, seed=2)
    tokenizer = prepare(tiny_run.config_of(folder)).tokenizer_dir
    found = {}
    for name, sizes in SHAPES.items():
        found[name] = folder / name
        shutil.copytree(tokenizer, found[name])
        common = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False}
        document = {**common, **sizes, "max_position_embeddings": 131072, "rope_theta": 5e5}
        (found[name] / "config.json").write_text(json.dumps(document))
    return found


def run_of(model: Path, gpus: int, settings: dict[str, Any]) -> SftRunConfig:
    cluster = {"cluster.num_workers": gpus, "cluster.gpus_per_node": 8, "cluster.num_nodes": gpus // 8}
    group = {"tensor_parallel_size", "pipeline_parallel_size"}
    readers = gpus
    for key in group:
        readers //= settings.get(D + key, 1)
    changes = {
        **cluster,
        "policy.model_name": str(model),
        "policy.tokenizer": {},
        "policy.hf_config_overrides": {},
        "policy.sequence_packing.enabled": False,
        "policy.max_total_sequence_length": ROW_TOKENS,
        "policy.train_micro_batch_size": 1,
        "policy.train_global_batch_size": ROUNDS * readers,
        "policy.loss_chunk_tokens": 1024,
        "policy.precision": "bfloat16",
        "sft.val_micro_batch_size": 1,
        "sft.val_global_batch_size": readers,
        **settings,
    }
    return tiny_run.config_of(model.parent, changes)


@pytest.mark.parametrize("layout", LAYOUTS, ids=[f"{model}-{gpus}-{words}" for model, gpus, words, _ in LAYOUTS])
def test_plan_of_a_large_model_equals_the_table(
    models: dict[str, Path], layout: tuple[str, int, str, dict[str, Any]]
) -> None:
    model, gpus, words, settings = layout
    run = run_of(models[model], gpus, settings)
    plan = plan_run(run)
    assert plan.micro_batches == ROUNDS
    text = render(plan, run)
    if "LoRA" not in words:
        assert f"{PARAMETERS[model]} parameters" in text
    assert f"at most about {plan.memory.total / 2**30:.2f} GiB on each worker" in text
    numbers = [*(plan.memory.parts[name] for name in COLUMNS), plan.memory.total]
    cells = " | ".join(f"{number / 2**30:.1f}" for number in numbers)
    row = f"| {model} | {gpus} | {words} | {cells} | {plan.memory.moment} |"
    assert row in PAGE.read_text(encoding="utf-8").splitlines(), row

"""No rank holds the whole model: ranks train under a limit of memory that is below the size of the model."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.ranks import Ranks

from raylane.sft.config.schema import SftRunConfig
from raylane.sft.data.prepare import prepare
from raylane.training.model.hf_config import model_config
from sft import measuring, reference_loop, tiny_run
from sft.measuring import HF, D

pytestmark = pytest.mark.ranks

LAYERS = 16
SIZES = {
    HF + "model_type": "llama",
    HF + "hidden_size": 512,
    HF + "intermediate_size": 1408,
    HF + "num_attention_heads": 8,
    HF + "num_key_value_heads": 2,
    HF + "tie_word_embeddings": False,
}
FULL = {D + "shard_parameters": "always", D + "activation_checkpointing": True, D + "reduce_every_micro_batch": True}
LORA = {D + "lora_cfg": {"enabled": True, "dim": 4}}
CASES = {
    # Workers, settings. A trained weight has four numbers: each of eight workers holds half of the model's bytes.
    "lora": (2, LORA),
    "lora-tp": (2, {**LORA, D + "tensor_parallel_size": 2}),
    "all-weights": (8, {}),
    "pipeline": (8, {D + "pipeline_parallel_size": 8, D + "reduce_every_micro_batch": False}),
}
EACH_CHANGE = ("lora",)
"""Cases of `make test-all`; the others, of up to eight workers, are for `make test-matrix`."""


def run_of(folder: Path, layers: int, world: int, settings: dict[str, Any]) -> SftRunConfig:
    shape = {**SIZES, HF + "num_hidden_layers": layers, "cluster.num_workers": world}
    # One micro-batch for each worker: each gathers all layers again.
    rows = {"policy.train_global_batch_size": world, "policy.train_micro_batch_size": 1, "sft.val_micro_batch_size": 1}
    return tiny_run.config_of(folder, {**shape, **rows, **FULL, **settings})


def from_folder(config: SftRunConfig, model: Path, tokenizer: Path) -> SftRunConfig:
    """Return the same run with the weights of a folder."""
    changed = {"name": str(tokenizer), "train_vocab_size": None, "chat_template": None}
    names = config.policy.tokenizer.model_copy(update=changed)
    policy = config.policy.model_copy(update={"model_name": str(model), "hf_config_overrides": {}, "tokenizer": names})
    return config.model_copy(update={"policy": policy})


@pytest.fixture(scope="module")
def model(folder: Path) -> tuple[Path, int]:
    """Return a model folder of many small files, and the bytes of its weights in float32."""
    config = run_of(folder, LAYERS, 1, {})
    prepared = prepare(config)
    made = reference_loop.new_model(
        model_config(config.policy, prepared.vocab_size, prepared.pad_id, prepared.end_ids[0]), 1
    )
    made.save_pretrained(folder / "model", max_shard_size="16MB")
    return folder / "model", 4 * sum(one.numel() for one in made.parameters())


@contextmanager
def limited(allowed: int) -> Iterator[None]:
    """Limit the private memory of this process to what it has now and `allowed` bytes more."""
    # RLIMIT_DATA counts private writable mappings (man setrlimit), which includes the file being read.
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (measuring.data_size() + allowed, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def trains(worker: Any, small: SftRunConfig, config: SftRunConfig, exported: Path | None, allowed: int) -> float:
    """Build a model, run a step and write the model under a limit; return the loss. Runs on every rank."""
    measuring.warm_up(worker, small)
    with limited(allowed):
        measuring.setup(worker, config)
        loss: float = worker.train_step(0)["loss"]
        if exported is not None:
            worker.save_hf(str(exported))
    return loss


def refused_whole_model(worker: Any, path: Path, allowed: int) -> str:
    """Return the error of loading the whole model under the limit. Runs on every rank, and loads it on the first."""
    from transformers import AutoModelForCausalLM

    del worker.model, worker.optimizer
    measuring.resident(trim=True)
    if worker._rank:
        return ""
    with limited(allowed), pytest.raises((RuntimeError, MemoryError)) as error:
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return str(error.value)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in EACH_CHANGE else pytest.mark.matrix) for name in CASES],
)
def test_no_rank_holds_the_whole_model(folder: Path, model: tuple[Path, int], name: str) -> None:
    path, size = model
    world, settings = CASES[name]
    random = run_of(folder, LAYERS, world, settings)
    prepared = prepare(random)
    config = from_folder(random, path, prepared.tokenizer_dir)
    prepare(config)  # here: what reads data must not be loaded under the limit
    small = run_of(folder, 8 if world == 8 else 2, world, settings)
    exported = folder / f"exported-{name}"
    limit = int(0.9 * size)
    with Ranks(world) as ranks:
        losses = ranks.run(trains, small, config, exported, limit)
        again = ranks.run(trains, small, random, None, limit)
        error = ranks.run(refused_whole_model, path, limit)[0]
    assert len({*losses}) == len({*again}) == 1
    # The control: the same limit is too little for the whole model.
    assert "alloc" in error
    written = {key for file in exported.glob("*.safetensors") for key in load_file(file)}
    assert written == {key for file in path.glob("*.safetensors") for key in load_file(file)}

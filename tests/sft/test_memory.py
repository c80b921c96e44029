"""The estimate of the memory of a step against the memory that the step takes, measured in processes on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ranks import RankGroups, Ranks

from sft import measuring
from sft.measuring import D

pytestmark = pytest.mark.ranks

ALWAYS, NEVER = {D + "shard_parameters": "always"}, {D + "shard_parameters": "never"}
FULL, HALF = {D + "activation_checkpointing": True}, {"policy.precision": "bfloat16"}
# On a CPU without AVX-512, torch multiplies bfloat16 matrices up to 60 times slower than those of float32, with copies
# that the estimate leaves out.
SMALL_PRODUCTS = {"policy.max_total_sequence_length": 128, measuring.HF + "vocab_size": 2048}
TP, PP = {D + "tensor_parallel_size": 2}, {D + "pipeline_parallel_size": 2}
ADAPTERS = {D + "lora_cfg": {"enabled": True, "dim": 8}}

CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    # workers, micro-batches, settings
    "whole": (1, 1, NEVER),
    "whole-2": (1, 2, NEVER),
    "whole-on-2": (2, 1, NEVER),
    "fsdp1": (1, 1, ALWAYS),
    "fsdp1-2": (1, 2, ALWAYS),
    "fsdp2": (2, 1, ALWAYS),
    "fsdp2-2": (2, 2, ALWAYS),
    "fsdp2-each": (2, 2, {**ALWAYS, D + "reduce_every_micro_batch": True}),
    "full": (2, 1, {**ALWAYS, **FULL}),
    "full-2": (2, 2, {**ALWAYS, **FULL}),
    "selective": (2, 1, {**ALWAYS, D + "activation_checkpointing": "selective"}),
    "every-other": (2, 1, {**ALWAYS, D + "activation_checkpointing": "every_other_layer"}),
    "lora": (2, 1, {**ALWAYS, **ADAPTERS}),
    "lora-full": (2, 2, {**ALWAYS, **ADAPTERS, **FULL}),
    "bf16": (2, 1, HALF),
    "bf16-2": (2, 2, HALF),
    "bf16-full": (2, 1, {**HALF, **FULL}),
    "bf16-each": (2, 2, {**HALF, **FULL, **SMALL_PRODUCTS, D + "reduce_every_micro_batch": True}),
    "one-chunk": (2, 1, {**ALWAYS, "policy.loss_chunk_tokens": None}),
    "tied": (2, 2, {**ALWAYS, measuring.HF + "tie_word_embeddings": True}),
    "qwen3": (2, 1, {**ALWAYS, measuring.HF + "model_type": "qwen3"}),
    "tp2": (2, 1, TP),
    "tp2-2": (2, 2, TP),
    "tp2-sp": (2, 1, {**TP, D + "sequence_parallel": True}),
    "tp2-full": (2, 1, {**TP, **FULL}),
    "cp2": (2, 1, {**ALWAYS, D + "context_parallel_size": 2}),
    "cp2-2": (2, 2, {**ALWAYS, D + "context_parallel_size": 2}),
    "pp2": (2, 2, PP),
    "pp2-4": (2, 4, PP),
    "pp2-gpipe": (2, 4, {**PP, D + "pipeline_schedule": "gpipe"}),
    "pp2-full": (2, 4, {**PP, **FULL}),
}
EACH_CHANGE = ("fsdp2-2", "bf16-each")
"""Cases of `make test-all`: the two ways of keeping weights. The others are for `make test-matrix`."""


@pytest.fixture(scope="module")
def groups() -> Iterator[RankGroups]:
    with RankGroups() as groups:
        yield groups


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in EACH_CHANGE else pytest.mark.matrix) for name in CASES],
)
def test_estimate_is_within_a_tenth_of_measured(folder: Path, groups: RankGroups, name: str) -> None:
    world, rounds, changes = CASES[name]
    config = measuring.configuration(folder, world, rounds, changes)
    wanted = measuring.planned(config)
    small = measuring.configuration(folder, world, rounds, {**changes, measuring.HF + "num_hidden_layers": 2})
    # The estimate is for the worker that needs the most; in a pipeline the others need less.
    found = max(groups.of(world).run(measuring.measured, small, config))
    ratio = wanted.total / found
    print(f"{name}: planned {wanted.total / 2**20:.1f} MiB, measured {found / 2**20:.1f} MiB, {ratio:.3f}", wanted)
    assert 0.9 < ratio < 1.1, (ratio, wanted, found)


def test_measured_memory_counts_what_is_allocated() -> None:
    # In a new process: one that has trained may release memory at any time.
    with Ranks(1) as alone:
        during, after, peak = alone.run(measuring.instrument)[0]
    assert 2**26 <= during < 1.1 * 2**26
    assert after < 0.1 * 2**26
    assert 2**26 <= peak < 1.1 * 2**26

"""The loop over micro-batches runs no operation for which the CPU would wait for a GPU.

On a CPU nothing waits, but the operations are the same: those that read a value, or whose result has a size that
depends on values. `tests/gpu` has the same check with torch's own debug mode.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from raylane.training.model.loss import CrossEntropy
from raylane.training.run import step
from raylane.training.run.micro_batches import division
from sft import tiny_run

aten = torch.ops.aten
WAITING = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten.unique_dim.default,
    aten._unique2.default,
}
ON_HOST = {"document_lengths", "supervised", "divide"}
"""Functions of raylane that read batches in CPU memory, never on the GPU."""

D = "policy.dtensor_cfg."
CASES: dict[str, dict[str, Any]] = {
    "whole": {},
    "fsdp": {D + "shard_parameters": "always"},
    "bfloat16": {"policy.precision": "bfloat16"},
    "full": {"policy.precision": "bfloat16", D + "activation_checkpointing": True},
    "selective": {D + "activation_checkpointing": "selective"},
    "lora": {D + "lora_cfg": {"enabled": True, "dim": 2}},
    "one chunk": {"policy.loss_chunk_tokens": None},
    "gemma3": {"policy.hf_config_overrides.model_type": "gemma3_text"},
    "dynamic": {
        "policy.sequence_packing": {"enabled": False},
        "policy.dynamic_batching": {"enabled": True, "train_mb_tokens": 128, "sequence_length_round": 4},
    },
}


class Waits(TorchDispatchMode):
    """Record of the operations that would wait, with the function of this project or of transformers that ran them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and record it if it waits."""
        by_mask = func is aten.index.Tensor and any(one is not None and one.dtype is torch.bool for one in args[1])
        if (func in WAITING or by_mask) and not ON_HOST & set(_callers()):
            self.found.append(f"{func} in {' < '.join(list(_callers())[:8])}")
        return func(*args, **(kwargs or {}))


def _callers() -> Iterator[str]:
    frame = sys._getframe(2)
    while frame.f_back is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


@pytest.mark.parametrize("name", CASES)
def test_micro_batches_read_no_value_of_the_device(folder: Path, worker: Any, name: str) -> None:
    config = tiny_run.config_of(folder, CASES[name])
    worker.setup(config, tiny_run.prepare(config), 8)
    batch = worker.own_rows(0)
    counts = step.count(batch, worker.device, worker.mesh.dims)
    rows = division(config.policy)
    with Waits() as waits:
        total = step._backward_each(worker.model, batch, rows, CrossEntropy(16), counts, worker.device, False)
    worker.optimizer.zero_grad(set_to_none=True)
    assert float(total[0]) > 0
    assert waits.found == []


def test_waits_finds_what_reads_values() -> None:
    values = torch.arange(4)
    with Waits() as waits:
        float(values[0])
        values[values > 1]
        torch.nonzero(values)
        bool((values == 0).all())
    assert len(waits.found) >= 4

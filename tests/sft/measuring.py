"""Measured memory of training steps: peak of the resident memory of a process, beyond what it had before the model.

The kernel counts the pages of a process that are in memory (VmRSS in /proc/self/status) and remembers the largest count
(VmHWM) until it is told to forget it (5 in /proc/self/clear_refs, Linux's Documentation/filesystems/proc.rst). Three
things make this follow the tensors closely: malloc returns freed blocks at once; a run with fewer layers has loaded all
code, opened all connections and filled oneDNN's cache of kernels before; and the rows are full.
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import torch

from raylane.sft.config.schema import SftRunConfig
from raylane.sft.data.prepare import prepare
from raylane.training.model.hf_config import model_config, model_shape
from raylane.training.parallel import mesh
from raylane.training.run.memory import MemoryEstimate, estimate_memory
from raylane.workers.batch import BatchDict
from sft import tiny_run

D, HF = "policy.dtensor_cfg.", "policy.hf_config_overrides."

MODEL = {
    HF + "model_type": "llama",
    HF + "hidden_size": 512,
    HF + "intermediate_size": 1408,
    HF + "num_hidden_layers": 6,
    HF + "num_attention_heads": 8,
    HF + "num_key_value_heads": 2,
    HF + "vocab_size": 8192,
    HF + "max_position_embeddings": 1024,
    HF + "tie_word_embeddings": False,
    "policy.max_total_sequence_length": 1024,
    "policy.train_micro_batch_size": 1,
    "policy.loss_chunk_tokens": 256,
}
"""A model of 25 million parameters: 97 MiB of weights, 386 MiB with gradients and AdamW, 246 MiB of activations."""


def configuration(folder: Path, world: int, rounds: int, changes: dict[str, Any]) -> SftRunConfig:
    """Return the run with so many micro-batches on each worker."""
    config = tiny_run.config_of(folder, {**MODEL, "cluster.num_workers": world, **changes})
    rows = rounds * mesh.ParallelDims.of(config.policy.dtensor_cfg, config.cluster.num_workers).readers
    return tiny_run.config_of(
        folder, {**MODEL, "cluster.num_workers": world, "policy.train_global_batch_size": rows, **changes}
    )


def planned(config: SftRunConfig) -> MemoryEstimate:
    """Return the estimate of `raylane plan`."""
    prepared = prepare(config)
    hf_config = model_config(config.policy, prepared.vocab_size, prepared.pad_id, prepared.end_ids[0])
    return estimate_memory(config, model_shape(hf_config, config.policy.dtensor_cfg.lora_cfg))


def measured(worker: Any, small: SftRunConfig, config: SftRunConfig) -> int:
    """Return the peak of the memory of a step of the run, in bytes; `small` is the same run with fewer layers."""
    warm_up(worker, small)
    before = resident(trim=True)
    setup(worker, config)
    step(worker)  # the first step makes the state of the optimizer
    resident(trim=True)
    forget_peak()
    step(worker)
    return peak() - before


def warm_up(worker: Any, small: SftRunConfig) -> None:
    """Run a step of a small run and release its model."""
    return_freed_memory()
    setup(worker, small)
    step(worker)
    del worker.model, worker.optimizer
    resident(trim=True)


def setup(worker: Any, config: SftRunConfig) -> None:
    """Make the model of a run."""
    worker.setup(config, prepare(config), 8)


def step(worker: Any) -> None:
    """Run a step on full rows, in which every token but the last has a label."""
    policy = worker.config.policy
    rows = policy.train_global_batch_size // worker.mesh.dims.readers
    data = BatchDict.from_arrays(worker.train_rows.full_rows(rows, policy.max_total_sequence_length))
    worker.train_batch(data, 0, None, None, False)


def return_freed_memory() -> None:
    """Make malloc return freed blocks to the kernel at once, and use one arena (man mallopt)."""
    mmap_threshold, trim_threshold, arena_max = -3, -1, -8
    for option, value in ((mmap_threshold, 65536), (trim_threshold, 65536), (arena_max, 1)):
        ctypes.CDLL(None).mallopt(option, value)


def instrument(_: Any) -> tuple[int, int, int]:
    """Return the memory measured with a block of 64 MiB, without it, and at the peak, beyond what was there before."""
    return_freed_memory()
    before = resident(trim=True)
    forget_peak()
    block = torch.ones(2**24)
    during = resident(trim=False)
    del block
    return during - before, resident(trim=True) - before, peak() - before


def resident(*, trim: bool) -> int:
    """Return the resident memory of this process in bytes; with `trim` after releasing what can be released."""
    if trim:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS")


def peak() -> int:
    """Return the largest resident memory since `forget_peak`, in bytes."""
    return _status("VmHWM")


def data_size() -> int:
    """Return the private writable memory of this process, in memory or not, in bytes."""
    return _status("VmData")


def forget_peak() -> None:
    """Start a new measurement of the peak."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))

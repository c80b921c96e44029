"""Fine-tuning on a GPU: the losses of the CPU, no waiting in the loop over micro-batches, and the planned memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import ranks
from tests.training.test_attention import dense

from raylane.sft.run import trainer
from raylane.training.model.attention import PackedRows, attend
from raylane.training.model.loss import CrossEntropy
from raylane.training.run import step
from raylane.training.run.micro_batches import division, on_device
from raylane.workers.batch import BatchDict
from sft import measuring, tiny_run
from sft.measuring import D
from sft.test_trainer import losses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

CASES = {
    "float32": {D + "shard_parameters": "never"},
    "fsdp": {D + "shard_parameters": "always"},
    "bfloat16": {"policy.precision": "bfloat16"},
    "full": {"policy.precision": "bfloat16", D + "activation_checkpointing": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    tiny_run.write_data(folder)
    return folder


@pytest.fixture(scope="module")
def worker() -> Iterator[Any]:
    """Return the only worker of a run, on the first GPU."""
    with ranks.only_worker("cuda") as worker:
        yield worker


@pytest.fixture(scope="module")
def workspaces(folder: Path, worker: Any) -> None:
    """Let the libraries take their memory, 75 MB on an H200, which no plan counts."""
    for name in ("float32", "bfloat16"):
        measuring.setup(worker, measuring.configuration(folder, 1, 1, {"cluster.gpus_per_node": 1, **CASES[name]}))
        measuring.step(worker)


@pytest.fixture
def sync_is_an_error() -> Iterator[None]:
    """Make torch raise where the CPU waits for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    yield
    torch.cuda.set_sync_debug_mode(before)


def batch_of(worker: Any, rounds: int) -> BatchDict:
    rows = worker.train_rows.full_rows(rounds, worker.config.policy.max_total_sequence_length)
    return BatchDict.from_arrays(rows)


def release(worker: Any) -> None:
    """Release model and optimizer of an earlier setup, whose modules and hooks are in reference cycles."""
    for name in ("model", "optimizer"):
        vars(worker).pop(name, None)
    gc.collect()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("sync_is_an_error")
def test_micro_batches_do_not_wait_for_the_gpu(folder: Path, worker: Any, name: str) -> None:
    measuring.setup(worker, measuring.configuration(folder, 1, 4, {"cluster.gpus_per_node": 1, **CASES[name]}))
    measuring.step(worker)  # the first step opens connections and makes the state of the optimizer
    batch = batch_of(worker, 4)
    counts = step.count(batch, worker.device, worker.mesh.dims)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    how = division(worker.config.policy)
    total = step._backward_each(worker.model, batch, how, CrossEntropy(256), counts, worker.device, False)
    torch.cuda.set_sync_debug_mode("default")
    worker.optimizer.zero_grad(set_to_none=True)
    assert float(total[0]) > 0


@pytest.mark.parametrize("window", [None, 1, 30, 400])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_equals_a_dense_mask(window: int | None, kv_heads: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    lengths = [50, 1, 150, 55]
    inputs = [torch.randn(1, heads, 256, 32, requires_grad=True) for heads in (4, kv_heads, kv_heads)]
    on_gpu = [x.detach().to("cuda", dtype).requires_grad_() for x in inputs]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    ours, _ = attend(None, *on_gpu, None, sliding_window=window, packed_rows=PackedRows.of(positions))
    wanted = dense(*inputs, lengths, window)
    limits = {"atol": 3e-2, "rtol": 3e-2} if dtype == torch.bfloat16 else {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(ours.float().cpu(), wanted, **limits)
    mine, theirs = torch.autograd.grad(ours.sum(), on_gpu), torch.autograd.grad(wanted.sum(), inputs)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.float().cpu(), other, **limits)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("sharded", ["never", "always"])
def test_run_has_the_losses_of_plain_torch_on_the_cpu(folder: Path, sharded: str) -> None:
    changes = {
        "cluster.gpus_per_node": 1,
        D + "shard_parameters": sharded,
        "checkpointing.checkpoint_dir": str(folder / sharded / "saved"),
        "logger.log_dir": str(folder / sharded),
        "sft.val_at_end": True,
    }
    config = tiny_run.config_of(folder, changes)
    result = trainer.run(config)
    wanted = tiny_run.reference_losses(config, tiny_run.prepared_in(folder), 8)
    assert list(losses(config).values()) == pytest.approx(wanted, abs=1e-3)
    assert (result.steps, result.stopped) == (8, False)
    assert result.hf_dir is not None


def test_batches_arrive_unchanged_from_the_copying_stream(worker: Any) -> None:
    parts = [BatchDict(x=torch.full((4, 1000), number), names=[f"{number}"] * 4) for number in range(20)]
    sums = []
    for moved, host in on_device(parts, worker.device):
        assert moved["x"].is_cuda
        assert moved["names"] == host["names"]
        sums.append(moved["x"].sum())
    assert [int(one) for one in sums] == [4000 * number for number in range(20)]


@pytest.mark.usefixtures("workspaces")
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_step_takes_the_planned_memory(folder: Path, worker: Any, name: str, rounds: int) -> None:
    config = measuring.configuration(folder, 1, rounds, {"cluster.gpus_per_node": 1, **CASES[name]})
    release(worker)
    before = torch.cuda.memory_allocated()
    measuring.setup(worker, config)
    measuring.step(worker)
    torch.cuda.reset_peak_memory_stats()
    measuring.step(worker)
    found = torch.cuda.max_memory_allocated() - before
    wanted = measuring.planned(config)
    assert 0.9 < wanted.total / found < 1.1, (wanted, found)

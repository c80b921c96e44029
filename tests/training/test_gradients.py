"""Sum of gradients over the workers of one host, by shared memory and by all-reduce, in real processes."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

from raylane.training.parallel.gradients import GradientSum

WORLD, SIZES = 3, ((5, 7), (11,), (2, 3))


def gradient(rank: int, turn: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + 10 * turn + index)
    return torch.randn(SIZES[index], generator=generator)


def in_one_process(rank: int, port: int, shared_bytes: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    dist.init_process_group("gloo")
    before = len(os.listdir("/proc/self/fd"))
    unused, partly = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(5))
    parameters = [*(torch.nn.Parameter(torch.zeros(size)) for size in SIZES), partly, unused]
    numel = sum(parameter.numel() for parameter in parameters)
    total = GradientSum(numel, len(parameters), torch.device("cpu"), shared_bytes=shared_bytes)
    assert (total._shared is not None) == (shared_bytes > 0)
    assert len(os.listdir("/proc/self/fd")) == before, "the mapping needs no descriptor"
    kept = []
    for turn in range(20):
        for index in range(len(SIZES)):
            parameters[index].grad = gradient(rank, turn, index)
        partly.grad = torch.full((5,), 3.0) if rank == turn % WORLD else None
        total(parameters)
        assert unused.grad is None, "a parameter that no worker has used has no gradient"
        assert partly.grad is not None
        assert partly.grad.tolist() == [3.0] * 5, "one worker has used it"
        kept.append([parameter.grad for parameter in parameters[: len(SIZES)]])
    for turn, found in enumerate(kept):  # only now: later sums must not change earlier ones
        for index, one in enumerate(found):
            wanted = torch.stack([gradient(other, turn, index) for other in range(WORLD)]).sum(0)
            torch.testing.assert_close(one, wanted)
    bits: list[object] = [None] * WORLD
    dist.all_gather_object(bits, [one.numpy().tobytes() for found in kept for one in found])
    assert all(other == bits[0] for other in bits), "replicas that differ in one bit drift apart"
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.processes
@pytest.mark.parametrize("shared_bytes", [0, 2**20])
def test_gradient_sum_is_equal_on_all_workers(shared_bytes: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    multiprocessing.spawn(in_one_process, (store.port, shared_bytes), nprocs=WORLD)

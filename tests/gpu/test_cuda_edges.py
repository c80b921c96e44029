"""CUDA tensors on edges of compiled graphs, by every transport."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

import raylane
from raylane import bind

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
TRANSPORTS = ["auto", "cuda_ipc", "gloo", "nixl", "nccl"]
COUNT = 1_000_000
SLEEP_CYCLES = 200_000_000
"""Work for a GPU that takes about a tenth of a second."""


class Member:
    def __init__(self) -> None:
        self.state = torch.zeros(COUNT, device="cuda")

    def late(self, x: float) -> dict[str, Any]:
        """Return the same tensor in every call; its kernels have not run yet."""
        torch.cuda._sleep(SLEEP_CYCLES)
        return {"state": self.state.fill_(x), "view": self.state[:10], "host": torch.full((COUNT,), x)}

    def check(self, value: dict[str, Any]) -> tuple[float, float]:
        assert value["state"].is_cuda
        assert not value["host"].is_cuda
        value["state"].zero_()[:10].add_(1)
        return float(value["host"].sum()), float(value["view"].sum())

    def total(self, value: dict[str, Any]) -> float:
        return float(value["state"].double().sum())

    def wide(self, x: float) -> dict[str, Any]:
        """Return a tensor of 16 MB; its kernels have not run yet."""
        torch.cuda._sleep(SLEEP_CYCLES)
        return {"state": torch.full((4 * COUNT,), x, device="cuda")}

    def few(self, x: float) -> torch.Tensor:
        return torch.full((10,), x, device="cuda")

    def sum_of(self, value: torch.Tensor) -> float:
        return float(value.sum())

    def entries(self) -> int:
        return int(raylane.stats()["entries"])

    def reads(self, transport: str) -> int:
        return int(raylane.stats().get(transport, 0))


@pytest.fixture
def pair(cluster: None) -> Iterator[list[Any]]:
    """Yield two actors on one GPU, which NCCL takes for GPUs of two hosts."""
    actor = ray.remote(num_cpus=0, num_gpus=0.25)(Member)
    made = [actor.options(runtime_env={"env_vars": {"NCCL_HOSTID": f"host{i}"}}).remote() for i in range(2)]
    ray.get([one.__ray_ready__.remote() for one in made])
    yield made
    for one in made:
        ray.kill(one)


@pytest.mark.claim("graphs", "edges carry CUDA tensors by NCCL, CUDA IPC or NIXL on request, else through host memory")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_kernels_end_before_the_reader_sees_the_tensor(pair: list[Any], transport: str) -> None:
    a, b = pair
    with raylane.InputNode() as x:
        node = bind(b.total, bind(a.late, x).with_tensor_transport(transport))
    with raylane.compile(node, max_inflight=3) as g:
        results = [g.execute(float(i)) for i in range(9)]
        assert [result.get() for result in results] == [float(i) * COUNT for i in range(9)]
    assert ray.get([one.entries.remote() for one in pair]) == [0, 0]


def test_large_tensors_go_from_device_to_device_with_auto(pair: list[Any]) -> None:
    a, b = pair
    with raylane.InputNode() as x:
        node = bind(b.total, bind(a.wide, x))
    with raylane.compile(node) as g:
        assert "large CUDA tensors" in g.show()
        before = ray.get(b.reads.remote("cuda_ipc"))
        assert [g.execute(float(i)).get() for i in range(3)] == [4.0 * i * COUNT for i in range(3)]
        assert ray.get(b.reads.remote("cuda_ipc")) == before + 3
        with raylane.compile(bind(b.sum_of, bind(a.few, 2.0))) as small:
            assert small.execute().get() == 20.0
        assert ray.get(b.reads.remote("cuda_ipc")) == before + 3
    with raylane.InputNode() as x:
        node = bind(a.late, x)
    with raylane.compile(node) as g:  # the driver is no actor: host memory, to the driver's device
        assert float(g.execute(1.0).get()["state"].double().sum()) == COUNT
    assert ray.get([one.entries.remote() for one in pair]) == [0, 0]


@pytest.mark.parametrize("transport", TRANSPORTS[1:])
def test_readers_own_what_arrives(pair: list[Any], transport: str) -> None:
    a, b = pair
    with raylane.InputNode() as x:
        node = bind(b.check, bind(a.late, x).with_tensor_transport(transport))
    with raylane.compile(node) as g:
        for i in range(4):
            assert g.execute(float(i)).get() == (i * COUNT, 10.0)

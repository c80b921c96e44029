"""CUDA tensors in values, by every transport that takes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

import raylane
from raylane.errors import TransferTimeoutError, TransportUnavailableError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.usefixtures("cluster"),
]
TRANSPORTS = ["auto", "cuda_ipc", "host", "tcp", "gloo", "nixl", "nccl"]
SLEEP_CYCLES = 500_000_000
"""Work for a GPU that takes some tenths of a second."""


class Maker:
    def __init__(self) -> None:
        self.state = torch.zeros(1_000_000, device="cuda")

    def mixed(self) -> dict[str, Any]:
        base = torch.arange(100_000.0, device="cuda")
        return {
            "cuda": base,
            "view": base[10:20],
            "cpu": torch.ones(100_000),
            "small": [torch.full((7,), float(i), device="cuda").half() for i in range(100)],
        }

    def late(self) -> torch.Tensor:
        """Return a tensor whose last kernel has not run yet."""
        torch.cuda._sleep(SLEEP_CYCLES)
        return self.state.add_(1)

    def allocated(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()


class Reader(Maker):
    def total(self, value: torch.Tensor) -> float:
        assert value.device.type == "cuda"
        return float(value.double().sum())

    def check(self, value: dict[str, Any]) -> dict[str, int]:
        assert torch.equal(value["cuda"].cpu(), torch.arange(100_000.0))
        assert value["cpu"].device.type == "cpu"
        assert all(float(one[0]) == i and one.is_cuda for i, one in enumerate(value["small"]))
        value["view"].zero_()
        assert float(value["cuda"][10:20].sum()) == 0
        return raylane.stats()

    def into(self, refs: list[Any]) -> float:
        target = torch.zeros(1_000_000, device="cuda")
        raylane.get(refs[0], into=target)
        return float(target.sum())


@pytest.fixture
def pair() -> Iterator[tuple[Any, Any]]:
    """Yield a maker and a reader on one GPU, which NCCL takes for GPUs of two hosts."""
    actors = [
        ray.remote(num_gpus=0.1)(kind).options(runtime_env={"env_vars": {"NCCL_HOSTID": f"host{rank}"}}).remote()
        for rank, kind in enumerate((Maker, Reader))
    ]
    yield actors[0], actors[1]
    for actor in actors:
        ray.kill(actor)


@pytest.mark.claim("transport", "CUDA tensors go by CUDA IPC between processes of one GPU")
@pytest.mark.claim("transport", "one value may hold CPU and CUDA tensors, of every dtype of torch")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_leaves_arrive_on_their_devices(pair: tuple[Any, Any], transport: str) -> None:
    maker, reader = pair
    for _ in range(3):
        ref = raylane.options(maker.mixed, tensor_transport=transport).remote()
        stats = ray.get(reader.check.remote(ref))
    assert stats["cuda_ipc" if transport == "auto" else transport] == 3


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_reads_wait_for_the_kernel_of_the_producer(pair: tuple[Any, Any], transport: str) -> None:
    maker, reader = pair
    for turn in (1, 2):
        ref = raylane.options(maker.late, tensor_transport=transport).remote()
        assert ray.get(reader.total.remote(ref)) == turn * 1_000_000
        del ref


def test_targets_on_the_device(pair: tuple[Any, Any]) -> None:
    maker, reader = pair
    ref = raylane.options(maker.late, tensor_transport="auto").remote()
    assert ray.get(reader.into.remote([ref])) == 1_000_000


def test_driver_reads_to_the_host(pair: tuple[Any, Any]) -> None:
    ref = raylane.options(pair[0].mixed, tensor_transport="auto").remote()
    value = raylane.get(ref, device="cpu")
    assert torch.equal(value["cuda"], torch.arange(100_000.0))
    assert raylane.open(ref).read("cuda", slices=slice(3, 5)).tolist() == [3.0, 4.0]


def test_memory_of_the_device_is_released(pair: tuple[Any, Any], eventually: Any) -> None:
    maker, reader = pair
    before = ray.get(maker.allocated.remote())
    ref = raylane.options(maker.mixed, tensor_transport="auto").remote()
    ray.get(reader.check.remote(ref))
    del ref
    eventually(lambda: ray.get(maker.allocated.remote()) <= before)


def test_death_of_a_reader_releases_the_memory(pair: tuple[Any, Any], eventually: Any) -> None:
    maker, reader = pair
    before = ray.get(maker.allocated.remote())
    ref = raylane.options(maker.mixed, tensor_transport="cuda_ipc").remote()
    reader.check.remote(ref)
    ray.kill(reader)
    del ref
    eventually(lambda: ray.get(maker.allocated.remote()) <= before)


def test_published_device_memory_is_waited_for() -> None:
    tensor = torch.zeros(100_000, device="cuda")
    ref = raylane.put(tensor)
    with pytest.raises(TransferTimeoutError):
        raylane.wait_tensor_freed(tensor, timeout=0)
    del ref
    raylane.wait_tensor_freed(tensor, timeout=30)


def test_expandable_segments_are_explained() -> None:
    env = {"env_vars": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}
    maker = ray.remote(num_gpus=0.1)(Maker).options(runtime_env=env).remote()
    reader = ray.remote(num_gpus=0.1)(Reader).remote()
    ref = raylane.options(maker.mixed, tensor_transport="cuda_ipc").remote()
    with pytest.raises(TransportUnavailableError, match="expandable_segments"):
        raylane.get(ref)
    # `auto` finds another way by itself.
    ref = raylane.options(maker.mixed, tensor_transport="auto").remote()
    assert "cuda_ipc" not in ray.get(reader.check.remote(ref))
    for actor in (maker, reader):
        ray.kill(actor)


@pytest.mark.claim("transport", "CUDA memory of another GPU is opened where it is, if possible (never run)")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices here")
@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
def test_between_two_devices(transport: str) -> None:
    maker, reader = ray.remote(num_gpus=1)(Maker).remote(), ray.remote(num_gpus=1)(Reader).remote()
    ref = raylane.options(maker.mixed, tensor_transport=transport).remote()
    assert ray.get(reader.check.remote(ref))[transport] == 1
    for actor in (maker, reader):
        ray.kill(actor)

"""CUDA tensors in values. They travel through host memory in this version."""

from __future__ import annotations

from typing import Any

import pytest
import ray
import torch

import raylane

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.usefixtures("cluster"),
]


class Maker:
    @raylane.method
    def mixed(self) -> dict[str, Any]:
        return {
            "cuda": torch.arange(100_000.0, device="cuda"),
            "cpu": torch.ones(100_000),
            "half": torch.ones(3).cuda().half(),
        }


def test_cuda_and_cpu_leaves_arrive_on_their_devices() -> None:
    maker = ray.remote(num_gpus=0.1)(Maker).remote()
    value = ray.get(maker.mixed.remote())
    assert value["cuda"].device.type == "cuda"
    assert value["half"].device.type == "cuda"
    assert value["cpu"].device.type == "cpu"
    assert torch.equal(value["cuda"].cpu(), torch.arange(100_000.0))


def test_published_device_memory_is_waited_for() -> None:
    tensor = torch.zeros(100_000, device="cuda")
    ref = raylane.put(tensor)
    with pytest.raises(raylane.errors.TransferTimeoutError):
        raylane.wait_tensor_freed(tensor, timeout=0)
    del ref
    raylane.wait_tensor_freed(tensor, timeout=30)

"""Weights that trainers on a GPU publish and readers on a GPU take."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest
import ray
import torch

from raylane import weights
from raylane.core.process.place import start_ticks
from raylane.errors import WeightsError, WeightsLostError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.usefixtures("cluster"),
]
SLEEP_CYCLES = 4_000_000_000
"""Work for a GPU that takes about two seconds."""
KEEP = 2


@pytest.fixture
def trained() -> Iterator[dict[str, torch.Tensor]]:
    yield {"w": torch.zeros(1000, 1000, device="cuda"), "host": torch.zeros(7)}
    weights.drop("policy")


@pytest.mark.claim("weights", "CUDA tensors are published on a stream of their own (run on one GPU)")
@pytest.mark.parametrize("apply", ["copy", "swap"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_versions_reach_readers_on_gpu_and_host(trained: dict[str, torch.Tensor], apply: str, device: str) -> None:
    publisher = weights.Publisher("policy", trained, dtype=torch.bfloat16)
    read = {"w": torch.zeros(1000, 1000, device=device, dtype=torch.bfloat16), "host": torch.zeros(7)}
    subscriber = weights.Subscriber("policy", read, apply=apply)
    for step in (1, 2, 3):
        for tensor in trained.values():
            tensor.fill_(step)
        publisher.publish(step)
        subscriber.update()
        assert read["w"].device.type == device
        assert all(bool(tensor.eq(step).all()) for tensor in read.values())


@pytest.mark.claim("weights", "CUDA tensors are published on a stream of their own (run on one GPU)")
def test_publication_waits_for_work_queued_before_and_not_after(trained: dict[str, torch.Tensor]) -> None:
    publisher = weights.Publisher("policy", trained, keep=KEEP)
    read = {name: tensor.cpu() for name, tensor in trained.items()}
    subscriber = weights.Subscriber("policy", read)
    for step in range(1, KEEP + 1):  # page-locks all slots, which waits for the device
        publisher.publish(step)
    torch.cuda._sleep(SLEEP_CYCLES)
    trained["w"].fill_(5)
    published = publisher.publish_async(KEEP + 1)
    torch.cuda._sleep(SLEEP_CYCLES)  # the next step
    done = torch.cuda.current_stream().record_event()
    published.result(60)
    has_waited = done.query()
    publisher.close()
    assert not has_waited, "the publication has waited for the next step"
    trained["w"].fill_(6)
    subscriber.update()
    assert bool(read["w"].eq(5).all())


def test_tensors_on_a_gpu_are_not_mapped(trained: dict[str, torch.Tensor]) -> None:
    weights.Publisher("policy", trained).publish(1)
    subscriber = weights.Subscriber("policy", {name: tensor.clone() for name, tensor in trained.items()}, apply="map")
    with pytest.raises(WeightsError, match="'w' is on cuda:0, where nothing can be mapped"):
        subscriber.update()


class Trainer:
    """Publishes two tensors of a device from memory of the device."""

    def __init__(self) -> None:
        self.tensors = {"w": torch.zeros(1000, 1000, device="cuda"), "norm": torch.zeros(7, device="cuda")}
        self.publisher = weights.Publisher("policy", self.tensors, transport="cuda_ipc", digests=True)

    def publish(self, step: int) -> int:
        torch.cuda._sleep(SLEEP_CYCLES // 10)
        for tensor in self.tensors.values():
            tensor.fill_(step)
        return self.publisher.publish(step)

    def pid(self) -> int:
        return os.getpid()


class Reader:
    """Reads into tensors of the same device."""

    def __init__(self, apply: str, dtype: torch.dtype) -> None:
        self.tensors = {
            "w": torch.zeros(1000, 1000, device="cuda", dtype=dtype),
            "norm": torch.zeros(7, device="cuda"),
        }
        self.subscriber = weights.Subscriber("policy", self.tensors, apply=apply, verify="each")

    def update(self) -> tuple[int, set[float]]:
        version = self.subscriber.update().version
        return version, {value for tensor in self.tensors.values() for value in tensor.unique().tolist()}


@pytest.mark.claim("weights", "with transport='cuda_ipc' versions go from device to device, whole or not at all")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("apply", ["copy", "swap"])
def test_versions_stay_on_the_device(apply: str, dtype: torch.dtype, eventually: Callable[..., None]) -> None:
    trainer = ray.remote(num_cpus=0, num_gpus=0.4)(Trainer).remote()
    reader = ray.remote(num_cpus=0, num_gpus=0.4)(Reader).remote(apply, dtype)
    try:
        for step in range(1, 5):
            number = ray.get(trainer.publish.remote(step), timeout=60)
            assert ray.get(reader.update.remote(), timeout=60) == (number, {float(step)})
        ray.get(trainer.publish.remote(5), timeout=60)
        pid = ray.get(trainer.pid.remote(), timeout=60)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: start_ticks(pid) is None)
        with pytest.raises(WeightsLostError, match="which has ended"):
            ray.get(reader.update.remote(), timeout=60)
    finally:
        for actor in (trainer, reader):
            ray.kill(actor)
        weights.drop("policy")

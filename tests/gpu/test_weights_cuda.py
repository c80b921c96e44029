"""Weights that trainers on a GPU publish and readers on a GPU take."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from raylane import weights
from raylane.errors import WeightsError

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

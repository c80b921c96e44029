"""Transports that were written for Ray: registration, failures, and transfers that never end."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from tests.transport.managers import ROOT, BrokenManager, FileManager, PipeManager, StuckManager

import raylane
from raylane.errors import SourceLostError, TransferTimeoutError, TransportError, TransportUnavailableError
from raylane.transport.backends.registry import backends

pytestmark = pytest.mark.usefixtures("cluster")
N = 300_000


class Holder:
    """Puts and reads tensors by any transport."""

    def put(self, transport: str) -> list[Any]:
        return [raylane.put({"x": [torch.arange(N), torch.ones(3)]}, tensor_transport=transport)]

    def total(self, refs: list[Any]) -> float:
        return float(raylane.get(refs[0])["x"][0].double().sum())

    def stats(self) -> dict[str, Any]:
        return raylane.stats()

    def threads(self) -> list[str]:
        return [one.name for one in threading.enumerate() if one.name == "raylane-manager"]


TOTAL = N * (N - 1) / 2


@contextlib.contextmanager
def holders(count: int, **managers: Any) -> Iterator[list[Any]]:
    for name, manager in managers.items():
        raylane.add_ray_transport(name, manager)
    actors = [ray.remote(num_cpus=0)(Holder).remote() for _ in range(count)]
    try:
        yield actors
    finally:
        for actor in actors:
            ray.kill(actor)
        for name in managers:
            backends().pop(name, None)


def files() -> set[str]:
    return set(os.listdir(ROOT)) if os.path.exists(ROOT) else set()


@pytest.mark.claim("transport", "transports that were written for Ray carry values")
def test_values_travel_by_registered_transports(eventually: Any) -> None:
    before = files()
    with holders(2, files=FileManager, pipes=PipeManager) as (a, b):
        for name in ("files", "pipes"):
            refs = ray.get(a.put.remote(name))
            assert ray.get(b.total.remote(refs)) == TOTAL
            assert torch.equal(raylane.get(refs[0])["x"][1], torch.ones(3))
            assert ray.get(b.stats.remote())[name] == 1
        eventually(lambda: not files() - before)  # garbage_collect was called


def test_failure_in_the_source_is_reported_with_its_reason() -> None:
    with holders(1, broken=BrokenManager) as (a,):
        refs = ray.get(a.put.remote("broken"))
        with pytest.raises(TransportError, match="the card is on fire"):
            raylane.get(refs[0])


@pytest.mark.claim("transport", "a registered transfer that never ends is aborted on both sides")
def test_transfer_that_never_ends_is_aborted_on_both_sides(eventually: Any) -> None:
    with holders(1, stuck=StuckManager) as (a,):
        refs = ray.get(a.put.remote("stuck"))
        start = time.monotonic()
        with pytest.raises(TransferTimeoutError):
            raylane.get(refs[0], timeout=0.5)
        assert time.monotonic() - start < 10
        eventually(lambda: not ray.get(a.threads.remote()))
        assert not [one for one in threading.enumerate() if one.name == "raylane-manager"]


def test_killed_source_ends_a_transfer(eventually: Any) -> None:
    before = files()
    with holders(1, stuck2=StuckManager) as (a,):
        refs = ray.get(a.put.remote("stuck2"))
        raised: list[BaseException] = []

        def read() -> None:
            try:
                raylane.get(refs[0], timeout=60)
            except BaseException as error:
                raised.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        eventually(lambda: ray.get(a.threads.remote()))
        ray.kill(a)
        reader.join(30)
        assert [type(error) for error in raised] == [SourceLostError]
    for name in files() - before:  # nobody collects the pipe of a killed source
        os.unlink(os.path.join(ROOT, name))


def test_mistakes_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"subclass of ray\.experimental\.TensorTransportManager, got 3"):
        raylane.add_ray_transport("x", 3)
    with pytest.raises(ValueError, match="in lower case such as 'hccl', got 'HCCL'"):
        raylane.add_ray_transport("HCCL", FileManager)
    with pytest.raises(ValueError, match="name='tcp' is a transport of raylane"):
        raylane.add_ray_transport("tcp", FileManager)
    with pytest.raises(ValueError, match="devices must be a list"):
        raylane.add_ray_transport("x", FileManager, devices="cpu")
    with pytest.raises(ValueError, match="unknown"):
        raylane.put(torch.ones(3), tensor_transport="nobody-knows-this")
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(TransportUnavailableError, match=r"ray\.init"):
        raylane.add_ray_transport("x", FileManager)

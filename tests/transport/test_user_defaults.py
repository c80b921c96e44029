"""Transfers while the user's program has changed torch's defaults, in the reader and in the producer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch
from tests.transport.crews import OneMaker

import raylane
from raylane.transport.backends.nixl.agent import missing

TRANSPORTS = ["host", "tcp", "gloo", "object_store", *(["nixl"] if missing() is None else [])]


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


DEFAULTS: dict[str, Callable[[], Any]] = {
    "device": lambda: torch.device("meta"),
    "default_device": lambda: default_device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
}


def make() -> dict[str, Any]:
    base = torch.arange(60_000, dtype=torch.float32, device="cpu").reshape(200, 300)
    layer = torch.nn.Linear(3, 4, device="cpu", dtype=torch.float32)
    return {
        "base": base,
        "column": base[:, 3],
        "empty": torch.empty(0, 3, device="cpu", dtype=torch.float32),
        "zero": torch.tensor(7, device="cpu"),
        "weight": layer.weight,
        "half": base.to(torch.bfloat16),
    }


def check(value: dict[str, Any]) -> None:
    """Compare with values that were made without the defaults. Fails on another dtype, device or content."""
    expected = make()
    for name, tensor in value.items():
        assert (tensor.device.type, tensor.dtype, tensor.shape) == ("cpu", expected[name].dtype, expected[name].shape)
        if name != "weight":
            assert torch.equal(tensor, expected[name]), name
    assert isinstance(value["weight"], torch.nn.Parameter)
    assert value["weight"].requires_grad
    assert value["column"].untyped_storage().data_ptr() == value["base"].untyped_storage().data_ptr()


class Maker:
    def publish(self, name: str) -> dict[str, Any]:
        value = make()
        with DEFAULTS[name]():
            # Published by the wrapper of this call, after the block; `put` publishes within it.
            return {"ref": raylane.put(value), "weights": value}

    @raylane.method
    def direct(self) -> dict[str, Any]:
        return make()

    def stats(self) -> dict[str, Any]:
        return raylane.stats()


class Crew(OneMaker):
    maker_class = Maker


@pytest.mark.parametrize("name", DEFAULTS)
def test_values_do_not_depend_on_defaults(crew: Crew, tidy: None, name: str) -> None:
    for transport in TRANSPORTS:
        refs = [crew.maker.direct.remote(), crew.maker.direct.remote()]
        ray.wait(refs, num_returns=2)
        into = {"base": torch.zeros(200, 300, dtype=torch.float32)}
        with DEFAULTS[name]():
            single = raylane.get(refs[0], tensor_transport=transport, timeout=30)
            several = raylane.get(refs, tensor_transport=transport, timeout=30)
            raylane.get(refs[0], into=into, tensor_transport=transport, timeout=30)
            half = raylane.get(refs[0], dtype=torch.float16, tensor_transport=transport, timeout=30)
            part = raylane.open(refs[0]).read("base", slices=(3, slice(0, 5)), tensor_transport=transport)
        for value in (single, *several):
            check(value)
        assert torch.equal(into["base"], make()["base"])
        assert torch.equal(half["column"].float(), make()["column"].half().float())
        assert part.tolist() == [900, 901, 902, 903, 904]


@pytest.mark.parametrize("name", DEFAULTS)
def test_publication_does_not_depend_on_defaults(crew: Crew, tidy: None, name: str) -> None:
    published = raylane.get(raylane.options(crew.maker.publish).remote(name))
    check(ray.get(published["ref"]))
    check(published["weights"])
    with DEFAULTS[name]():
        region = raylane.empty((4, 0), torch.float32)
        assert (region.device.type, region.dtype) == ("cpu", torch.float32)
        plain = raylane.get(crew.maker.publish.remote(name), dtype=torch.float64)
    assert plain["weights"]["half"].dtype == torch.float64


def test_defaults_are_restored() -> None:
    assert torch.get_default_device().type == "cpu"
    assert torch.get_default_dtype() is torch.float32

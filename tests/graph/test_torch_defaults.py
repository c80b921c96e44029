"""Graphs and collectives while the user's defaults of torch are others, in the driver and in the actors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch

import raylane
from raylane import MultiOutputNode, bind
from raylane.graph import allgather, allreduce, gather, reducescatter, scatter

DEFAULTS: dict[str, Callable[[], Any]] = {
    "device": lambda: torch.device("meta"),
    "default device": lambda: _reset(torch.set_default_device, "meta", None),
    "default dtype": lambda: _reset(torch.set_default_dtype, torch.float64, torch.float32),
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
}


@contextlib.contextmanager
def _reset(function: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    function(value)
    try:
        yield
    finally:
        function(before)


class Defaulted:
    """Actor whose ordinary calls change the defaults of its thread."""

    def __init__(self) -> None:
        self._entered = contextlib.ExitStack()

    def enter(self, name: str) -> None:
        self._entered.enter_context(DEFAULTS[name]())

    def leave(self) -> None:
        self._entered.close()

    def echo(self, x: Any) -> Any:
        return x

    def make(self, x: Any) -> Any:
        """Return memory for edges, and tensors without elements."""
        made = raylane.empty(20_000, torch.float32)
        made.copy_(x["large"])
        return made, raylane.empty((0, 3), torch.int32), raylane.empty_like(x["half"])[:0]


@pytest.fixture(scope="module")
def pair(ray_session: None) -> Iterator[list[Any]]:
    actors = [ray.remote(num_cpus=0)(Defaulted).remote() for _ in range(2)]
    yield actors
    for actor in actors:
        ray.kill(actor)


def _values() -> dict[str, Any]:
    return {
        "small": torch.arange(4, dtype=torch.float32),
        "large": torch.ones(20_000, dtype=torch.float32),
        "half": torch.ones(4, dtype=torch.bfloat16),
        "none": torch.zeros((0, 2), dtype=torch.int16),
        "array": np.arange(4.0),
        "parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.float32)),
    }


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return one.device.type == "cpu" and one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("name", DEFAULTS)
def test_graph_under_other_defaults_of_torch_is_right(pair: list[Any], name: str) -> None:
    values = _values()
    wanted = [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in values.values()]
    doubled = [value + value for value in wanted]
    whole = torch.arange(40_000, dtype=torch.float32)
    ray.get([actor.enter.remote(name) for actor in pair])
    try:
        with DEFAULTS[name](), raylane.InputNode() as x:
            given = [bind(actor.echo, x[0]) for actor in pair]
            parts = [bind(actor.echo, part) for actor, part in zip(pair, scatter(x[1], 2), strict=True)]
            nodes = [bind(pair[0].make, x[0]), given[0], gather(parts, 0)]
            for collective in (allreduce, allgather, reducescatter):
                nodes += collective.bind(given)
            with raylane.compile(MultiOutputNode(nodes), timeout=30) as g:
                made, echoed, joined, *results = g.execute(values, whole).get()
    finally:
        ray.get([actor.leave.remote() for actor in pair])
    assert _same(joined, whole)
    empties = torch.zeros((0, 3), dtype=torch.int32), wanted[2][:0]
    assert all(_same(one, other) for one, other in zip(made, (wanted[1], *empties), strict=True))
    assert all(_same(one, other) for one, other in zip(echoed.values(), wanted, strict=True))
    for result in results[:2]:
        assert all(_same(one, other) for one, other in zip(result.values(), doubled, strict=True))
    for result in results[2:4]:
        assert [len(one) for one in result.values()] == [2 * len(one) for one in wanted]
    for rank, result in enumerate(results[4:]):
        cut = [one[rank * (len(one) // 2) : (rank + 1) * (len(one) // 2)] for one in doubled]
        assert all(_same(one, other) for one, other in zip(result.values(), cut, strict=True))

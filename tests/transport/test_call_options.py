"""Transports chosen for single calls, of decorated and undecorated methods, on a real Ray."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest
import ray
import torch
from tests.transport.crews import OneMaker

import raylane
from raylane.errors import TransportUnavailableError

pytestmark = pytest.mark.usefixtures("tidy")
N = 100_000


class Maker:
    @raylane.method
    def decorated(self, x: float, *, scale: float = 1) -> torch.Tensor:
        return torch.full((N,), x * scale)

    @raylane.method(tensor_transport="object_store")
    async def decorated_async(self, x: float) -> torch.Tensor:
        await asyncio.sleep(0)
        return torch.full((N,), x)

    @raylane.method
    async def stats(self) -> dict[str, Any]:
        return raylane.stats()

    @raylane.method
    def with_any(self, **kwargs: Any) -> list[Any]:
        return [sorted(kwargs), torch.zeros(N)]

    def plain(self, x: torch.Tensor, *, scale: float = 1) -> torch.Tensor:
        return x * scale

    @ray.method(num_returns=2)
    def two(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(N), torch.ones(N)

    def calls_decorated(self) -> tuple[str, torch.Tensor]:
        return type(self.decorated(1)).__name__, torch.ones(N)

    async def plain_async(self) -> torch.Tensor:
        return torch.zeros(N)

    def items(self) -> Any:
        yield torch.zeros(N)

    def fails(self) -> torch.Tensor:
        raise ValueError("by intention")


class Crew(OneMaker):
    maker_class = Maker


def used(ref: Any) -> tuple[str, Any]:
    """Return the transport by which this process gets a value, and the value."""
    before = raylane.stats()
    value = ray.get(ref)
    after = raylane.stats()
    names = [name for name in ("host", "tcp", "gloo") if after.get(name, 0) > before.get(name, 0)]
    return names[0] if names else "ray", value


@pytest.mark.parametrize("transport", ["host", "tcp", "gloo"])
def test_decorated_methods_take_the_option_of_a_call(crew: Crew, transport: str) -> None:
    method = crew.maker.decorated
    for chosen in (method.options(tensor_transport=transport), raylane.options(method, tensor_transport=transport)):
        name, value = used(chosen.remote(2.0, scale=3))
        assert (name, float(value[0])) == (transport, 6)
    assert used(method.remote(1.0))[0] == "host"


def test_options_of_a_call_replace_those_of_the_decorator(crew: Crew) -> None:
    assert used(crew.maker.decorated_async.remote(1.0))[0] == "ray"
    name, value = used(crew.maker.decorated_async.options(tensor_transport="tcp", name="mine").remote(4.0))
    assert (name, float(value[0])) == ("tcp", 4)
    ref = raylane.options(crew.maker.decorated, snapshot=True).remote(1.0)
    assert raylane.open(ref)._value.ticket.segment >= 0


def test_functions_never_see_the_option(crew: Crew) -> None:
    assert ray.get(crew.maker.with_any.options(tensor_transport="tcp").remote(a=1))[0] == ["a"]


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_undecorated_methods_publish_on_request(crew: Crew, transport: str) -> None:
    x = torch.arange(N, dtype=torch.float32)
    chosen = raylane.options(crew.maker.plain, tensor_transport=transport)
    name, value = used(chosen.remote(ray.put(x), scale=2))
    assert name == transport
    assert torch.equal(value, 2 * x)
    assert used(crew.maker.plain.remote(x))[0] == "ray"
    zeros, ones = raylane.options(crew.maker.two, tensor_transport=transport).remote()
    assert [used(ref)[0] for ref in (zeros, ones)] == [transport] * 2
    inner, value = ray.get(raylane.options(crew.maker.calls_decorated).remote())
    assert inner == "Tensor"
    assert value[0] == 1


def test_the_actor_outlives_its_handle_for_undecorated_results(cluster: None) -> None:
    maker: Any = ray.remote(num_cpus=0)(Maker).remote()
    ref = raylane.options(maker.plain).remote(torch.ones(N))
    ray.wait([ref])
    del maker
    gc.collect()
    assert used(ref)[0] == "host"


class Declared:
    """Undecorated methods with options of `ray.method`."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.tries = 0

    def wait(self) -> torch.Tensor:
        return torch.full((N,), float(self.gate.wait(60)))

    @ray.method(concurrency_group="io")
    def open(self) -> torch.Tensor:
        self.gate.set()
        return torch.full((N,), float(threading.active_count()))

    @ray.method(max_task_retries=3, retry_exceptions=[KeyError])
    def third_time(self) -> torch.Tensor:
        self.tries += 1
        if self.tries < 3:
            raise KeyError(self.tries)
        return torch.full((N,), float(self.tries))


@ray.remote(num_cpus=0)
def through_a_handle(actor: Any) -> tuple[float, float]:
    """Call with options from a process that has not created the actor."""
    waiting = raylane.options(actor.wait).remote()
    ray.get(raylane.options(actor.open).remote(), timeout=50)
    return float(ray.get(waiting)[0]), float(ray.get(raylane.options(actor.third_time).remote())[0])


@pytest.mark.parametrize("far", [False, True])
def test_undecorated_methods_keep_what_they_declare(cluster: None, far: bool) -> None:
    actor: Any = ray.remote(num_cpus=0, concurrency_groups={"io": 1})(Declared).remote()
    if far:
        assert ray.get(through_a_handle.remote(actor)) == (1, 3)
        return
    waiting = raylane.options(actor.wait).remote()
    ray.get(raylane.options(actor.open).remote(), timeout=50)  # `wait` would hold up a call without the group
    assert float(ray.get(waiting)[0]) == 1
    assert float(ray.get(raylane.options(actor.third_time, tensor_transport="tcp").remote())[0]) == 3
    assert raylane.options(actor.third_time, max_task_retries=0)._ray_options == {"max_task_retries": 0}


class Slow:
    """Actor that does not start before its gate is open."""

    def __init__(self, gate: list[Any]) -> None:
        ray.get(gate[0])

    @raylane.method
    def make(self) -> torch.Tensor:
        return torch.ones(N)


@pytest.mark.claim("transport", "a submission waits neither for the actor's start nor for the call")
def test_submission_waits_neither_for_the_actor_nor_the_call(cluster: None) -> None:
    @ray.remote(num_cpus=0)
    class Gate:
        def __init__(self) -> None:
            self.event = asyncio.Event()

        async def wait(self) -> None:
            await self.event.wait()

        async def open(self) -> None:
            self.event.set()

    gate: Any = Gate.remote()
    slow: Any = ray.remote(num_cpus=0)(Slow).remote([gate.wait.remote()])
    refs = [slow.make.remote(), slow.make.options(tensor_transport="tcp").remote(), raylane.options(slow.make).remote()]
    # The actor cannot have started: a submission that waited for it would never have returned.
    assert ray.wait(refs, timeout=0)[0] == []
    ray.get(gate.open.remote())
    assert [float(value[0]) for value in ray.get(refs)] == [1, 1, 1]


def test_mistakes_are_named(crew: Crew) -> None:
    with pytest.raises(TypeError, match="method of an actor handle"):
        raylane.options(len)
    with pytest.raises(TypeError, match="method of an actor handle"):
        raylane.options(Maker().plain)
    with pytest.raises(ValueError, match="did you mean 'tcp'"):
        crew.maker.decorated.options(tensor_transport="tpc")
    with pytest.raises(ValueError, match="'tpc' is unknown"):
        raylane.options(crew.maker.plain, tensor_transport="tpc")
    with pytest.raises(TypeError, match="async method"):
        ray.get(raylane.options(crew.maker.plain_async).remote())
    with pytest.raises(TypeError, match="a generator without"):
        raylane.options(crew.maker.items)
    with pytest.raises(TransportUnavailableError, match="a generator"):
        raylane.options(crew.maker.items, tensor_transport="tcp")
    with pytest.raises(ValueError, match="by intention"):
        ray.get(raylane.options(crew.maker.fails).remote())
    with pytest.raises(TypeError, match="unexpected keyword"):
        crew.maker.decorated.options(nonsense=3).remote(1.0)

"""Actors that hold, inherit or forward to an object with decorated methods, as Ray Serve and verl do. On a real Ray."""

from __future__ import annotations

import collections
import functools
import re
import warnings
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import ray
import torch
from tests.transport.crews import OneMaker

import raylane

NUMEL = 100_000

pytestmark = pytest.mark.usefixtures("tidy")


class Maker:
    @raylane.method
    def make(self, fill: float = 1.0) -> torch.Tensor:
        return torch.full((NUMEL,), fill)

    def stats(self) -> dict[str, Any]:
        return raylane.stats()


class Crew(OneMaker):
    maker_class = Maker


def forward_to(name: str, *, wraps: bool) -> Callable[..., Any]:
    """Return a method that calls one of the inner object, as frameworks make them for actors with several workers."""

    def call(self: Any, *args: Any) -> Any:
        return getattr(self.inner, name)(*args)

    return functools.wraps(getattr(Maker, name))(call) if wraps else call


class Watching:
    def watch(self) -> None:
        self.seen: list[str] = []
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: self.seen.append(str(message))

    def noted(self) -> tuple[list[str], int]:
        """Return the warnings since the last call, and the number of values published until now."""
        seen, self.seen[:] = list(self.seen), []
        return seen, raylane.stats()["published"]


class Outer(Watching):
    """An actor that holds an object with decorated methods."""

    def __init__(self) -> None:
        self.inner = Maker()

    def run(self, name: str) -> Any:
        return getattr(self.inner, name)()

    run_direct = raylane.method(run)
    make_by_name = forward_to("make", wraps=False)
    make_by_wraps = forward_to("make", wraps=True)
    make_direct = raylane.method(forward_to("make", wraps=True))


class Overriding(Maker, Watching):
    def make(self, fill: float = 1.0) -> torch.Tensor:
        return super().make(fill)


class OverridingDirect(Maker, Watching):
    @raylane.method
    def make(self, fill: float = 1.0) -> torch.Tensor:
        return super().make(fill)


def counting(cls: type) -> type:
    """Wrap the method `make` of a class without functools.wraps."""
    make = cls.make  # type: ignore[attr-defined]
    cls.make = lambda self: make(self)  # type: ignore[attr-defined]
    return cls


@counting
class Counting(Watching):
    @raylane.method
    def make(self) -> torch.Tensor:
        return torch.full((NUMEL,), 1.0)


class Forwarder:
    """An actor that passes refs on: those of its own calls and those that it got."""

    def call(self, maker: Any, count: int) -> list[ray.ObjectRef]:
        return [maker.make.remote(float(i)) for i in range(count)]

    def pass_on(self, refs: list[ray.ObjectRef]) -> list[ray.ObjectRef]:
        return refs

    def firsts(self, refs: list[ray.ObjectRef]) -> list[float]:
        return [float(value[0]) for value in raylane.get(refs, timeout=60)]


class Deployment:
    """Class of a deployment, as a user of Ray Serve writes it."""

    def __init__(self) -> None:
        self.refs: collections.deque[ray.ObjectRef] = collections.deque(maxlen=8)

    async def make(self, fill: float) -> ray.ObjectRef:
        self.refs.append(raylane.put(torch.full((NUMEL,), fill)))
        return self.refs[-1]

    async def total(self, value: torch.Tensor) -> float:
        return float(value[0])


class Replica:
    """Calls a deployment as the replicas of Ray Serve 2.60 do: each result is the second item of a stream."""

    def __init__(self) -> None:
        self.deployment = Deployment()

    async def handle(self, name: str, *args: Any) -> AsyncIterator[Any]:
        yield b"accepted"
        yield await getattr(self.deployment, name)(*args)

    def stats(self) -> dict[str, Any]:
        return raylane.stats()

    def drop(self) -> None:
        self.deployment.refs.clear()


def actor(cls: type) -> Any:
    return ray.remote(num_cpus=0)(cls).remote()


def noted_after(watching: Any, name: str, *args: Any, options: bool = False) -> tuple[list[str], int]:
    """Call a method twice; return the warnings of the actor, and how many values it published."""
    _, before = ray.get(watching.noted.remote())
    method = getattr(watching, name)
    for _ in range(2):
        ref = (raylane.options(method) if options else method).remote(*args)
        assert torch.equal(ray.get(ref), torch.full((NUMEL,), 1.0))
    seen, after = ray.get(watching.noted.remote())
    return seen, after - before


@pytest.mark.claim("transport", "an actor that wraps an object sends direct values by its own decorated methods")
def test_outer_methods_are_direct_or_warn_once(crew: Crew) -> None:
    outer = actor(Outer)
    ray.get(outer.watch.remote())
    for name, args in (("run_direct", ["make"]), ("make_direct", [])):
        assert noted_after(outer, name, *args) == ([], 2)
    assert noted_after(outer, "run", "make", options=True) == ([], 2)
    for name, args, text in (
        (
            "run",
            ["make"],
            r"Outer\.run called Maker\.make, .* Decorate run with raylane\.method, or return raylane\.put",
        ),
        ("make_by_name", [], r"Outer\.make_by_name called Maker\.make"),
        ("make_by_wraps", [], r"Maker\.make has a decorator above raylane\.method"),
    ):
        (warning,), published = noted_after(outer, name, *args)
        assert re.search(text, warning)
        assert published == 0


@pytest.mark.parametrize("cls", [Overriding, Counting])
def test_override_without_decorator_warns_once(crew: Crew, cls: type) -> None:
    override = actor(cls)
    ray.get(override.watch.remote())
    (warning,), published = noted_after(override, "make")
    assert f"{cls.__name__}.make called " in warning
    assert published == 0


def test_decorated_override_is_direct(crew: Crew) -> None:
    override = actor(OverridingDirect)
    ray.get(override.watch.remote())
    assert noted_after(override, "make") == ([], 2)


@pytest.mark.claim("transport", "refs that pass through other actors, alone or in lists, stay direct")
def test_refs_through_outer_actors_stay_direct(crew: Crew) -> None:
    outer, reader = actor(Forwarder), actor(Forwarder)
    before = ray.get(crew.maker.stats.remote())["published"]
    refs = ray.get(outer.call.remote(crew.maker, 20))
    for _ in range(2):
        refs = ray.get(outer.pass_on.remote(refs))
    assert ray.get(reader.firsts.remote(refs)) == [float(i) for i in range(20)]
    assert ray.get(crew.maker.stats.remote())["published"] == before + 20
    nested = outer.call.remote(crew.maker, 2)  # the outer ref alone keeps the values
    assert ray.get(reader.firsts.remote(nested)) == [0.0, 1.0]


@pytest.mark.claim("transport", "results of replicas as in Ray Serve are direct if the replica keeps their refs")
def test_results_of_a_replica_that_keeps_refs_are_direct(crew: Crew, eventually: Callable[..., None]) -> None:
    """Ray 2.60 loses count of refs in streamed items (ray-project/ray#58080); arguments have no such problem."""
    replica = actor(Replica)

    def result(name: str, *args: Any) -> Any:
        accepted, ref = replica.handle.options(num_returns="streaming").remote(name, *args)
        assert ray.get(accepted) == b"accepted"
        return ray.get(ref)

    for i in range(100):
        assert float(raylane.get(result("make", float(i)), timeout=60)[0]) == i
        assert result("total", crew.maker.make.remote(float(i))) == i
        assert result("total", raylane.put(torch.full((NUMEL,), float(i)))) == i
    stats = ray.get(replica.stats.remote())
    assert stats["published"] == 100
    assert stats["entries"] == 8
    ray.get(replica.drop.remote())
    eventually(lambda: ray.get(replica.stats.remote())["entries"] == 0, within_s=20)

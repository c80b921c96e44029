"""References inside values: refused where Ray would not count them, counted where an ordinary call carries them."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch

import raylane
from raylane import _ray
from raylane.errors import GraphValueError
from raylane.workers.compiled import CompiledWorkerGroup
from raylane.workers.group import WorkerOptions

Compile = Callable[..., Any]


class Box:
    """Object with attributes, pickled by plain pickle."""

    def __init__(self, value: Any) -> None:
        self.inner = {"value": value}


@dataclasses.dataclass
class Record:
    value: Any


class Source:
    """Actor that makes and keeps references."""

    def items(self) -> Iterator[int]:
        yield 1

    def name(self, actor: Any = None, x: Any = None) -> Any:
        """Return what another actor answers."""
        return ray.get((actor[0] if isinstance(actor, list) else actor).one.remote())

    def one(self) -> int:
        return 1

    def give(self, kind: str) -> Any:
        """Return a reference to something that only this actor keeps."""
        self.target = ray.remote(num_cpus=0)(Source).remote()
        return {"x": [ray.put(1) if kind == "ref" else self.target]}

    def forget(self) -> None:
        del self.target

    def echo(self, x: Any) -> Any:
        return x

    def length(self, refs: list[Any], x: Any) -> int:
        return len(ray.get(refs[0]))


class Asking:
    """Worker with the handle of an actor."""

    def __init__(self, actors: list[Any]) -> None:
        self.actors = actors

    def ask(self) -> Any:
        return ray.get(self.actors[0].one.remote())

    def echo(self, x: Any) -> Any:
        return x


@pytest.fixture(scope="module")
def source(ray_session: None) -> Iterator[Any]:
    actor = ray.remote(num_cpus=0)(Source).remote()
    yield actor
    ray.kill(actor)


def _future() -> Any:
    loop = asyncio.new_event_loop()
    try:
        return loop.create_future()
    finally:
        loop.close()


REFERENCES: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "ref": (lambda source: ray.put(1), "an ObjectRef", r"ray\.get\(ref\)"),
    "handle": (lambda source: source, "an actor handle", r"ray\.get_actor\(name\)"),
    "method": (lambda source: source.echo, "an actor handle", r"ray\.get_actor\(name\)"),
    "generator": (
        lambda source: source.items.options(num_returns="streaming").remote(),
        "an ObjectRefGenerator",
        "items",
    ),
    "future": (lambda source: concurrent.futures.Future(), "a future", "result"),
    "asyncio future": (lambda source: _future(), "a future", "result"),
}
PLACES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "itself": (lambda found: found, ""),
    "nested": (lambda found: {"a": [0, (1, found)]}, r" at \['a'\]\[1\]\[1\]"),
    "key": (lambda found: {found: 1}, ""),
    "object": (lambda found: [Box(found)], r" at \[0\]\.inner\['value'\]"),
    "dataclass": (lambda found: Record(found), r" at \.value"),
    "deque": (lambda found: collections.deque([found]), r" at \[0\]"),
    "with a tensor": (lambda found: [torch.ones(1), found], r" at \[1\]"),
    "with an array": (lambda found: [np.ones(10_000), {"b": found}], r" at \[1\]\['b'\]"),
    "with a class of a script": (lambda found: [type("Local", (), {})(), found], r" at \[1\]"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", REFERENCES)
def test_reference_in_an_input_is_refused_with_its_place(source: Any, graph: Compile, kind: str, place: str) -> None:
    make, name, remedy = REFERENCES[kind]
    wrap, text = PLACES[place]
    g = graph(lambda x: raylane.bind(source.echo, x))
    reference = make(source)
    if kind == "method":
        text = ".*"
    with pytest.raises(GraphValueError, match=f"{name} cannot travel in a graph{text}:.*{remedy}"):
        g.execute(wrap(reference))
    assert g.execute(1).get() == 1


@pytest.mark.parametrize("kind", ["ref", "handle"])
def test_reference_in_a_result_is_refused_with_its_place(source: Any, graph: Compile, kind: str) -> None:
    _, name, _ = REFERENCES[kind]
    g = graph(lambda x: raylane.bind(source.give, x))
    with pytest.raises(GraphValueError, match=rf"{name} cannot travel in a graph at \['x'\]\[0\]"):
        g.execute(kind).get()


def test_reference_that_keeps_nothing_alive_travels(source: Any, graph: Compile) -> None:
    named = ray.remote(num_cpus=0)(Source).options(name="named source").remote()
    ray.get(named.one.remote())
    g = graph(lambda x: raylane.bind(source.name, x))
    for value in (ray.get_actor("named source"), [ray.get_actor("named source"), torch.ones(1)]):
        assert g.execute(value).get() == 1
    ray.kill(named)


def _dead(actor_id: str) -> bool:
    return actor_id not in _ray.living_actors()


@pytest.mark.parametrize("wrap", [lambda actor: actor, lambda actor: [actor, torch.ones(1)]])
def test_constant_handle_keeps_its_actor_as_long_as_the_graph(
    source: Any, graph: Compile, wrap: Any, eventually: Callable[..., None]
) -> None:
    target = ray.remote(num_cpus=0)(Source).remote()
    actor_id = _ray.actor_id_of(target)
    with raylane.InputNode() as x:
        node = raylane.bind(source.name, wrap(target), x)
    g = raylane.compile(node)
    del target, node, x
    gc.collect()
    for number in range(3):
        assert g.execute(number).get() == 1
    g.teardown()
    del g
    gc.collect()
    eventually(lambda: _dead(actor_id), 30)


def test_constant_ref_keeps_its_object_as_long_as_the_graph(source: Any, graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(source.length, [ray.put(np.ones(300_000))], x))
    gc.collect()
    for number in range(2):
        assert g.execute(number).get() == 300_000


@pytest.mark.slow
def test_constructor_handle_keeps_its_actor_for_the_worker(ray_session: None, eventually: Callable[..., None]) -> None:
    target = ray.remote(num_cpus=0)(Source).remote()
    actor_id = _ray.actor_id_of(target)
    with CompiledWorkerGroup(Asking, 1, init_args=([target],), options=WorkerOptions(num_cpus=0.1)) as group:
        del target
        gc.collect()
        assert group.call("ask").results(60) == [1]
        with pytest.raises(TypeError, match=r"nothing was sent: an actor handle cannot travel in a graph"):
            group.call("echo", {"a": ray.remote(num_cpus=0)(Source).remote()}).results(60)
    eventually(lambda: _dead(actor_id), 30)

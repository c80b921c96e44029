"""Collectives in graphs of actors and of plain objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch
from ray import dag
from ray.experimental import collective
from ray.experimental.channel.cpu_communicator import CPUCommunicator
from ray.experimental.util.types import ReduceOp

import raylane
from raylane import MultiOutputNode, bind
from raylane.graph import allreduce

Compile = Callable[..., Any]


class Rank:
    """One of several trainers."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def ones(self, shape: Any, dtype: Any = torch.float32) -> Any:
        """Return rank + 1 everywhere."""
        self.given = torch.full(shape, self.rank + 1, dtype=dtype)
        return self.given

    def same(self, x: Any) -> bool:
        """Return True if what was given last has not changed, and is not what came back."""
        return bool((self.given == self.rank + 1).all()) and x.data_ptr() != self.given.data_ptr()

    def echo(self, x: Any) -> Any:
        return x

    def item(self, xs: Any) -> Any:
        """Return the item of this rank."""
        return xs[self.rank]


@pytest.fixture(scope="module")
def actors(ray_session: None) -> Iterator[list[Any]]:
    made = [ray.remote(num_cpus=0.1)(Rank).remote(rank) for rank in range(3)]
    ray.get([actor.__ray_ready__.remote() for actor in made])
    yield made
    for actor in made:
        ray.kill(actor)
    made.clear()


@pytest.fixture(params=["inline", pytest.param("ray", marks=pytest.mark.ray)])
def ranks(request: pytest.FixtureRequest) -> list[Any]:
    """Return three objects, or three actors."""
    if request.param == "inline":
        return [Rank(rank) for rank in range(3)]
    found: list[Any] = request.getfixturevalue("actors")
    return found


@pytest.fixture
def graph(ranks: list[Any]) -> Iterator[Compile]:
    """`graph(lambda x, ranks: ...)` compiles what the function binds."""
    made: list[Any] = []
    backend = "inline" if type(ranks[0]) is Rank else "ray"

    def compile(write: Callable[..., Any], **options: Any) -> Any:
        with raylane.InputNode() as x:
            found = write(x, ranks)
        made.append(raylane.compile(MultiOutputNode(found), backend=backend, **options))
        return made[-1]

    yield compile
    for one in made:
        one.teardown()


@pytest.mark.parametrize(("op", "wanted"), [("sum", 6), ("prod", 6), ("min", 1), ("max", 3), ("avg", 2)])
def test_allreduce_gives_every_actor_the_same(graph: Compile, op: str, wanted: int) -> None:
    g = graph(lambda x, ranks: allreduce.bind([bind(r.ones, x) for r in ranks], op=op))
    for shape in [(2, 3), (), (0,), (300, 400)]:
        for found in g.execute(shape).get():
            assert found.shape == shape
            assert found.dtype == torch.float32
            assert (found == wanted).all()


def _compile_with_ray(node: Any, value: Any) -> Any:
    """Run a graph with Ray's own compiled graphs."""
    theirs = node.experimental_compile()
    try:
        return ray.get(theirs.execute(value))
    finally:
        theirs.teardown(kill_actors=False)


def test_a_graph_of_ray_gives_what_ray_gives(actors: list[Any]) -> None:
    """One operation: Ray's communicator for CPUs keeps a barrier actor, which a second graph of Ray would meet."""
    with dag.InputNode() as x:
        reduced = collective.allreduce.bind(
            [actor.ones.bind(x) for actor in actors], op=ReduceOp.SUM, transport=CPUCommunicator(3, actors)
        )
        node = dag.MultiOutputNode([*reduced, actors[1].same.bind(reduced[1])])
    with raylane.compile(node) as ours:
        *found, same = ours.execute((2, 5)).get()
    theirs = node.experimental_compile()
    try:
        *wanted, theirs_same = ray.get(theirs.execute((2, 5)), timeout=60)
    finally:
        theirs.teardown(kill_actors=False)
    assert same
    assert theirs_same
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype


def test_collectives_of_ray_are_translated(actors: list[Any]) -> None:
    with dag.InputNode() as x:
        given = [actor.ones.bind(x) for actor in actors]
        reduced = [collective.allreduce.bind(given, op=op) for op in ReduceOp]
        pairs = collective.allreduce.bind([given, reduced[0]])  # two lists in one collective: a list for each actor
        gathered = collective.allgather.bind(reduced[0])
        scattered = collective.reducescatter.bind(gathered, op=ReduceOp.MAX)
        outputs = [reduced[i][i % 3] for i in range(5)] + [*pairs[1], gathered[2], scattered[0]]
        node = dag.MultiOutputNode(outputs)
    with raylane.compile(node) as g:
        found = g.execute((2, 5)).get()
    assert [float(tensor.unique()) for tensor in found] == [6, 6, 3, 1, 2, 6, 18, 6, 6]
    assert [tuple(tensor.shape) for tensor in found[-2:]] == [(6, 5), (2, 5)]

"""Collectives in graphs of actors and of plain objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray import dag
from ray.experimental import collective
from ray.experimental.channel.cpu_communicator import CPUCommunicator
from ray.experimental.util.types import ReduceOp

import raylane
from raylane import MultiOutputNode, bind
from raylane.errors import GraphPlanError
from raylane.graph import allgather, allreduce, reducescatter

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


@pytest.mark.claim("graphs", "actors take part in allreduce, allgather and reducescatter; CUDA tensors by host memory")
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


@pytest.mark.claim("graphs", "collectives of Ray's graphs run unchanged, with the same results")
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


@pytest.mark.claim("graphs", "collectives of Ray's graphs run unchanged, with the same results")
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


def test_the_tensors_that_were_given_do_not_change(graph: Compile) -> None:
    def write(x: Any, ranks: list[Any]) -> list[Any]:
        reduced = allreduce.bind([bind(r.ones, x) for r in ranks])
        return [bind(r.same, one) for r, one in zip(ranks, reduced, strict=True)]

    g = graph(write)
    for shape in [(3,), (100_000,)]:
        assert g.execute(shape).get() == [True, True, True]


@pytest.mark.claim("graphs", "actors take part in allreduce, allgather and reducescatter; CUDA tensors by host memory")
def test_allgather_and_reducescatter(graph: Compile) -> None:
    def write(x: Any, ranks: list[Any]) -> list[Any]:
        gathered = allgather.bind([bind(r.ones, x) for r in ranks])
        return [*gathered, *reducescatter.bind(gathered, op="avg")]

    found = graph(write).execute((2, 4)).get()
    whole = torch.cat([torch.full((2, 4), float(rank + 1)) for rank in range(3)])
    assert all(torch.equal(one, whole) for one in found[:3])
    assert all(torch.equal(one, whole[2 * i : 2 * i + 2]) for i, one in enumerate(found[3:]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8])
def test_dtypes_are_kept(graph: Compile, dtype: torch.dtype) -> None:
    g = graph(lambda x, ranks: allreduce.bind([bind(r.ones, x, dtype) for r in ranks]))
    assert all(torch.equal(found, torch.full((5,), 6, dtype=dtype)) for found in g.execute((5,)).get())


def test_values_of_many_tensors_and_arrays(graph: Compile) -> None:
    def value(rank: int) -> dict[str, Any]:
        tensors = [torch.full((i, 2), float(rank), dtype=[torch.float32, torch.int32][i % 2]) for i in range(40)]
        return {"tensors": tensors, "array": np.full((3,), rank), "pair": (torch.tensor(rank), [])}

    g = graph(lambda x, ranks: allreduce.bind([bind(r.item, x) for r in ranks]))
    found = g.execute([value(rank) for rank in range(3)]).get()[2]
    assert all(torch.equal(one, torch.full((i, 2), 3, dtype=one.dtype)) for i, one in enumerate(found["tensors"])), (
        found["tensors"]
    )
    assert isinstance(found["array"], np.ndarray)
    assert found["array"].tolist() == [3, 3, 3]
    assert int(found["pair"][0]) == 3
    assert found["pair"][1] == []


def test_several_lists_are_reduced_together(graph: Compile) -> None:
    def write(x: Any, ranks: list[Any]) -> list[Any]:
        given = [bind(r.ones, x) for r in ranks]
        found = allreduce.bind([given, [bind(r.ones, (2,)) for r in ranks]])
        return [node for pair in found for node in pair]

    g = graph(write)
    found = g.execute((3,)).get()
    assert [tuple(one.shape) for one in found] == [(3,), (2,)] * 3
    assert all((one == 6).all() for one in found)
    assert "allreduce.sum.share" in g.show()
    # A collective has names like any call.
    assert "allreduce.sum computes" in g.explain()
    assert {"Rank#1.allreduce.sum.share", "Rank#1.allreduce.sum"} <= set(g.stats()["calls"])


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([torch.ones(2), torch.ones(3), torch.ones(2)], r"Rank#1 gave torch.float32 \(2,\), Rank#2 gave .*\(3,\)"),
        ([torch.ones(2), torch.ones(2), torch.ones(2).int()], r"Rank#3 gave torch.int32 \(2,\)"),
        ([torch.ones(2), [torch.ones(2)] * 2, torch.ones(2)], r"Rank#2"),
        ([{"a": torch.ones(2)}, {"b": torch.ones(2)}, {"a": torch.ones(2)}], r"\['a'\].*Rank#2 gave \['b'\]"),
    ],
)
def test_different_tensors_are_refused(graph: Compile, values: list[Any], text: str) -> None:
    g = graph(lambda x, ranks: allreduce.bind([bind(r.item, x) for r in ranks]))
    with pytest.raises(ValueError, match=f"allreduce.sum: all actors must give equal.*{text}"):
        g.execute(values).get()
    assert all((one == 6).all() for one in g.execute([torch.full((2,), i + 1) for i in range(3)]).get())


def test_other_values_are_refused(graph: Compile) -> None:
    g = graph(lambda x, ranks: allreduce.bind([bind(r.item, x) for r in ranks]))
    with pytest.raises(TypeError, match=r"value of type str.*gather or mean"):
        g.execute(["a", "b", "c"]).get()
    with pytest.raises(TypeError, match=r"torch.bool \(2,\): bools have no sum"):
        g.execute([torch.ones(2).bool()] * 3).get()


def test_rows_that_cannot_be_divided_are_refused(graph: Compile) -> None:
    g = graph(lambda x, ranks: reducescatter.bind([bind(r.ones, x) for r in ranks]))
    with pytest.raises(ValueError, match="length 4 along axis 0 must be divisible by the number of actors, 3"):
        g.execute((4, 2)).get()
    with pytest.raises(ValueError, match="no dimensions"):
        g.execute(()).get()


def test_a_failed_input_fails_every_result(graph: Compile) -> None:
    g = graph(lambda x, ranks: allreduce.bind([bind(r.item, x) for r in ranks]))
    with pytest.raises(IndexError):
        g.execute([torch.ones(2), torch.ones(2)]).get()  # nothing for the last one
    assert len(g.execute([torch.ones(2)] * 3).get()) == 3


def test_wrong_inputs_are_refused_where_they_are_bound() -> None:
    one, two = Rank(0), Rank(1)
    with raylane.InputNode() as x:
        a, b = bind(one.echo, x), bind(two.echo, x)
        for inputs, text in [
            ([], "list with a node of each actor"),
            ([a, bind(one.echo, x)], "the actor of Rank.echo.* gives several"),
            ([a, x], "must be the result of an actor's method, got input"),
            ([[a, b], [b, a]], "same actors in the same order; list 1"),
            ([[a, b], [a]], "same actors"),
        ]:
            with pytest.raises(ValueError, match=text):
                allreduce.bind(inputs)
        with pytest.raises(ValueError, match="unknown op 'xor'; the operations are sum, prod"):
            allreduce.bind([a, b], op="xor")
        for transport in ("gloo", "nccl", "host"):
            with pytest.raises(GraphPlanError, match=f"{transport}' is for values of calls; .* call torch.distributed"):
                allreduce.bind([a, b], transport=transport)
        with pytest.raises(ValueError, match="only allreduce takes several lists"):
            allgather.bind([[a, b], [a, b]])


def _branches(x: Any, ranks: list[Any]) -> list[Any]:
    """Return two branches of each actor: one with a collective, bound first, and one without."""
    reduced = allreduce.bind([bind(r.ones, x) for r in ranks])
    return [*[bind(r.echo, one) for r, one in zip(ranks, reduced, strict=True)], *[bind(r.echo, x) for r in ranks]]


@pytest.mark.claim("graphs", "with overlap, an actor first runs the calls that need not wait for a collective")
def test_with_overlap_an_actor_first_runs_what_need_not_wait(graph: Compile) -> None:
    plain, overlapped = graph(_branches), graph(_branches, overlap=True)
    assert _order(plain) == ["ones", "allreduce.sum.share", "allreduce.sum", "echo", "echo"]
    assert _order(overlapped) == ["ones", "allreduce.sum.share", "echo", "allreduce.sum", "echo"]
    assert [float(one.sum()) for one in overlapped.execute((2,)).get()[:3]] == [12, 12, 12]


def _order(g: Any) -> list[str]:
    return [g.plan.tasks[task].method for task in g.plan.order[1]]


def test_an_order_names_a_collective_once(graph: Compile, ranks: list[Any]) -> None:
    calls: list[list[Any]] = []

    def write(x: Any, ranks: list[Any]) -> list[Any]:
        for _ in range(2):
            calls.append(allreduce.bind([bind(r.ones, x) for r in ranks]))
        return [node for found in calls for node in found]

    with raylane.InputNode() as x:
        nodes = write(x, ranks)
    given = {found[0].args[0][0].args[0]: None for found in calls}
    ones = list(given)
    order = {ranks[0]: [ones[1], calls[1][0], ones[0], calls[0][0]]}
    backend = "inline" if type(ranks[0]) is Rank else "ray"
    with raylane.compile(MultiOutputNode(nodes), order=order, backend=backend) as g:
        # The other actors bind them the other way round: no actor waits for another within a collective.
        assert [float(one.sum()) for one in g.execute((2,)).get()] == [12] * 6

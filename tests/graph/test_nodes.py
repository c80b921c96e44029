"""What can be bound, what a node is, and what it is not. Actors are plain objects."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import ray

import raylane
from raylane import MultiOutputNode, _ray, bind
from raylane.graph import first, gather, mean, nodes, scatter
from raylane.graph.plan import planner as planning


class Stage:
    def step(self, x: Any, *, k: int = 1) -> Any: ...


class Head(Stage):
    pass


a, d = Stage(), Head()


# bind


def test_bind_accepts_only_methods() -> None:
    for wrong in (a, Stage.step, len, [].append, lambda x: x, a.step.__func__, "step", None):
        with pytest.raises(TypeError, match=r"the first argument must be a method of an actor handle"):
            bind(wrong, 1)
    # What stands for `actor.step.remote`, which would run the call at once.
    remote = types.MethodType(lambda method: None, object.__new__(ray.actor.ActorMethod))
    with pytest.raises(TypeError, match=r"Write bind\(actor\.step, x\), not"):
        bind(remote, 1)
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'method'|missing a required"):
        bind()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        ((), {}, r"missing a required argument: 'x'. The method is Stage.step\(x: 'Any', \*, k: 'int' = 1\)"),
        ((1, 2), {}, r"too many positional arguments. .* got \(1, 2\) and \{\}"),
        ((1,), {"q": 3}, "got an unexpected keyword argument 'q'"),
        ((1,), {"x": 3}, "multiple values for argument 'x'"),
    ],
)
def test_arguments_that_do_not_fit_are_told_at_once(args: Any, kwargs: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        bind(a.step, *args, **kwargs)


def test_a_parameter_may_have_any_name() -> None:
    class Odd:
        def run(self, method: Any, actor: Any) -> Any: ...

    node = bind(Odd().run, method=1, actor=2)
    assert node.kwargs == {"method": 1, "actor": 2}


def test_unhashable_things_are_no_matter() -> None:
    @dataclasses.dataclass
    class Unhashable:
        size: int

        def run(self, x: Any) -> Any: ...

    one, other = Unhashable(1), Unhashable(1)  # equal, and yet two
    with raylane.InputNode() as x:
        node = bind(
            other.run,
            bind(
                one.run,
                x,
            )
            if False
            else bind(one.run, [x, {"k": []}]),
        )
    found, actors = planning.plan(node, identify=id, name=lambda actor: "same")
    assert found.members == ("driver", "same#1", "same#2")
    assert actors[0] is one
    assert actors[1] is other


@pytest.mark.parametrize(("declared", "shape"), [(0, None), (1, None), (2, 2), (5, 5)])
def test_declared_returns(declared: int, shape: int | None) -> None:
    class Returns:
        def run(self) -> Any: ...

        run.__ray_num_returns__ = declared  # type: ignore[attr-defined]

    made = bind(Returns().run)
    if shape is None:
        assert isinstance(made, nodes.CallNode)
    else:
        assert isinstance(made, tuple)
        assert [node.key for node in made] == list(range(shape))
        assert len({id(node.base) for node in made}) == 1


@pytest.mark.parametrize("declared", ["streaming", "dynamic"])
def test_generators_have_no_place_in_a_graph(declared: str) -> None:
    class Yields:
        def run(self) -> Any:
            yield 1

        run.__ray_num_returns__ = declared  # type: ignore[attr-defined]

    with pytest.raises(TypeError, match=f"Yields.run has num_returns='{declared}': .* return a list instead"):
        bind(Yields().run)


# What a node is not


@pytest.mark.claim("graphs", "a node in an `if` or a loop raises an error that says what to do instead")
def test_nodes_are_no_values() -> None:
    with raylane.InputNode() as x:
        made = bind(a.step, x)
    for node, shown in ((x, "input"), (made, r"Stage.step\(...\)"), (made["k"], r"Stage.step\(...\)\['k'\]")):
        with pytest.raises(TypeError, match=f"{shown} has no value before an execution: a graph has no branches"):
            assert node
        with pytest.raises(TypeError, match=f"{shown} cannot be unpacked: .* declare @ray.method"):
            _one, _two = node
        with pytest.raises(TypeError, match="the index of a node must be an int or a str"):
            node[1:2]
        with pytest.raises(TypeError, match="the index of a node must be an int or a str"):
            node[None]
    with pytest.raises(AttributeError):
        made.loss  # noqa: B018  # results have items only
    with pytest.raises(AttributeError, match=r"For an input of this name write x\['_hidden'\]"):
        x._hidden  # noqa: B018
    assert repr(x["_hidden"]) == "input['_hidden']"


def test_nodes_show_what_they_are() -> None:
    with raylane.InputNode() as x:
        made = bind(d.step, x.mask[0])
    shown = [x, x.mask[0], made, scatter(made, 3)[1], gather([made, made]), MultiOutputNode([made])]
    assert list(map(repr, shown)) == [
        "input",
        "input.mask[0]",
        "Head.step(...)",
        "Head.step(...).part(1 of 3)",
        "gather(2 nodes)",
        "outputs(1)",
    ]


# Nodes in the wrong place


def test_joins_need_nodes() -> None:
    with raylane.InputNode() as x:
        for join, name in ((gather, "gather"), (first, "first"), (mean, "mean")):
            with pytest.raises(TypeError, match=rf"{name}: the argument must be a list of one or more nodes, got \[\]"):
                join([])
            with pytest.raises(TypeError, match=rf"{name}: the argument must be a list of one or more nodes, got 5"):
                join([x, 5])  # type: ignore[list-item]
        with pytest.raises(TypeError, match=r"scatter\(\[1\], 2\): the first argument must be a node"):
            scatter([1], 2)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="count must be an int of 1 or more"):
            scatter(x, 0)


@dataclasses.dataclass
class Holder:
    inside: Any


@pytest.mark.parametrize(
    "wrap", [lambda node: {node}, Holder, lambda node: {node: 1}, lambda node: frozenset([node]), lambda node: node]
)
@pytest.mark.parametrize("dumps", [pickle.dumps, _ray.dumps, copy.deepcopy])
def test_nodes_inside_anything_else_cannot_be_sent(wrap: Callable[[Any], Any], dumps: Callable[[Any], Any]) -> None:
    with raylane.InputNode() as x:
        node = bind(a.step, x)
    for one in (node, x, node[0], scatter(node, 2)[1], first([node])):
        with pytest.raises(
            TypeError,
            match=r"has no value before an execution, so it cannot be pickled. Pass nodes to bind as arguments",
        ):
            dumps(wrap(one))


@pytest.mark.parametrize(
    ("name", "answer"), [("_max_inflight_executions", "use max_inflight"), ("enable_asyncio", "leave it out: ")]
)
def test_compile_with_an_option_of_ray_names_its_own(name: str, answer: str) -> None:
    with pytest.raises(TypeError, match=f"compile: {name} is an option of experimental_compile of Ray: {answer}"):
        raylane.compile(None, **{name: 4})

"""Which forms of execute(...) a graph accepts, and what each sends."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest

import raylane
from raylane import MultiOutputNode, bind
from raylane.graph import scatter
from raylane.graph.plan import planner as planning
from raylane.graph.plan.ir import INPUT
from raylane.graph.values.arguments import Arguments


class Stage:
    def run(self, *args: Any, **kwargs: Any) -> Any: ...

    def tick(self) -> Any: ...


s = Stage()
Form = tuple[tuple[Any, ...], dict[str, Any]]


def sent(write: Callable[[Any], Any], *args: Any, **kwargs: Any) -> list[Any]:
    """The values of a graph's input that `execute(*args, **kwargs)` sends, in the order in which calls read them."""
    with raylane.InputNode() as x:
        node = write(x)
    plan, _ = planning.plan(node, identify=id, name=lambda _: "s")
    values = Arguments(plan).values(args, kwargs)
    assert len(values) == len(plan.values)
    assert all(values[v.index] is None for v in plan.values if v.source != INPUT)
    return [values[v.index] for v in plan.values if v.source == INPUT]


def call(*args: Any, **kwargs: Any) -> Form:
    return args, kwargs


obj = types.SimpleNamespace(a=1, b=types.SimpleNamespace(c=[2, 3]))
inner = {"c": [2, 3]}


@pytest.mark.parametrize(
    ("write", "form", "values"),
    [
        # used whole: the one positional argument
        (lambda x: bind(s.run, x), call(5), [5]),
        (lambda x: bind(s.run, x), call(None), [None]),
        (lambda x: bind(s.run, x), call((1, 2)), [(1, 2)]),
        (lambda x: bind(s.run, [x, {"k": x}]), call({"k": 1}), [{"k": 1}]),
        # whole, and parts of it
        (
            lambda x: bind(s.run, x, x[0], x["k"][1]),
            call({0: "zero", "k": "ab"}),
            [{0: "zero", "k": "ab"}, "zero", "b"],
        ),
        (lambda x: bind(s.run, x, x.a), call(obj), [obj, 1]),
        (lambda x: bind(s.run, *scatter(x, 2)), call([1, 2, 3]), [[1, 2], [3]]),
        (lambda x: MultiOutputNode([bind(s.run, x[0]), x]), call("ab"), ["a", "ab"]),
        (lambda x: bind(s.run, x, x[-1]), call([7, 8]), [[7, 8], 8]),
        # positional arguments
        (lambda x: bind(s.run, x[0]), call(5), [5]),
        (lambda x: bind(s.run, x[0]), call([5]), [[5]]),  # the argument itself, not its item
        (lambda x: bind(s.run, x[1], x[0]), call("a", "b"), ["b", "a"]),
        (lambda x: bind(s.run, x[0], x[0]["k"]), call({"k": 4}), [{"k": 4}, 4]),
        (lambda x: bind(s.run, x[2]), call(1, 2, 3), [3]),
        (lambda x: bind(s.run, *scatter(x[1], 2)), call(0, "abc"), ["ab", "c"]),
        # keyword arguments, either spelling
        (lambda x: bind(s.run, x.a), call(a=5), [5]),
        (lambda x: bind(s.run, x["a"]), call(a=5), [5]),
        (lambda x: bind(s.run, x.a, x["a"]), call(a=5), [5, 5]),
        (lambda x: bind(s.run, x.a, x["b"]["c"][1]), call(b=inner, a=1), [1, 3]),
        # both
        (lambda x: bind(s.run, x[0], k=x.k), call(1, k=2), [1, 2]),
        (lambda x: bind(s.run, x[0], x[1], x["k"], x.m), call(1, 2, m=4, k=3), [1, 2, 3, 4]),
        # one positional argument that stands for all that is named
        (lambda x: bind(s.run, x["a"], x["b"]["c"]), call({"a": 1, "b": inner}), [1, [2, 3]]),
        (lambda x: bind(s.run, x.a), call(obj), [1]),
        (lambda x: bind(s.run, x[0], x[1]), call(["p", "q"]), ["p", "q"]),
        (lambda x: bind(s.run, x[1]), call("pq"), ["q"]),
        (lambda x: bind(s.run, x[0], x["k"]), call({0: "zero", "k": "key"}), ["zero", "key"]),
        # no input
        (lambda x: bind(s.tick), call(), [None]),
        (lambda x: bind(s.run, 5, [1]), call(), [None]),
    ],
)
def test_accepted(write: Callable[[Any], Any], form: Form, values: list[Any]) -> None:
    args, kwargs = form
    assert sent(write, *args, **kwargs) == values


@pytest.mark.parametrize(
    ("write", "form", "says"),
    [
        (lambda x: bind(s.run, x), call(), "takes one positional argument, used whole; execute got 0 positional"),
        (lambda x: bind(s.run, x), call(1, 2), "used whole; execute got 2 positional"),
        (lambda x: bind(s.run, x), call(x=1), "used whole; execute got 0 positional, x="),
        (lambda x: bind(s.run, x, x.k), call(1, k=2), "used whole; execute got 1 positional, k="),
        (lambda x: bind(s.run, x[0]), call(), "takes 1 positional; execute got 0 positional"),
        (lambda x: bind(s.run, x[0]), call(1, 2), "takes 1 positional; execute got 2 positional"),
        (lambda x: bind(s.run, x[1]), call(), "takes 2 positional; execute got 0"),
        (lambda x: bind(s.run, x[1]), call(1, 2, 3), "takes 2 positional; execute got 3"),
        (lambda x: bind(s.run, x[0], x.k), call(k=1), "takes 1 positional, k=; execute got 0 positional, k="),
        (lambda x: bind(s.run, x[0], x.k), call(1, 2, k=1), "takes 1 positional, k=; execute got 2 positional, k="),
        (lambda x: bind(s.run, x[0], x.k), call(1, k=1, other=2), "execute got 1 positional, k=, other="),
        (lambda x: bind(s.run, x.b, x["a"]), call(a=1), "takes 0 positional, a=, b=; execute got 0 positional, a="),
        (lambda x: bind(s.run, x.a), call(), "takes 0 positional, a=; execute got 0 positional"),
        (lambda x: bind(s.tick), call(1), "takes no input; execute got 1 positional"),
        (lambda x: bind(s.tick), call(k=1), "takes no input; execute got 0 positional, k="),
    ],
)
def test_refused(write: Callable[[Any], Any], form: Form, says: str) -> None:
    args, kwargs = form
    with pytest.raises(TypeError, match=f"this graph {says}|{says}"):
        sent(write, *args, **kwargs)


@pytest.mark.parametrize(
    ("write", "form", "error", "says"),
    [
        (lambda x: bind(s.run, x, x["k"]), call({}), KeyError, r"\['k'\] of dict"),
        (lambda x: bind(s.run, x, x[3]), call([1]), IndexError, r"\[3\] of list"),
        (lambda x: bind(s.run, x, x.k), call({"k": 1}), AttributeError, r"\.k of dict.*for its key write node\['k'\]"),
        (lambda x: bind(s.run, x[0]["k"]), call({}), KeyError, r"\['k'\] of dict"),
        (
            lambda x: bind(s.run, *scatter(x, 3)),
            call([1]),
            ValueError,
            "its length along axis 0 is 1, but 3 parts are wanted",
        ),
    ],
)
def test_execute_input_without_a_part_raises(
    write: Callable[[Any], Any], form: Form, error: type[Exception], says: str
) -> None:
    args, kwargs = form
    with pytest.raises(error, match=says):
        sent(write, *args, **kwargs)


@pytest.mark.parametrize(
    ("write", "argument", "error", "says"),
    [
        (lambda x: bind(s.run, x[0], x.k), 5, TypeError, "1 positional, k="),
        (lambda x: bind(s.run, x[0], x[1]), [5], IndexError, "2 positional"),
        (lambda x: bind(s.run, x["a"], x["b"]), {"a": 1}, KeyError, "0 positional, a=, b="),
        (lambda x: bind(s.run, x.a), 5, AttributeError, "0 positional, a="),
    ],
)
def test_single_argument_without_all_inputs_adds_a_note(
    write: Callable[[Any], Any], argument: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error) as caught:
        sent(write, argument)
    assert caught.value.__notes__ == [
        f"this graph takes {says}; the one argument that execute got must hold all of them"
    ]

"""Graphs beside ordinary calls of the same actors: kept apart when asked for, and in the same settings of a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch

import raylane
from raylane import MultiOutputNode, bind
from raylane.errors import GraphPlanError

Compile = Callable[..., Any]


class Exclusive:
    """Notices when two of its methods run at the same time."""

    inside = 0
    overlaps = 0

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)

    @classmethod
    def _busy(cls, seconds: float) -> None:
        cls.inside += 1
        cls.overlaps += cls.inside > 1
        time.sleep(seconds)
        cls.overlaps += cls.inside > 1
        cls.inside -= 1

    def work(self, seconds: float) -> float:
        self._busy(seconds)
        return seconds

    def items(self, count: int) -> Iterator[int]:
        for number in range(count):
            self._busy(0.002)
            type(self).inside += 1  # in use between two items, too
            yield number
            type(self).inside -= 1

    @ray.method(num_returns=2)
    def two(self, x: Any) -> tuple[Any, Any]:
        self._busy(0.002)
        return x, x + 1

    @staticmethod
    def static(x: Any) -> Any:
        Exclusive._busy(0.002)
        return ("static", x)

    @classmethod
    def classy(cls, x: Any, *, k: int = 1) -> Any:
        cls._busy(0.002)
        return (cls.__name__, x, k)

    @raylane.method
    def large(self, count: int) -> Any:
        self._busy(0.002)
        return torch.ones(count)

    def fail(self, x: Any) -> Any:
        raise ValueError(f"cannot do {x}")

    def meet(self, timeout_s: float) -> bool:
        """Whether another call of it runs at the same time."""
        try:
            self.barrier.wait(timeout_s)
        except threading.BrokenBarrierError:
            self.barrier.reset()
            return False
        return True

    def seen_overlaps(self) -> int:
        found, type(self).overlaps = type(self).overlaps, 0
        return found


@pytest.fixture(scope="module")
def actor(ray_session: None) -> Iterator[Any]:
    made = ray.remote(num_cpus=0.1)(Exclusive).remote()
    yield made
    ray.kill(made)


def test_calls_and_graphs_take_turns(actor: Any, graph: Compile) -> None:
    g = graph(lambda x: bind(actor.work, x), exclusive=True, max_inflight=4)
    both = [(g.execute(0.003), actor.work.remote(0.003)) for _ in range(20)]
    assert [(result.get(), ray.get(ref)) for result, ref in both] == [(0.003, 0.003)] * 20
    assert ray.get(actor.seen_overlaps.remote()) == 0


def test_methods_of_every_kind_take_turns_and_do_what_they_did(actor: Any, graph: Compile) -> None:
    g = graph(lambda x: bind(actor.work, x), exclusive=True, max_inflight=8)
    waiting = []
    for number in range(8):
        waiting.append(g.execute(0.003))
        stream, two = actor.items.remote(3), actor.two.remote(number)
        others = [actor.static.remote(number), actor.classy.remote(number, k=2)]
        assert [ray.get(ref) for ref in stream] == [0, 1, 2]
        assert ray.get(two) == [number, number + 1]
        assert ray.get(others) == [("static", number), ("Exclusive", number, 2)]
        assert float(ray.get(actor.large.remote(100_000)).sum()) == 100_000
        with pytest.raises(ValueError, match="cannot do it"):
            ray.get(actor.fail.remote("it"))
    assert [result.get() for result in waiting] == [0.003] * 8
    assert ray.get(actor.seen_overlaps.remote()) == 0


def test_methods_of_every_kind_are_called_by_graphs_too(actor: Any, graph: Compile) -> None:
    def write(x: Any) -> Any:
        one, two = bind(actor.two, x)
        return MultiOutputNode([one, two, bind(actor.static, x), bind(actor.classy, x, k=3), bind(actor.large, 5)])

    g = graph(write, exclusive=True)
    refs = [actor.work.remote(0.002) for _ in range(5)]
    *found, tensor = g.execute(1).get()
    assert found == [1, 2, ("static", 1), ("Exclusive", 1, 3)]
    assert tensor.tolist() == [1] * 5
    ray.get(refs)
    assert ray.get(actor.seen_overlaps.remote()) == 0


def test_without_it_both_run_at_once(actor: Any, graph: Compile) -> None:
    g = graph(lambda x: bind(actor.meet, x))
    result, ref = g.execute(30), actor.meet.remote(30)
    assert (result.get(), ray.get(ref)) == (True, True)


def test_two_graphs_of_an_actor_take_turns_anyway(actor: Any, graph: Compile) -> None:
    one, two = (graph(lambda x: bind(actor.work, x)) for _ in range(2))
    both = [(one.execute(0.002), two.execute(0.002)) for _ in range(10)]
    assert [(a.get(), b.get()) for a, b in both] == [(0.002, 0.002)] * 10
    assert ray.get(actor.seen_overlaps.remote()) == 0  # one graph loop serves both


def test_the_last_exclusive_graph_gives_ordinary_calls_back(actor: Any, graph: Compile) -> None:
    first, second = (graph(lambda x: bind(actor.meet, x), exclusive=True) for _ in range(2))
    free = graph(lambda x: bind(actor.meet, x))
    assert first.execute(0.01).get() is False  # alone
    first.teardown()
    result = second.execute(0.1)
    ref = actor.meet.remote(0.1)
    assert (result.get(), ray.get(ref)) == (False, False)  # the other still keeps them apart
    second.teardown()
    result, ref = free.execute(30), actor.meet.remote(30)
    assert (result.get(), ray.get(ref)) == (True, True)
    with pytest.raises(ValueError, match="cannot do that"):
        ray.get(actor.fail.remote("that"))


def test_failed_compilation_leaves_ordinary_calls_unlocked(actor: Any, graph: Compile) -> None:
    with raylane.InputNode() as x:
        node = bind(actor.meet, x)
    node.method = "no_such_method"
    with pytest.raises(GraphPlanError, match="no method 'no_such_method'"):
        raylane.compile(node, exclusive=True)
    g = graph(lambda x: bind(actor.meet, x))
    result, ref = g.execute(30), actor.meet.remote(30)
    assert (result.get(), ray.get(ref)) == (True, True)


# Settings of the thread


class Configured:
    """Sets up its thread as many do in __init__, and tells what its methods see."""

    def __init__(self) -> None:
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.float16)
        torch.set_num_threads(2)
        np.seterr(divide="raise", over="ignore")

    def settings(self, x: Any) -> dict[str, Any]:
        weight = torch.ones(2, requires_grad=True, device="cpu")
        matrix = torch.ones(2, 2, device="cpu", dtype=torch.float32)
        return {
            "grad": (weight * 2).requires_grad,
            "dtype": str(torch.ones(1).dtype),
            "device": str(torch.empty(1).device),
            "autocast": str((matrix @ matrix).dtype),
            "threads": torch.get_num_threads(),
            "errors": np.geterr(),
            "thread": threading.current_thread().name,
        }

    def echo(self, x: Any) -> Any:
        return x

    def change(self, on: bool) -> None:
        torch.set_grad_enabled(on)

    def grad(self, x: Any) -> bool:
        return torch.is_grad_enabled()


@pytest.fixture(scope="module")
def configured(ray_session: None) -> Iterator[Any]:
    made = ray.remote(num_cpus=0.1)(Configured).remote()
    yield made
    ray.kill(made)


def test_methods_see_the_settings_of_the_actors_own_thread(configured: Any, graph: Compile) -> None:
    ordinary = ray.get(configured.settings.remote(0))
    found = graph(lambda x: bind(configured.settings, x)).execute(0).get()
    assert ordinary.pop("thread") == "MainThread"
    assert found.pop("thread") == "raylane-graph-loop"
    assert found == ordinary
    assert {key: found[key] for key in ("grad", "dtype", "device", "autocast", "threads")} == {
        "grad": False,
        "dtype": "torch.float64",
        "device": "meta",
        "autocast": "torch.float16",
        "threads": 2,
    }
    assert (found["errors"]["divide"], found["errors"]["over"]) == ("raise", "ignore")


def test_tensors_travel_whatever_the_settings_are(configured: Any, graph: Compile) -> None:
    g = graph(lambda x: bind(configured.echo, x))
    for count in (0, 3, 100_000):
        sent = {"t": torch.arange(float(count)), "p": torch.nn.Parameter(torch.ones(count))}
        got = g.execute(sent).get()
        assert torch.equal(got["t"], sent["t"])
        assert got["p"].requires_grad
        assert got["p"].device.type == "cpu"
        assert float(ray.get(configured.echo.remote(sent))["t"].sum()) == float(sent["t"].sum())


def test_the_settings_are_those_at_the_time_of_compiling(configured: Any, graph: Compile) -> None:
    first = graph(lambda x: bind(configured.grad, x))
    assert first.execute(0).get() is False
    ray.get(configured.change.remote(True))
    assert first.execute(0).get() is False
    assert graph(lambda x: bind(configured.grad, x)).execute(0).get() is True
    ray.get(configured.change.remote(False))

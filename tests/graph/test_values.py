"""Arrays and tensors along edges: what arrives, who may write to it, how long it may be kept, what keeping costs."""

from __future__ import annotations

import gc
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import ray
import torch

import raylane
from raylane.errors import GraphError, GraphPlanError, GraphTimeoutError, GraphValueError

pytestmark = pytest.mark.usefixtures("clean")
Compile = Callable[..., Any]
LARGE = 200_000  # elements: 1.6 MB as float64


@dataclass
class Batch:
    tokens: torch.Tensor
    names: list[str]
    weights: Any


@pytest.mark.parametrize("count", [0, 3, 3000, LARGE])
def test_arrays_arrive_equal_and_writable(workers: list[Any], graph: Compile, count: int) -> None:
    g = graph(lambda x: raylane.bind(workers[0].echo, x))
    sent = np.arange(count, dtype=np.float64)
    for value in (sent, {"a": sent, "b": [sent[::2]], "f": np.asfortranarray(sent.reshape(1, -1))}):
        got = g.execute(value).get()
        for one, other in zip(_arrays(value), _arrays(got), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
            other[:1] = -1


def _arrays(value: Any) -> list[np.ndarray[Any, Any]]:
    if isinstance(value, np.ndarray):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return [array for item in items for array in _arrays(item)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("count", [0, 5, LARGE])
def test_tensors_of_every_kind(workers: list[Any], graph: Compile, dtype: torch.dtype, count: int) -> None:
    g = graph(lambda x: raylane.bind(workers[0].echo, x))
    sent = torch.arange(count).to(dtype)
    got = g.execute(sent).get()
    assert got.dtype == dtype
    assert torch.equal(sent.to(torch.float32), got.to(torch.float32))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_strided_nested_tensor_travels_along_an_edge(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(workers[0].echo, x))
    found = g.execute({"nested": torch.nested.nested_tensor([torch.ones(3), torch.zeros(2)])}).get()
    assert [part.tolist() for part in found["nested"].unbind()] == [[1, 1, 1], [0, 0]]


def test_sharing_gradients_and_containers_survive(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(workers[1].echo, raylane.bind(workers[0].echo, x)))
    base = torch.arange(float(LARGE))
    parameter = torch.nn.Parameter(torch.ones(3))
    sent = {"batch": Batch(base, ["n"], np.ones(3)), "view": base[10:20], "again": base, "tied": [parameter, parameter]}
    got = g.execute(sent).get()
    assert got["batch"].names == ["n"]
    assert got["batch"].tokens is got["again"]
    got["again"][10] = -5
    assert got["view"][0] == -5  # still one storage
    assert got["tied"][0] is got["tied"][1]
    assert isinstance(got["tied"][0], torch.nn.Parameter)
    assert base[10] == 10  # the sender's is its own


def test_execute_input_may_be_changed_after_return(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(workers[0].total, x), max_inflight=2)
    value = np.ones(LARGE)
    first = g.execute(value)
    value[:] = 5
    second = g.execute(value)
    value[:] = 7
    assert (first.get(), second.get()) == (LARGE, 5 * LARGE)


def test_several_readers_share_arrays_and_copy_tensors(workers: list[Any], graph: Compile) -> None:
    def write(x: Any) -> Any:
        made = raylane.bind(workers[0].echo, x)
        return raylane.MultiOutputNode([made, raylane.bind(workers[1].keep, made)])

    g = graph(write)
    array, _ = g.execute(np.ones(LARGE)).get()
    assert not array.flags.writeable
    tensor, _ = g.execute(torch.ones(LARGE)).get()
    tensor.zero_()
    assert ray.get(workers[1].drop.remote()) == [LARGE, LARGE]


@pytest.mark.claim("graphs", "arrays that arrive without a copy may be kept; the writer waits for their memory")
def test_arrays_may_be_kept_for_ever(workers: list[Any], graph: Compile) -> None:
    a = workers[0]
    g = graph(lambda x: raylane.bind(a.keep, x))
    for i in range(20):
        assert g.execute(np.full(LARGE, float(i))).get() == i + 1
    g.teardown()
    assert ray.get(a.drop.remote()) == [float(i) * LARGE for i in range(20)]


def test_the_driver_keeps_results_after_the_graph_is_gone(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(workers[0].ones, x))
    kept = [g.execute(LARGE).get() for _ in range(5)]
    g.teardown()
    del g
    gc.collect()
    assert [float(array.sum()) for array in kept] == [LARGE] * 5


def test_dropped_arrays_give_their_memory_back(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(workers[0].total, x))
    value = np.ones(LARGE)
    for _ in range(300):
        assert g.execute(value).get() == LARGE
    pool = g._connections.pool
    assert pool.idle_count + pool.leased_count <= 3  # not 300


@pytest.mark.claim("graphs", "arrays that arrive without a copy may be kept; the writer waits for their memory")
def test_the_writer_waits_for_memory_and_names_who_keeps_it(workers: list[Any], graph: Compile) -> None:
    a = workers[0]
    value = np.ones(LARGE)
    g = graph(lambda x: raylane.bind(a.keep, x), max_lent_bytes=4 * value.nbytes, timeout=1.0)
    kept = 0

    def fill() -> None:
        nonlocal kept
        for _ in range(6):
            kept = g.execute(value).get(timeout=20)

    with pytest.raises(GraphTimeoutError, match=r"Worker \(Actor\(Worker, \w+\)\) holds \d+ bytes.*max_lent_bytes"):
        fill()
    assert 1 <= kept <= 4
    assert ray.get(a.drop.remote()) == [LARGE] * kept
    assert g.execute(value).get(timeout=20) == 1  # and goes on
    ray.get(a.drop.remote())


def test_an_actor_waits_for_memory_too(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(workers[0].ones, x), max_lent_bytes=20_000_000, timeout=1.0)
    kept = []

    def fill() -> None:
        for _ in range(20):
            kept.append(g.execute(LARGE).get(timeout=20))

    with pytest.raises(GraphTimeoutError, match=r"driver .* holds"):
        fill()
    kept.clear()
    assert float(g.execute(LARGE).get(timeout=20).sum()) == LARGE


def test_message_above_the_limit_fails_only_its_execution(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(workers[0].echo, x), max_lent_bytes=1_000_000)
    with pytest.raises(GraphValueError, match="max_lent_bytes is 1000000"):
        g.execute(np.ones(LARGE)).get()
    with pytest.raises(GraphValueError, match="max_lent_bytes is"):
        graph(lambda x: raylane.bind(workers[0].ones, x), max_lent_bytes=1_000_000).execute(LARGE).get()
    assert g.execute(1).get() == 1


@pytest.mark.parametrize("size", [60_000, 70_000, 3_000_000])
def test_long_plain_values_travel_whatever_their_size(workers: list[Any], graph: Compile, size: int) -> None:
    g = graph(lambda x: raylane.MultiOutputNode([raylane.bind(worker.echo, x) for worker in workers[:2]]))
    for value in ("é" * size, list(range(size // 8)), b"x" * size):
        assert g.execute(value).get() == [value, value]


@pytest.mark.slow
def test_values_of_very_many_arrays(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: raylane.MultiOutputNode([raylane.bind(worker.echo, x) for worker in workers[:2]]))
    for make in (lambda i: np.full(40, i), lambda i: torch.full((40,), i)):
        sent = [make(i) for i in range(20_000)]
        for got in g.execute(sent).get():
            assert [int(one[39]) for one in got] == list(range(20_000))


def test_a_constant_that_cannot_be_pickled_is_named(workers: list[Any], graph: Compile) -> None:
    import threading

    with pytest.raises(GraphPlanError, match=r"a constant in the calls of Worker cannot be pickled.*lock"):
        graph(lambda x: raylane.bind(workers[0].add, x, threading.Lock()))


@pytest.mark.claim("graphs", "a broadcast value is serialised once")
def test_broadcast_is_serialised_once(workers: list[Any], graph: Compile) -> None:
    class Counted:
        pickled = 0

        def __reduce__(self) -> Any:
            Counted.pickled += 1
            return str, ("once",)

    g = graph(lambda x: raylane.MultiOutputNode([raylane.bind(worker.echo, x) for worker in workers]))
    assert g.execute(Counted()).get() == ["once"] * 4
    assert Counted.pickled == 1


def _object_ref_deserializer() -> int:
    return 5


def test_text_of_rays_source_travels(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(workers[0].echo, x))
    name = "_object_ref_deserializer"
    text = f"def {name}(binary, call_site): ..."
    for value in ([text, name, torch.ones(3)], {name: lambda: 1, "text": text}):
        got = g.execute(value).get()
        assert list(got)[:1] == list(value)[:1]
    assert g.execute([lambda: _object_ref_deserializer()]).get()[0]() == 5  # a function that uses the name
    with pytest.raises(GraphValueError, match="an ObjectRef cannot travel in a graph"):
        g.execute([name, text, torch.ones(3), ray.put(1)])


def test_execute_while_an_input_is_pickled_is_refused(workers: list[Any], graph: Compile) -> None:
    class Nested:
        def __init__(self, use: Callable[[], Any]) -> None:
            self.use = use

        def __reduce__(self) -> Any:
            return str, (str(self.use()),)

    g = graph(lambda x: raylane.bind(workers[0].echo, x))
    other = graph(lambda x: raylane.bind(workers[1].echo, x))
    for use in (lambda: g.execute(1), lambda: g.execute_nowait(1)):
        for value in (Nested(use), [torch.ones(1), Nested(use)]):
            with pytest.raises(GraphError, match=r"execute was called while the same thread.*__reduce__"):
                g.execute(value)
    assert g.execute(Nested(lambda: other.execute(3).get())).get() == "3"
    assert g.execute(2).get() == 2


@pytest.mark.slow
def test_get_while_a_result_is_unpickled_is_refused(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(workers[0].echo, x), max_inflight=3)
    box = types.SimpleNamespace()
    _USES.append(lambda: box.second.get())
    try:
        first, box.second = g.execute(Using()), g.execute(2)
        with pytest.raises(GraphError, match=r"get was called while the same thread reads a result"):
            first.get(timeout=20)
    finally:
        _USES.clear()
    assert box.second.get() == 2
    assert g.execute(3).get() == 3


_USES: list[Callable[[], Any]] = []


def _use() -> Any:
    return [use() for use in _USES] or Using()


class Using:
    """Object whose unpickling uses what the test has put into `_USES`, in the process of the test alone."""

    def __reduce__(self) -> Any:
        return _use, ()

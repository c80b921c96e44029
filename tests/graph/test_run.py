"""Graphs of every shape on a real Ray: what arrives is what ordinary calls would have given."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import ray
from ray import dag
from tests.graph.graph_actors import Worker

import raylane
from raylane.errors import GraphFullError, GraphPlanError, GraphTimeoutError
from raylane.graph import result as results

pytestmark = pytest.mark.usefixtures("clean")
Compile = Callable[..., Any]


class Opaque:
    """Travels although another process could import it only under the test's own module name."""

    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and other.x == self.x

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("value", [None, 3, "text", b"bytes", {"step": 1}, [1, (2, {3: None})], Opaque(4), 1.5])
def test_a_value_goes_through_one_actor_and_back(workers: list[Any], graph: Compile, value: Any) -> None:
    g = graph(lambda x: raylane.bind(workers[0].echo, x))
    assert g.execute(value).get() == value


def test_what_only_cloudpickle_can_pickle_travels_too(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(workers[0].echo, x))
    double = g.execute(lambda x: 2 * x).get()
    assert double(4) == 8


def test_a_chain_passes_values_from_actor_to_actor(workers: list[Any], graph: Compile) -> None:
    def write(x: Any) -> Any:
        for worker in workers:
            x = raylane.bind(worker.add, x, 1)
        return x

    g = graph(write)
    assert [g.execute(i).get() for i in range(50)] == [i + 4 for i in range(50)]


def test_arguments_are_nodes_constants_and_containers_of_both(workers: list[Any], graph: Compile) -> None:
    a, b = workers[:2]

    def write(x: Any) -> Any:
        made = raylane.bind(a.add, x, 10)
        return raylane.bind(b.record, one=made, many=[made, {"in": (x, made)}], constant=[1, {"k": 2}], text="t")

    assert graph(write).execute(1).get() == {
        "one": 11,
        "many": [11, {"in": (1, 11)}],
        "constant": [1, {"k": 2}],
        "text": "t",
    }


def test_inputs_by_position_and_name_go_only_where_they_are_used(workers: list[Any], graph: Compile) -> None:
    a, b, c = workers[:3]
    g = graph(
        lambda x: raylane.MultiOutputNode(
            [raylane.bind(a.add, x[0], x[1]), raylane.bind(b.echo, x.name), raylane.bind(c.add, x[0], b=x["k"])]
        )
    )
    assert g.execute(1, 2, name="n", k=5).get() == [3, "n", 6]
    readers = {edge.value: edge.readers for edge in g.plan.edges if edge.writer == 0}
    assert sorted(len(r) for r in readers.values()) == [1, 1, 1, 2]  # x[1], name and k to one, x[0] to two
    with pytest.raises(TypeError, match=r"takes 2 positional, k=, name=; execute got 1 positional, k="):
        g.execute(1, k=5)
    assert g.execute(1, 2, name="still", k=5).get() == [3, "still", 6]


def test_one_argument_stands_for_all_that_the_graph_names(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(workers[0].add, x["a"], x["b"]))
    assert g.execute({"a": 1, "b": 2}).get() == 3
    assert g.execute(a=3, b=4).get() == 7
    whole = graph(lambda x: raylane.bind(workers[0].record, all=x, first=x[0]))
    assert whole.execute([7, 8]).get() == {"all": [7, 8], "first": 7}
    with pytest.raises(TypeError, match="one positional argument, used whole; execute got 2 positional"):
        whole.execute(1, 2)


def test_one_result_may_have_many_readers_and_one_actor_many_calls(workers: list[Any], graph: Compile) -> None:
    a, b = workers[:2]

    def write(x: Any) -> Any:
        made = raylane.bind(a.add, x, 1)
        again = raylane.bind(a.add, made, made)  # on the same actor: it does not travel
        return raylane.MultiOutputNode([raylane.bind(b.add, made, again), raylane.bind(b.echo, made), made, again, x])

    g = graph(write)
    assert g.execute(1).get() == [6, 2, 2, 4, 1]


def test_items_of_results_and_declared_returns(workers: list[Any], graph: Compile) -> None:
    a, b = workers[:2]

    def write(x: Any) -> Any:
        one, two = raylane.bind(a.two, x)
        pair = raylane.bind(a.pair, x)
        return raylane.MultiOutputNode([raylane.bind(b.add, one, two), pair[1], raylane.bind(b.echo, pair[0])])

    assert graph(write).execute(5).get() == [11, 6, 5]


def test_a_graph_without_input_ticks(workers: list[Any]) -> None:
    with raylane.compile(raylane.bind(workers[0].tick)) as g:
        first = g.execute().get()
        assert [g.execute().get() for _ in range(5)] == [first + 1 + i for i in range(5)]
        with pytest.raises(TypeError, match="takes no input; execute got 1 positional"):
            g.execute(1)


def test_calls_whose_result_nobody_reads_run_and_report_their_errors(
    workers: list[Any], graph: Compile, caplog: pytest.LogCaptureFixture
) -> None:
    a, b, c = workers[:3]

    def write(x: Any) -> Any:
        raylane.bind(b.nothing, raylane.bind(c.echo, x))
        raylane.bind(c.fail, x)
        return raylane.bind(a.echo, x)

    g = graph(write)
    before = ray.get(b.count.remote())
    done = [g.execute(i) for i in range(2)]
    assert [result.get() for result in done] == [0, 1]
    assert [str(result.leaf_errors[0].cause) for result in done] == ["cannot do 0", "cannot do 1"]
    assert ray.get(b.count.remote()) == before + 2
    assert "Worker#1.fail failed, and nobody reads its result" in caplog.text


def test_scatter_gather_first_and_mean(workers: list[Any], graph: Compile) -> None:
    def write(x: Any) -> Any:
        parts = raylane.graph.scatter(x, len(workers))
        echoed = [raylane.bind(worker.echo, part) for worker, part in zip(workers, parts, strict=True)]
        sizes = [raylane.bind(worker.add, 0, index) for index, worker in enumerate(workers)]
        return raylane.MultiOutputNode(
            [
                raylane.graph.gather(echoed, axis=0),
                raylane.graph.gather(echoed),
                raylane.graph.first(sizes),
                raylane.graph.mean(sizes),
                raylane.bind(workers[1].echo, raylane.graph.gather(echoed, axis=0)),
            ]
        )

    data = list(range(10))
    joined, lists, first, mean, sent_on = graph(write).execute(data).get()
    assert joined == sent_on == data
    assert [len(part) for part in lists] == [3, 3, 2, 2]
    assert (first, mean) == (0, 1.5)


def test_first_transfers_one_value_and_counts_every_error(workers: list[Any], graph: Compile) -> None:
    a, b = workers[:2]
    g = graph(lambda x: raylane.graph.first([raylane.bind(a.echo, x), raylane.bind(b.add, x, 1)]))
    assert g.execute(1).get() == 1
    with pytest.raises(TypeError):
        g.execute("text").get()


def test_results_in_any_order_any_number_of_times(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(workers[0].echo, x), max_inflight=5)
    made = [g.execute(i) for i in range(5)]
    assert [made[i].get() for i in (3, 0, 4, 1, 2, 3, 3)] == [3, 0, 4, 1, 2, 3, 3]
    assert all(result.done() for result in made)
    assert pickle.loads(pickle.dumps(made[2])) == 2  # passed on as its value
    assert graph(lambda x: raylane.bind(workers[1].add, x, 1)).execute(made[4]).get() == 5


def test_a_timeout_loses_nothing(workers: list[Any], graph: Compile) -> None:
    a = workers[0]
    ray.get(a.hold_again.remote())
    g = graph(lambda x: raylane.bind(a.wait, x))
    result = g.execute("late")
    with pytest.raises(GraphTimeoutError, match=r"still waiting for Worker.wait.*not lost"):
        result.get(timeout=0.05)
    assert not result.done()
    ray.get(a.release.remote())  # an ordinary call, while the graph's method runs
    assert result.get() == "late"


def test_when_full_execute_waits_and_execute_nowait_raises(workers: list[Any], graph: Compile) -> None:
    a = workers[0]
    ray.get(a.hold_again.remote())
    g = graph(lambda x: raylane.bind(a.wait, x), max_inflight=2, timeout_s=0.2)
    made = [g.execute(i) for i in range(2)]
    with pytest.raises(GraphFullError, match="2 executions are under way"):
        g.execute_nowait(2)
    with pytest.raises(GraphTimeoutError, match="Nothing was started"):
        g.execute(2)
    ray.get(a.release.remote())
    made.append(g.execute(2))
    assert [result.get(timeout=20) for result in made] == [0, 1, 2]


def test_results_that_nobody_gets_do_not_fill_the_graph(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(workers[0].echo, x))
    for i in range(100):
        g.execute(i)
    assert g.execute("last").get() == "last"
    assert not g._pending


def test_many_threads_share_a_graph(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(workers[1].add, raylane.bind(workers[0].add, x, 1), 1), max_inflight=4)
    wrong: list[Any] = []

    def use(start: int) -> None:
        for i in range(start, start + 100):
            if g.execute(i).get(timeout=30) != i + 2:
                wrong.append(i)

    threads = [threading.Thread(target=use, args=(1000 * n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_several_graphs_live_on_one_actor_beside_ordinary_calls(workers: list[Any], graph: Compile) -> None:
    a, b = workers[:2]
    one = graph(lambda x: raylane.bind(a.add, x, 1))
    two = graph(lambda x: raylane.bind(b.add, raylane.bind(a.add, x, 10), 100), max_inflight=3)
    for i in range(30):
        first, second, plain = one.execute(i), two.execute(i), a.add.remote(i, 1000)
        assert (second.get(), first.get(), ray.get(plain)) == (i + 110, i + 1, i + 1000)
    one.teardown()
    assert two.execute(0).get() == 110  # dropping one leaves the other
    three = graph(lambda x: raylane.bind(a.echo, x))
    assert three.execute("new").get() == "new"


def test_the_same_nodes_compile_twice(workers: list[Any]) -> None:
    with raylane.InputNode() as x:
        node = raylane.bind(workers[0].echo, x)
    with raylane.compile(node) as one, raylane.compile(node) as two:
        assert (one.execute(1).get(), two.execute(2).get()) == (1, 2)


def test_wait_gives_what_is_done(workers: list[Any], graph: Compile) -> None:
    a, b = workers[:2]
    ray.get(a.hold_again.remote())
    slow, quick = graph(lambda x: raylane.bind(a.wait, x)), graph(lambda x: raylane.bind(b.echo, x))
    late, soon = slow.execute("late"), quick.execute("soon")
    assert results.wait([late, soon], timeout=30) == ([soon], [late])
    assert results.wait([late], timeout=0.05) == ([], [late])
    ray.get(a.release.remote())
    assert results.wait([late, soon], num_returns=2, timeout=30) == ([late, soon], [])
    with pytest.raises(ValueError, match="num_returns=3 of 2 results"):
        results.wait([late, soon], num_returns=3)


def test_a_graph_of_rays_own_nodes_compiles_too(workers: list[Any]) -> None:
    a, b = workers[:2]
    with dag.InputNode() as inp:
        middle = a.add.bind(inp[0], inp.k)
        one, two = b.two.bind(middle)
        node = dag.MultiOutputNode([b.echo.bind(middle), one, a.add.bind(two, 5)])
    with raylane.compile(node) as g:
        assert g.execute(1, k=2).get() == [3, 3, 9]

    @ray.remote
    def task(x: Any) -> Any:
        return x

    with pytest.raises(GraphPlanError, match=r"FunctionNode of ray.dag has no counterpart"):
        raylane.compile(task.bind(1))


def test_order_is_the_users(workers: list[Any], graph: Compile) -> None:
    a = workers[0]
    with raylane.InputNode() as x:
        bound = [raylane.bind(a.add, x, 1), raylane.bind(a.add, x, 2), raylane.bind(a.add, x, 3)]
        node = raylane.MultiOutputNode(bound)
    with raylane.compile(node, order={a: [bound[2], bound[0], bound[1]]}) as g:
        assert g.execute(0).get() == [1, 2, 3]
        assert g.plan.order[1] == (2, 0, 1)
    with pytest.raises(GraphPlanError, match="must list each of its 3 calls once"):
        raylane.compile(node, order={a: bound[:2]})


def test_decorated_methods_return_their_value_itself(ray_session: None) -> None:
    import numpy as np

    class Decorated:
        @raylane.method
        def make(self, n: int) -> Any:
            return np.ones(n)

    actor = ray.remote(num_cpus=0.1)(Decorated).remote()
    with raylane.InputNode() as x:
        node = raylane.bind(actor.make, x)
    with raylane.compile(node) as g:
        assert type(g.execute(200_000).get()) is np.ndarray
    ray.kill(actor)


def test_what_another_thread_has_read_is_there_at_once(workers: list[Any], graph: Compile) -> None:
    """A thread that finds its result done by the time it may read must not wait for the next message."""
    g = graph(lambda x: raylane.bind(workers[0].echo, x), max_inflight=2)
    result = g.execute(1)
    assert g.execute(2).get() == 2  # reads both
    assert result._done
    result._done = False  # as it was when this thread looked
    begun: list[float] = []
    wait = g._waiter.wait
    g._waiter = type("Spy", (), {"wait": lambda _, *args: begun.append(1.0) or wait(*args)})()

    class Late:
        """A lock that lets the other thread finish first."""

        def acquire(self, blocking: bool = True) -> bool:
            result._done = True
            return True

        def release(self) -> None: ...

        def locked(self) -> bool:
            return False

    lock, g._pumping = g._pumping, Late()
    assert result.get() == 1
    g._pumping = lock
    assert not begun


def test_a_lock_that_an_interrupt_left_behind_ends_the_graph_and_no_more(workers: list[Any], graph: Compile) -> None:
    from raylane.errors import GraphClosedError

    for name in ("_pumping", "_submitting"):
        g = graph(lambda x: raylane.bind(workers[0].echo, x))
        assert g.execute(1).get() == 1
        result = g.execute(2)
        getattr(g, name).acquire()  # and Ctrl-C before the next instruction
        if name == "_pumping":
            assert result.get() == 2  # its answer had come
        with pytest.raises(GraphClosedError, match="interrupted"):
            g.execute(3)
        g.teardown()


def test_later_graph_leaves_settings_of_earlier_graph(ray_session: None, graph: Compile) -> None:
    worker = ray.remote(num_cpus=0.1)(Worker).remote()
    try:
        ray.get(worker.modes.remote())  # torch is imported
        plain = graph(lambda x: raylane.bind(worker.modes, x))
        assert plain.execute(1).get() == (True, False)
        ray.get(worker.set_grad.remote(False))
        without_grad = graph(lambda x: raylane.bind(worker.modes, x))
        ray.get(worker.set_inference.remote(True))
        inference = graph(lambda x: raylane.bind(worker.modes, x))
        for _ in range(3):
            assert plain.execute(1).get() == (True, False)
            assert without_grad.execute(1).get() == (False, False)
            assert inference.execute(1).get() == (False, True)
        changed = graph(lambda x: raylane.bind(worker.set_grad, x))  # compiled under the settings of `inference`
        changed.execute(True).get()
        assert plain.execute(1).get() == (True, False)
        assert inference.execute(1).get() == (True, True)
    finally:
        ray.kill(worker)

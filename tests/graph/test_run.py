"""Graphs of every shape on a real Ray: what arrives is what ordinary calls would have given."""

from __future__ import annotations

import pickle
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import ray
from ray import dag
from tests.graph.graph_actors import Worker

import raylane
from raylane.core.deadline import Deadline
from raylane.errors import GraphClosedError, GraphFullError, GraphPlanError, GraphTimeoutError
from raylane.graph.driver import result as results

pytestmark = pytest.mark.usefixtures("clean")
Compile = Callable[..., Any]


class Opaque:
    """Travels although another process could import it only under the test's own module name."""

    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and other.x == self.x

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.claim("graphs", "unmodified Ray actors take part in a graph, with ordinary and coroutine methods")
@pytest.mark.parametrize("value", [None, 3, "text", b"bytes", {"step": 1}, [1, (2, {3: None})], Opaque(4), 1.5])
def test_a_value_goes_through_one_actor_and_back(workers: list[Any], graph: Compile, value: Any) -> None:
    g = graph(lambda x: raylane.bind(workers[0].echo, x))
    assert g.execute(value).get() == value


def test_graph_sends_values_that_need_cloudpickle(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(workers[0].echo, x))
    double = g.execute(lambda x: 2 * x).get()
    assert double(4) == 8


@pytest.mark.claim("graphs", "values go from actor to actor without the driver")
def test_a_chain_passes_values_from_actor_to_actor(workers: list[Any], graph: Compile) -> None:
    def write(x: Any) -> Any:
        for worker in workers:
            x = raylane.bind(worker.add, x, 1)
        return x

    g = graph(write)
    assert [g.execute(i).get() for i in range(50)] == [i + 4 for i in range(50)]


@pytest.mark.claim("graphs", "arguments are nodes, constants and containers of both, at any depth, also by keyword")
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


@pytest.mark.claim("graphs", "one value of a static graph reaches several calls and actors")
def test_one_value_reaches_several_calls_and_actors(workers: list[Any], graph: Compile) -> None:
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


@pytest.mark.claim("graphs", "a graph may have no input")
def test_a_graph_without_input_ticks(workers: list[Any]) -> None:
    with raylane.compile(raylane.bind(workers[0].tick)) as g:
        first = g.execute().get()
        assert [g.execute().get() for _ in range(5)] == [first + 1 + i for i in range(5)]
        with pytest.raises(TypeError, match="takes no input; execute got 1 positional"):
            g.execute(1)


@pytest.mark.claim("graphs", "calls whose result nobody reads run, and report their errors")
def test_leaf_calls_run_and_report_their_errors(
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
    assert "Worker#1.fail failed; no output needs its result" in caplog.text


@pytest.mark.claim("graphs", "edges scatter and gather lists, arrays, tensors, dicts and `BatchDict`, or take a mean")
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


@pytest.mark.claim("graphs", "`first` transfers one value, and of the others only whether they failed")
def test_first_transfers_one_value_and_counts_every_error(workers: list[Any], graph: Compile) -> None:
    a, b = workers[:2]
    g = graph(lambda x: raylane.graph.first([raylane.bind(a.echo, x), raylane.bind(b.add, x, 1)]))
    assert g.execute(1).get() == 1
    with pytest.raises(TypeError):
        g.execute("text").get()


@pytest.mark.claim("graphs", "results can be read in any order, any number of times, and waited for")
def test_results_in_any_order_any_number_of_times(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(workers[0].echo, x), max_inflight=5)
    made = [g.execute(i) for i in range(5)]
    assert [made[i].get() for i in (3, 0, 4, 1, 2, 3, 3)] == [3, 0, 4, 1, 2, 3, 3]
    assert all(result.done() for result in made)
    assert pickle.loads(pickle.dumps(made[2])) == 2  # passed on as its value
    assert graph(lambda x: raylane.bind(workers[1].add, x, 1)).execute(made[4]).get() == 5


@pytest.mark.claim("graphs", "a `get` that times out loses nothing, and the result can be read later")
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


@pytest.mark.claim("graphs", "several executions are in flight; when full, `execute` waits and `execute_nowait` raises")
def test_when_full_execute_waits_and_execute_nowait_raises(workers: list[Any], graph: Compile) -> None:
    a = workers[0]
    ray.get(a.hold_again.remote())
    g = graph(lambda x: raylane.bind(a.wait, x), max_inflight=2, timeout=0.2)
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
    assert "0 under way" in repr(g)


@pytest.mark.claim("graphs", "several threads may call `execute` of one graph")
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


@pytest.mark.claim("graphs", "several graphs live on one actor, beside ordinary calls")
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


@pytest.mark.claim("graphs", "the same nodes may be compiled into several graphs")
def test_the_same_nodes_compile_twice(workers: list[Any]) -> None:
    with raylane.InputNode() as x:
        node = raylane.bind(workers[0].echo, x)
    with raylane.compile(node) as one, raylane.compile(node) as two:
        assert (one.execute(1).get(), two.execute(2).get()) == (1, 2)


@pytest.mark.claim("graphs", "results can be read in any order, any number of times, and waited for")
def test_wait_gives_what_is_done(workers: list[Any], graph: Compile) -> None:
    a, b = workers[:2]
    ray.get(a.hold_again.remote())
    slow, quick = graph(lambda x: raylane.bind(a.wait, x)), graph(lambda x: raylane.bind(b.echo, x))
    late, soon = slow.execute("late"), quick.execute("soon")
    assert results.wait([late, soon], timeout=30) == ([soon], [late])
    assert results.wait([late], timeout=0.05) == ([], [late])
    ray.get(a.release.remote())
    assert results.wait([late, soon], num_returns=2, timeout=30) == ([late, soon], [])
    with pytest.raises(ValueError, match="num_returns must be between 1 and the number of results, 2, got 3"):
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

    with pytest.raises(GraphPlanError, match=r"cannot convert FunctionNode of ray.dag"):
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


def test_get_returns_at_once_if_another_thread_has_read(workers: list[Any], graph: Compile) -> None:
    """A thread that finds its result done by the time it may read must not wait for the next message."""
    g = graph(lambda x: raylane.bind(workers[0].echo, x), max_inflight=2)
    result = g.execute(1)
    assert g.execute(2).get() == 2  # reads both
    collector, begun = g._collector, list[float]()
    doorbell, looks = collector.doorbell, iter([False])  # as it was when this thread looked

    class Watched:
        """A doorbell that notes waits."""

        def __getattr__(self, name: str) -> Any:
            return getattr(doorbell, name)

        def wait(self, timeout_s: float) -> bool:
            begun.append(timeout_s)
            return bool(doorbell.wait(timeout_s))

    collector.doorbell = Watched()
    assert collector.collect_until(lambda: next(looks, True) and result._is_done(), Deadline(None))
    collector.doorbell = doorbell
    assert not begun


@pytest.mark.slow
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


def test_leaf_calls_of_rays_nodes_run_too(workers: list[Any]) -> None:
    a, b = workers[:2]
    calls = ray.get(b.count.remote())
    with dag.InputNode() as inp:
        middle = a.add.bind(inp[0], inp[1])
        b.echo.bind(middle)
        b.echo.bind(b.fail.bind(inp[0]))
        node = a.echo.bind(middle)
    with raylane.compile(node) as g:
        result = g.execute(1, 2)
        assert result.get() == 3
        assert [str(error.cause) for error in result.leaf_errors] == ["cannot do 1"]
        assert ray.get(b.count.remote()) == calls + 1


def test_rays_node_inside_an_object_is_refused(workers: list[Any]) -> None:
    with dag.InputNode() as inp:
        node = workers[0].describe.bind(Opaque(inp))
        assert node is not None
    with pytest.raises(GraphPlanError, match=r"InputNode of ray.dag has no value yet"):
        raylane.compile(node)


def test_wrong_number_of_returns_is_an_error(workers: list[Any], graph: Compile) -> None:
    a, b = workers[:2]

    def write(x: Any) -> Any:
        one, two = raylane.bind(a.declared_two, x)
        return raylane.MultiOutputNode([raylane.bind(b.echo, one), two])

    g = graph(write)
    assert g.execute([1, 2]).get() == [1, 2]
    for wrong in ([1, 2, 3], [1], []):
        with pytest.raises(ValueError, match=rf"declares num_returns=2 and returned {len(wrong)} values"):
            g.execute(wrong).get()
    with pytest.raises(TypeError, match="declares num_returns=2 and returned"):
        g.execute(5).get()


def test_pending_result_as_input_is_waited_for_once(workers: list[Any], graph: Compile) -> None:
    slow = graph(lambda x: raylane.bind(workers[0].wait, x), timeout=0.4)
    failing = graph(lambda x: raylane.bind(workers[2].fail, x))
    g = graph(lambda x: raylane.bind(workers[1].echo, x))
    ray.get(workers[0].hold_again.remote())
    pending = slow.execute(1)
    waits: list[float | None] = []
    wait = slow._collector.collect_until
    slow._collector.collect_until = lambda *args: (waits.append(args[1].timeout_s), wait(*args))[1]
    with pytest.raises(GraphTimeoutError, match=r"did not end within 0\.4 s"):
        g.execute([pending])
    assert waits == [0.4]
    ray.get(workers[0].release.remote())
    assert g.execute([pending]).get() == [1]
    with pytest.raises(ValueError, match="cannot do 7"):
        g.execute({"failed": failing.execute(7)})
    assert g.execute(1).get() == 1


def test_input_that_is_an_output_is_a_copy(workers: list[Any], graph: Compile) -> None:
    import numpy as np

    g = graph(lambda x: raylane.MultiOutputNode([x, raylane.bind(workers[0].echo, x)]))
    value = [1, np.zeros(5)]
    result = g.execute(value)
    value.append(2)
    value[1][:] = 7
    copy, echoed = result.get()
    assert len(copy) == len(echoed) == 2
    assert copy[1].sum() == echoed[1].sum() == 0


def test_containers_among_constants_are_new_in_each_call(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(workers[0].grow_both, [], {"deep": ([1],)}, x))
    assert [g.execute(i).get() for i in range(3)] == [[[i], {"deep": ([1, i],)}] for i in range(3)]


def test_errors_of_one_ended_graph_are_separate_objects(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(workers[0].wait, x), max_inflight=3)
    ray.get(workers[0].hold_again.remote())
    made = [g.execute(i) for i in range(3)]
    g.teardown(0.1)
    ray.get(workers[0].release.remote())
    seen = []
    for _ in range(100):
        for result in made:
            with pytest.raises(GraphClosedError) as caught:
                result.get()
            seen.append(caught.value)
    assert len({id(error) for error in seen}) == len(seen)
    assert max(len(list(traceback.walk_tb(error.__traceback__))) for error in seen) < 10


def test_result_that_is_kept_lets_its_actors_go(workers: list[Any], eventually: Callable[..., None]) -> None:
    with raylane.InputNode() as x:
        g = raylane.compile(raylane.bind(workers[0].echo, x))
    result = g.execute(5)
    assert result.get() == 5
    graph, connections = weakref.ref(g), weakref.ref(g._connections)  # which holds the handles of the actors
    del g
    eventually(lambda: graph() is None and connections() is None)
    assert result.get() == 5


def test_wait_over_graphs_does_not_poll(workers: list[Any], graph: Compile) -> None:
    ray.get([worker.hold_again.remote() for worker in workers])
    graphs = [graph(lambda x, w=worker: raylane.bind(w.wait, x)) for worker in workers]
    made = [g.execute(index) for index, g in enumerate(graphs)]
    looks = 0
    for g in graphs:
        read_all = g._collector._read_all

        def counted(read_all: Any = read_all) -> bool:
            nonlocal looks
            looks += 1
            return read_all()

        g._collector._read_all = counted
    timer = threading.Timer(0.5, lambda: ray.get(workers[2].release.remote()))
    timer.start()
    assert raylane.graph.wait(made, timeout=60) == ([made[2]], [made[0], made[1], made[3]])
    timer.join()
    assert looks < 40
    with pytest.raises(TypeError, match="wait: None is no GraphResult"):
        raylane.graph.wait([made[0], None])
    ray.get([worker.release.remote() for worker in workers])
    assert raylane.graph.wait(made, num_returns=4) == (made, [])
    assert not any(thread.name == "raylane-wait" for thread in threading.enumerate())


def test_busy_submission_is_not_called_full(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(workers[0].echo, x), max_inflight=8)
    pickling, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=g.execute, args=(Slow(pickling, go_on),))
    thread.start()
    assert pickling.wait(30)
    with pytest.raises(GraphFullError, match="another thread is submitting an execution"):
        g.execute_nowait(1)
    go_on.set()
    thread.join()
    assert g.execute(1).get() == 1


class Slow:
    """Takes its time to be pickled."""

    def __init__(self, pickling: threading.Event, go_on: threading.Event) -> None:
        self.events = pickling, go_on

    def __reduce__(self) -> Any:
        pickling, go_on = self.events
        pickling.set()
        assert go_on.wait(30)
        return int, (3,)


@pytest.mark.slow
def test_more_edges_than_descriptors_compile() -> None:
    from core.processes import start_code  # here: actors import this module, and not that one

    assert start_code(MANY_EDGES).result() == list(range(300))


MANY_EDGES = """
import os, resource
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
import ray
import raylane
from tests.graph.graph_actors import Worker
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
actor = ray.remote(num_cpus=0.1)(Worker).remote()
ray.get(actor.count.remote())
used = max(map(int, os.listdir("/proc/self/fd")))
with raylane.InputNode() as x:
    node = raylane.MultiOutputNode([raylane.bind(actor.echo, x[i]) for i in range(300)])
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 40, hard))
g = raylane.compile(node)
answer = g.execute(*range(300)).get()
g.teardown()
ray.shutdown()
"""


MB = 1 << 20


@pytest.mark.parametrize("nbytes", [2 * MB, 70 * MB, -70 * MB])
def test_large_exception_fails_its_execution_alone(workers: list[Any], graph: Compile, nbytes: int) -> None:
    first, second = workers[:2]
    direct = graph(lambda x: raylane.bind(first.fail_heavily, x), max_lent_bytes=MB)
    chain = graph(lambda x: raylane.bind(second.echo, raylane.bind(first.fail_heavily, x)), max_lent_bytes=MB)
    leaf = graph(
        lambda x: raylane.MultiOutputNode([raylane.bind(first.echo, x), raylane.bind(second.fail_heavily, x)]),
        max_lent_bytes=MB,
        fail_fast="leaves",
    )
    for g in (direct, chain, leaf):
        for _ in range(2):
            with pytest.raises(ray.exceptions.RayTaskError, match="heavy"):
                g.execute(nbytes).get(timeout=30)
            g.execute(0).get(timeout=30)

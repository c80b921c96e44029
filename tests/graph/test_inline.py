"""`backend="inline"`: what holds of a graph of actors holds of a graph of plain objects, and the other way round."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import raylane
from raylane import MultiOutputNode, bind
from raylane.errors import GraphActorDiedError, GraphClosedError, GraphPlanError, GraphValueError
from raylane.graph import first, gather, mean, scatter

Compile = Callable[..., Any]


class Stage:
    """Methods that notice who shares objects with whom."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.log: list[Any] = []

    def echo(self, x: Any) -> Any:
        return x

    def add(self, a: Any, b: Any = 0) -> Any:
        return a + b

    def append(self, x: list[Any], item: Any = "seen") -> list[Any]:
        x.append(item)
        return x

    def keep(self, x: Any) -> Any:
        self.kept.append(x)
        return x

    def same(self, x: Any, y: Any) -> bool:
        return x is y

    def is_kept(self, x: Any) -> bool:
        return x is self.kept[-1]

    def length(self, x: Any) -> int:
        return len(x)

    def note(self, what: Any, _: Any = None) -> list[Any]:
        self.log.append(what)
        return list(self.log)

    def write(self, x: Any) -> float:
        x[:] = 7
        return float(x.sum())

    def writable(self, x: Any) -> bool:
        return bool(x.flags.writeable)

    def ones(self, count: int) -> Any:
        return np.ones(count)

    def fail(self, x: Any) -> Any:
        raise ValueError(f"cannot do {x}")

    def fail_oddly(self, x: Any) -> Any:
        raise Odd(x, "odd")

    def lock(self, x: Any) -> Any:
        return threading.Lock()

    def items(self, x: Any) -> Any:
        yield x

    @ray.method(num_returns=2)
    def two(self, x: Any) -> tuple[Any, Any]:
        return x, x + 1

    def exit(self, x: Any) -> Any:
        raise SystemExit

    def as_dict(self, x: Any) -> dict[str, Any]:
        return {"loss": x, "more": [x, x + 1]}


class Odd(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)


class Poison:
    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    raise RuntimeError("no")


@pytest.fixture(scope="module")
def actors(ray_session: None) -> Iterator[list[Any]]:
    made = [ray.remote(num_cpus=0.1)(Stage).remote() for _ in range(3)]
    ray.get([actor.__ray_ready__.remote() for actor in made])
    yield made
    for actor in made:
        ray.kill(actor)
    made.clear()


@pytest.fixture(params=["inline", pytest.param("ray", marks=pytest.mark.ray)])
def stages(request: pytest.FixtureRequest) -> list[Any]:
    """Return three objects, or three actors."""
    if request.param == "inline":
        return [Stage() for _ in range(3)]
    found: list[Any] = request.getfixturevalue("actors")
    return found


@pytest.fixture
def graph(stages: list[Any]) -> Iterator[Compile]:
    """`graph(lambda x, a, b, c: ...)` compiles what the function binds."""
    made: list[Any] = []
    backend = "inline" if type(stages[0]) is Stage else "ray"

    def compile(write: Callable[..., Any], **options: Any) -> Any:
        with raylane.InputNode() as x:
            node = write(x, *stages)
        made.append(raylane.compile(node, backend=backend, **options))
        return made[-1]

    yield compile
    for one in made:
        one.teardown()


# Values


@pytest.mark.claim("graphs", '`backend="inline"` runs a graph in one process, with the same results')
def test_both_backends_do_the_same(graph: Compile) -> None:
    g = graph(lambda x, a, b, c: bind(c.add, bind(b.add, bind(a.add, x, 1), 1), b=1))
    assert [g.execute(i).get() for i in range(3)] == [3, 4, 5]
    result = g.execute(5)
    assert result.get() == result.get(timeout=1) == 8
    assert result.done()
    assert result.leaf_errors == ()


def test_inputs_containers_items_returns_and_outputs(graph: Compile) -> None:
    def write(x: Any, a: Any, b: Any, c: Any) -> Any:
        one, two = bind(a.two, x[0])
        made = bind(b.as_dict, two)
        return MultiOutputNode([bind(c.echo, [{"k": (one, made["more"][1])}, "text"]), x.name, made["loss"], one])

    assert graph(write).execute(1, name="n").get() == [[{"k": (1, 3)}, "text"], "n", 2, 1]
    with pytest.raises(TypeError, match="takes 1 positional, name=; execute got 2 positional"):
        graph(write).execute(1, 2)


def test_scatter_gather_first_mean(graph: Compile) -> None:
    def write(x: Any, *stages: Any) -> Any:
        parts = [bind(stage.echo, part) for stage, part in zip(stages, scatter(x, 3), strict=True)]
        lengths = [bind(stage.length, part) for stage, part in zip(stages, parts, strict=True)]
        return MultiOutputNode([gather(parts, axis=0), gather(parts), first(lengths), mean(lengths)])

    assert graph(write).execute([1, 2, 3, 4]).get() == [[1, 2, 3, 4], [[1, 2], [3], [4]], 2, 4 / 3]
    with pytest.raises(ValueError, match="but 3 parts are wanted"):
        graph(write).execute([1])


def test_calls_run_in_order_once_an_execution(graph: Compile, stages: list[Any]) -> None:
    def write(x: Any, a: Any, b: Any, c: Any) -> Any:
        one, two = bind(a.note, x), bind(a.note, "between")
        return MultiOutputNode([two, bind(a.note, "last"), one])

    g = graph(write)
    start = len(g.execute("x").get()[1])
    assert g.execute("y").get()[1][start:] == ["y", "between", "last"]


def test_the_users_order(graph: Compile, stages: list[Any]) -> None:
    with raylane.InputNode() as x:
        bound = [bind(stages[0].note, name, x) for name in "abc"]
    backend = "inline" if type(stages[0]) is Stage else "ray"
    order = {stages[0]: [bound[2], bound[0], bound[1]]}
    with raylane.compile(MultiOutputNode(bound), backend=backend, order=order) as g:
        assert g.execute(1).get()[1][-3:] == ["c", "a", "b"]


# Who sees whose objects


def test_the_callers_objects_are_not_touched(graph: Compile) -> None:
    g = graph(lambda x, a, b, c: MultiOutputNode([bind(a.append, x), x]))
    mine = [1]
    changed, untouched = g.execute(mine).get()
    assert (mine, changed, untouched) == ([1], [1, "seen"], [1])
    assert untouched is not mine  # it is as it was when execute was called
    result = graph(lambda x, a, b, c: MultiOutputNode([bind(a.echo, x), x])).execute(mine)
    mine.append(2)
    assert result.get() == [[1], [1]]


def test_each_reader_has_its_own(graph: Compile) -> None:
    def write(x: Any, a: Any, b: Any, c: Any) -> Any:
        made = bind(a.echo, x)
        return MultiOutputNode([bind(b.append, made, "b"), bind(c.append, made, "c"), made])

    assert graph(write).execute([]).get() == [["b"], ["c"], []]


def test_calls_of_one_object_share_what_it_received(graph: Compile) -> None:
    def write(x: Any, a: Any, b: Any, c: Any) -> Any:
        made = bind(a.echo, x)
        return MultiOutputNode([bind(b.append, made), bind(b.append, made), bind(b.same, made, made)])

    _, last, same = graph(write).execute([]).get()
    assert last == ["seen", "seen"]
    assert same is True


def test_inline_value_used_by_its_own_object_is_not_copied(graph: Compile) -> None:
    def write(x: Any, a: Any, b: Any, c: Any) -> Any:
        made = bind(a.keep, x)
        return MultiOutputNode(
            [bind(a.is_kept, made), bind(b.length, made), bind(a.append, made), bind(a.is_kept, made)]
        )

    own, sent, changed, still = graph(write).execute([1]).get()
    assert (own, sent, changed, still) == (True, 1, [1, "seen"], True)


def test_constants_belong_to_each_object(graph: Compile) -> None:
    constant: list[Any] = ["constant"]
    g = graph(
        lambda x, a, b, c: MultiOutputNode(
            [bind(a.append, constant, x), bind(b.length, constant), bind(a.same, constant, constant)]
        )
    )
    assert [g.execute(i).get() for i in range(2)] == [
        [["constant", 0], 1, True],
        [["constant", 1], 1, True],  # each call gets containers of its own
    ]
    assert constant == ["constant"]


def test_results_are_not_what_the_object_keeps(graph: Compile) -> None:
    g = graph(lambda x, a, b, c: bind(a.keep, x))
    got = g.execute([1]).get()
    got.append("changed")
    assert graph(lambda x, a, b, c: bind(a.is_kept, bind(a.keep, x))).execute([1]).get() is True
    assert g.execute([2]).get() == [2]


@pytest.mark.parametrize("count", [10, 100_000])
def test_arrays_are_writable_where_one_reads_them(graph: Compile, count: int) -> None:
    alone = graph(lambda x, a, b, c: bind(b.write, bind(a.ones, x)))
    assert alone.execute(count).get() == 7 * count

    def write(x: Any, a: Any, b: Any, c: Any) -> Any:
        made = bind(a.ones, x)
        return MultiOutputNode([bind(b.writable, made), bind(c.writable, made), made])

    one, two, array = graph(write).execute(count).get()
    assert one is two is array.flags.writeable is (count == 10)  # large ones are shared


# Errors


def test_an_error_of_a_method(graph: Compile) -> None:
    g = graph(lambda x, a, b, c: MultiOutputNode([bind(c.echo, bind(b.fail, bind(a.echo, x))), x]))
    result = g.execute(3)
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot do 3") as caught:
            result.get()
        assert isinstance(caught.value, ray.exceptions.RayTaskError)
        assert "in fail" in str(caught.value)
        assert re.search(r"Stage\S*\.fail", str(caught.value))
    assert result.done()
    with pytest.raises(ValueError, match="cannot do 4"):
        g.execute(4).get()


def test_an_error_that_cannot_travel(graph: Compile) -> None:
    with pytest.raises(ray.exceptions.RayTaskError, match=r"in fail_oddly(.|\n)*Odd: odd"):
        graph(lambda x, a, b, c: bind(a.fail_oddly, x)).execute(1).get()


def test_values_that_cannot_travel(graph: Compile) -> None:
    g = graph(lambda x, a, b, c: bind(b.echo, bind(a.echo, x)))
    with pytest.raises(GraphValueError, match="type lock cannot be pickled"):
        g.execute(threading.Lock())
    result = graph(lambda x, a, b, c: bind(b.echo, bind(a.lock, x))).execute(1)
    with pytest.raises(GraphValueError, match="type lock cannot be pickled"):
        result.get()
    assert g.execute(1).get() == 1


def test_values_that_need_not_travel_need_not_be_picklable(graph: Compile) -> None:
    g = graph(lambda x, a, b, c: bind(a.add, 0, mean([bind(a.length, [bind(a.lock, x)])])))
    assert g.execute(1).get() == 1


def test_values_that_cannot_be_unpickled(graph: Compile) -> None:
    with pytest.raises(GraphValueError, match=r"input could not be unpickled by Stage.*RuntimeError\('no'\)"):
        graph(lambda x, a, b, c: bind(a.echo, x)).execute(Poison()).get()


def test_items_that_are_not_there(graph: Compile) -> None:
    def write(x: Any, a: Any, b: Any, c: Any) -> Any:
        return bind(b.echo, bind(a.as_dict, x)["nothing"])

    with pytest.raises(KeyError, match="nothing"):
        graph(write).execute(1).get()
    with pytest.raises(TypeError, match="gather of list and int: the values must be of one kind"):
        graph(lambda x, a, b, c: gather([bind(a.echo, x), bind(b.length, x)], axis=0)).execute([1]).get()


def test_errors_of_leaves_are_kept_and_logged(graph: Compile, caplog: pytest.LogCaptureFixture) -> None:
    def write(x: Any, a: Any, b: Any, c: Any) -> Any:
        bind(b.echo, bind(a.fail, x))
        return bind(c.echo, x)

    with caplog.at_level(logging.ERROR, "raylane.graph"):
        result = graph(write).execute(1)
        assert result.get() == 1
    assert [str(error.cause) for error in result.leaf_errors] == ["cannot do 1"]
    assert "failed; no output needs its result" in caplog.text


def test_the_graph_is_checked(graph: Compile) -> None:
    with pytest.raises(
        GraphPlanError, match=r"Stage.items (in a graph: it is a generator|has num_returns='streaming')"
    ):
        graph(lambda x, a, b, c: _bound(a.items, x))
    with pytest.raises((GraphPlanError, TypeError), match=r"cannot (pickle|be pickled)"):
        graph(lambda x, a, b, c: bind(a.add, x, threading.Lock()))
    with pytest.raises((GraphPlanError, TypeError), match="has no value before an execution, so it cannot be pickled"):
        graph(lambda x, a, b, c: bind(a.add, x, {x}))


def _bound(method: Any, x: Any) -> Any:
    try:
        return bind(method, x)
    except TypeError as error:  # of an actor's method it is known when it is bound
        raise GraphPlanError(str(error)) from error


def test_after_teardown(graph: Compile) -> None:
    g = graph(lambda x, a, b, c: bind(a.echo, x))
    with g as same:
        assert same is g
        kept = g.execute(1)
        assert kept.get() == 1
    with pytest.raises(GraphClosedError, match="torn down; compile it again"):
        g.execute(2)
    with pytest.raises(GraphClosedError):
        g.execute_nowait(2)
    g.teardown()
    assert kept.get() == 1


# asyncio


def test_await(graph: Compile) -> None:
    g = graph(lambda x, a, b, c: MultiOutputNode([bind(b.echo, bind(a.echo, x)), bind(c.add, x, 1)]))

    async def use() -> Any:
        results = [g.execute(i) for i in range(2)]
        later = await g.execute_async(5)
        found = await asyncio.gather(*(_of(result) for result in [*results, later, later]))
        failing = graph(lambda x, a, b, c: bind(a.fail, x)).execute(1)
        with pytest.raises(ValueError, match="cannot do 1"):
            await failing
        return found

    assert asyncio.run(use()) == [[0, 1], [1, 2], [5, 6], [5, 6]]


async def _of(awaitable: Any) -> Any:
    return await awaitable


# Seeing


def test_inline_show_lists_calls_and_edges(graph: Compile, tmp_path: Path) -> None:
    g = graph(lambda x, a, b, c: bind(b.echo, bind(a.echo, x)), max_inflight=3)
    for i in range(5):
        g.execute(i).get()
    assert g.show().startswith("graph of 2 actors, 2 calls, 3 edges; at most 3 executions in flight")
    stats = g.stats()
    assert set(stats) == {"executions", "calls", "edges", "lent_bytes", "time", "unanswered"}
    assert stats["executions"] == {"submitted": 5, "completed": 5}
    assert {name: call["count"] for name, call in stats["calls"].items()} == {"Stage#1.echo": 5, "Stage#2.echo": 5}
    assert set(stats["calls"]["Stage#1.echo"]) == {"actor", "count", "wait_s", "compute_s", "send_s"}
    assert {name: edge["count"] for name, edge in stats["edges"].items()} == {
        "input -> Stage#1": 5,
        "Stage#1.echo -> Stage#2": 5,
        "Stage#2.echo -> driver": 5,
    }
    assert all(edge["bytes"] > 0 for edge in stats["edges"].values())
    g.draw(tmp_path / "graph.md")
    assert (tmp_path / "graph.md").read_text().startswith("```mermaid\n%% graph of ")
    assert g.trace(tmp_path / "deep" / "run.json") == []
    events = json.loads((tmp_path / "deep" / "run.json").read_text())["traceEvents"]
    assert sum(event.get("cat") == "call" for event in events) == 10


# Inline alone


class Coroutines:
    """As an asyncio actor: its calls share a loop."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.running: list[asyncio.Task[None]] = []
        self.ended = threading.Event()

    async def put(self, x: Any) -> Any:
        await asyncio.sleep(0)
        self.running.append(asyncio.create_task(self._later(x)))
        return id(asyncio.get_running_loop())

    async def _later(self, x: Any) -> None:
        await self.queue.put(x)
        try:
            await asyncio.sleep(600)
        finally:
            self.ended.set()

    async def take(self, x: Any) -> Any:
        return id(asyncio.get_running_loop()), await self.queue.get()

    async def fail(self, x: Any) -> Any:
        raise KeyError(x)

    async def cancelled(self, x: Any) -> Any:
        raise asyncio.CancelledError


def threads() -> int:
    return sum(thread.name == "raylane-inline" for thread in threading.enumerate())


def test_coroutine_methods_share_a_loop_until_teardown() -> None:
    actor, before = Coroutines(), threads()
    with raylane.InputNode() as x:
        put = bind(actor.put, x)
        node = MultiOutputNode([put, bind(actor.take, put)])
    g = raylane.compile(node, backend="inline")
    assert threads() == before
    put_on, (taken_on, got) = g.execute("x").get()
    assert (put_on, got) == (taken_on, "x")
    assert g.execute("y").get()[1] == (put_on, "y")
    assert threads() == before + 1

    async def use() -> Any:
        return (await g.execute("a"))[1][1], (await (await g.execute_async("b")))[1][1]

    assert asyncio.run(use()) == ("a", "b")  # also within a loop of the caller's
    g.teardown()
    assert actor.ended.is_set()  # what it has left running is cancelled
    assert threads() == before


def test_a_forgotten_graph_ends_its_loop(eventually: Callable[..., None]) -> None:
    actor, before = Coroutines(), threads()
    g = raylane.compile(bind(actor.put, 1), backend="inline")
    g.execute().get()
    assert threads() == before + 1
    del g
    eventually(lambda: threads() == before)


def test_errors_of_coroutines() -> None:
    actor = Coroutines()
    with raylane.compile(bind(actor.fail, "k"), backend="inline") as g, pytest.raises(KeyError, match="k"):
        g.execute().get()
    with raylane.compile(bind(actor.cancelled, "k"), backend="inline") as g, pytest.raises(CancelledError):
        g.execute().get()  # as of a future of another thread, which it is in an actor too


def test_an_object_that_exits_ends_the_graph() -> None:
    with raylane.InputNode() as x:
        node = bind(Stage().exit, x)
    g = raylane.compile(node, backend="inline")
    with pytest.raises(raylane.errors.GraphError, match=r"Stage\.exit exited its actor"):
        g.execute(1).get()
    with pytest.raises(GraphActorDiedError, match="Stage exited, and with it the graph"):
        g.execute(2)


def test_interrupts_are_the_callers() -> None:
    class Interrupted:
        def run(self, x: Any) -> Any:
            raise KeyboardInterrupt

    with raylane.InputNode() as x:
        node = bind(Interrupted().run, x)
    g = raylane.compile(node, backend="inline")
    for _ in range(2):  # and the graph is not stuck
        with pytest.raises(KeyboardInterrupt):
            g.execute(1)


def test_threads_take_turns() -> None:
    class Busy:
        def __init__(self) -> None:
            self.inside = self.overlaps = 0

        def run(self, x: Any) -> Any:
            self.inside += 1
            self.overlaps += self.inside > 1
            for _ in range(100):
                pass
            self.inside -= 1
            return x

    busy = Busy()
    with raylane.InputNode() as x:
        node = bind(busy.run, x)
    g = raylane.compile(node, backend="inline")
    wrong: list[int] = []

    def use(start: int) -> None:
        wrong.extend(i for i in range(start, start + 200) if g.execute(i).get() != i)

    users = [threading.Thread(target=use, args=(1000 * n,)) for n in range(4)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    assert not wrong
    assert busy.overlaps == 0


def test_a_result_is_passed_on_as_its_value() -> None:
    one, two = Stage(), Stage()
    with raylane.InputNode() as x:
        first_graph = raylane.compile(bind(one.add, x, 1), backend="inline")
    with raylane.InputNode() as x:
        second_graph = raylane.compile(bind(two.add, x, 10), backend="inline")
    assert second_graph.execute(first_graph.execute(1)).get() == 12
    assert repr(second_graph) == "InlineGraph(1 calls on 1 objects, ready)"


def test_any_object_takes_part() -> None:
    class Slots:
        __slots__ = ("value",)

        @classmethod
        def made(cls, x: Any) -> str:
            return cls.__name__

        @staticmethod
        def plain(x: Any) -> Any:
            return x

        def run(self, x: Any) -> Any:
            return -x

    with raylane.InputNode() as x:
        node = MultiOutputNode([bind(Slots().run, x), bind(Slots.made, x)])
    assert raylane.compile(node, backend="inline").execute(1).get() == [-1, "Slots"]
    with pytest.raises(TypeError, match="the first argument must be a method"):
        bind(Slots().plain, x)


def test_actors_and_objects_do_not_mix(actors: list[Any]) -> None:
    with pytest.raises(
        GraphPlanError, match="Stage is no actor: bind methods of actor handles, or compile with backend"
    ):
        raylane.compile(bind(Stage().note, 1))
    with pytest.raises(GraphPlanError, match="is an actor"):
        raylane.compile(bind(actors[0].note, 1), backend="inline")


@pytest.mark.parametrize("options", [{"backend": "local"}, {"max_inflight": 0}, {"max_lent_bytes": 0}])
def test_wrong_options_are_told(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        raylane.compile(bind(Stage().note, 1), **options)


def test_recompile_returns_a_new_graph_of_the_same_objects() -> None:
    stage = Stage()
    old = raylane.compile(bind(stage.keep, raylane.InputNode()), backend="inline", max_inflight=3)
    assert [old.execute(1).get(), old.recompile().execute(2).get(), stage.kept] == [1, 2, [1, 2]]

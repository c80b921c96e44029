"""Graphs whose methods raise, whose actors die, whose driver is killed, interrupted or in a hurry: what others see."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from tests.graph.drivers import start_driver
from tests.graph.graph_actors import AsyncWorker, Speechless, Worker
from tests.victims import Victims

import raylane
from raylane.core.process.watcher import watcher
from raylane.errors import (
    GraphActorDiedError,
    GraphClosedError,
    GraphError,
    GraphPlanError,
    GraphTimeoutError,
    GraphValueError,
)

# `workers` first: the leak check of `cluster` must know the actors that replace those that an earlier test has killed.
pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("workers", "cluster")]
Eventually = Callable[..., None]


@pytest.fixture(scope="module")
def pool(ray_session: None) -> Iterator[list[Any]]:
    """Start three actors for all tests of this module."""
    made = [ray.remote(num_cpus=0.1)(Worker).remote() for _ in range(3)]
    yield made
    for worker in made:
        ray.kill(worker)
    made.clear()


@pytest.fixture
def workers(pool: list[Any], victims: Victims) -> list[Any]:
    """Return three actors with the attributes of new ones. The test may kill them or keep them busy.

    An actor that does not answer any more is replaced; a new one costs seconds.
    """
    for index, worker in enumerate(pool):
        try:
            ray.get(worker.__ray_call__.remote(lambda self: self.__init__()), timeout=10)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            ray.kill(worker)
            pool[index] = victims.take(Worker, num_cpus=0.1)
    ray.get([worker.__ray_ready__.remote() for worker in pool])
    return list(pool)


def chain(workers: list[Any], *methods: str, **options: Any) -> Any:
    with raylane.InputNode() as x:
        node: Any = x
        for worker, method in zip(workers, methods, strict=False):
            node = raylane.bind(getattr(worker, method), node)
    return raylane.compile(node, **options)


def left_nothing(workers: list[Any]) -> bool:
    return not any(ray.get([worker.left.remote() for worker in workers], timeout=30))


def test_method_error_has_traceback_and_graph_continues(workers: list[Any], eventually: Eventually) -> None:
    with chain(workers, "echo", "fail", "echo") as g:
        made = [g.execute(i) for i in range(2)]
        for i, result in enumerate(made):
            with pytest.raises(ValueError, match=f"cannot do {i}") as caught:
                result.get()
            assert isinstance(caught.value, ray.exceptions.RayTaskError)
            assert "graph_actors.py" in str(caught.value)
            assert "in fail" in str(caught.value)
        with pytest.raises(ValueError, match="cannot do 0"):
            made[0].get()
    with chain(workers, "echo", "unpicklable") as g:
        with pytest.raises(GraphValueError, match="type lock cannot be pickled"):
            g.execute(1).get()
        with pytest.raises(GraphValueError, match="type lock cannot be pickled"):
            g.execute(threading.Lock())
        assert "0 under way" in repr(g)
    eventually(lambda: left_nothing(workers))


def test_any_exception_of_a_method_fails_only_its_call(workers: list[Any]) -> None:
    with chain(workers, "fail_strangely", "echo", timeout=20) as g:
        for how in ("two arguments", "no pickle", "another graph"):
            with pytest.raises(ray.exceptions.RayTaskError, match="in fail_strangely") as caught:
                g.execute(how).get()
            assert isinstance(caught.value, GraphClosedError) == (how == "another graph")
        with pytest.raises(ray.exceptions.RayTaskError, match="no pickle"):
            g.execute("result").get()
        assert g.execute("well").get() == "well"


class Poison:
    """Pickles well, and cannot be unpickled."""

    def __init__(self, error: type[BaseException] = RuntimeError) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return _explode, (self.error,)


def _explode(error: type[BaseException]) -> None:
    raise error("no")


def test_value_that_cannot_be_unpickled_fails_its_execution(workers: list[Any]) -> None:
    with chain(workers, "echo") as g:
        with pytest.raises(GraphValueError, match="input could not be unpickled by Worker"):
            g.execute(Poison()).get()
        with pytest.raises(GraphValueError, match="input could not be unpickled by Worker"):
            g.execute(Poison(SystemExit)).get()
        assert g.execute(1).get() == 1


@pytest.mark.claim("graphs", "the death of an actor ends its graph, not the other actors")
@pytest.mark.tour
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_actor_ends_the_graph_but_not_other_actors(
    workers: list[Any], victim: int, eventually: Eventually
) -> None:
    g = chain(workers, "wait", "echo", "echo", max_inflight=2)
    made = [g.execute(i) for i in range(2)]
    pid = ray.get(workers[victim].pid.remote())
    answered = threading.Event()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            made[0].get(timeout=60)
        except BaseException as error:
            errors.append(error)
        answered.set()

    thread = threading.Thread(target=wait)
    thread.start()
    os.kill(pid, signal.SIGKILL)
    assert answered.wait(10)
    thread.join()
    assert isinstance(errors[0], GraphActorDiedError)
    assert errors[0].fields["actor"] == workers[victim]._actor_id.hex()
    with pytest.raises(GraphActorDiedError, match="its other actors keep running"):
        made[1].get()
    with pytest.raises(GraphActorDiedError):
        g.execute(3)
    ray.get([worker.release.remote() for i, worker in enumerate(workers) if i != victim])
    g.teardown()
    living = [worker for i, worker in enumerate(workers) if i != victim]
    eventually(lambda: left_nothing(living))
    with chain(living, "echo", "echo") as again:
        assert again.execute(5).get() == 5
    with pytest.raises(GraphActorDiedError, match="is dead"):
        chain([workers[victim]], "echo")


def error_of(g: Any) -> BaseException | None:
    try:
        g.execute(2).get(timeout=30)
    except GraphError as error:
        return error
    return None


def test_a_method_that_exits_its_actor_ends_the_graph(workers: list[Any], eventually: Eventually) -> None:
    with chain(workers, "echo", "exit") as g:
        with pytest.raises(GraphError, match=r"exited its actor|ended, and with it"):
            g.execute(1).get(timeout=30)
        eventually(lambda: isinstance(error_of(g), GraphActorDiedError))


def test_awaiting_tasks_learn_of_a_death(workers: list[Any]) -> None:
    import asyncio

    g = chain(workers, "echo", "wait")

    async def use() -> None:
        result = g.execute(1)
        task = asyncio.create_task(_awaited(result))
        await asyncio.sleep(0)
        os.kill(await workers[1].pid.remote(), signal.SIGKILL)
        with pytest.raises(GraphActorDiedError):
            await asyncio.wait_for(task, 10)

    asyncio.run(use())
    g.teardown()


async def _awaited(result: Any) -> Any:
    return await result


def killed(worker: Any) -> None:
    """Kill the actor's process and wait until it has ended."""
    pid = ray.get(worker.pid.remote())
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([pidfd], [], [], 30)[0]
    os.close(pidfd)


@pytest.mark.slow
@pytest.mark.parametrize("readers", ["driver", "actor"])
def test_death_of_a_lender_is_no_value_error(workers: list[Any], readers: str, eventually: Eventually) -> None:
    """The memory of a message that was sent, and not read yet, goes with its sender."""
    a, b, c = workers
    with raylane.InputNode() as x:
        made = raylane.bind(a.ones, x)
        y = made if readers == "driver" else raylane.bind(b.record, made=made, waited=raylane.bind(c.wait, x))
    g = raylane.compile(y)
    result = g.execute(100_000)
    label = "Worker.ones" if readers == "driver" else "Worker#1.ones"
    eventually(lambda: g.stats()["calls"][label]["count"])
    killed(a)
    ray.get(c.release.remote())
    for _ in range(2):
        with pytest.raises(GraphActorDiedError, match=r"Worker.* ended") as caught:
            result.get(timeout=30)
        assert caught.value.fields["actor"] == a._actor_id.hex()
    g.teardown()


@pytest.mark.claim("graphs", "teardown ends within a bounded time, also with work in flight")
def test_teardown_with_work_in_flight(workers: list[Any], eventually: Eventually) -> None:
    g = chain(workers, "echo", "wait", max_inflight=3)
    made = [g.execute(i) for i in range(3)]
    g.teardown(timeout=0.2)  # an actor is busy: it is not waited for longer
    for result in made:
        with pytest.raises(GraphClosedError, match="torn down"):
            result.get()
    with pytest.raises(GraphClosedError):
        g.execute(1)
    g.teardown()
    ray.get(workers[1].release.remote())
    eventually(lambda: left_nothing(workers))
    assert ray.get(workers[0].add.remote(1, 2)) == 3


def test_a_forgotten_graph_lets_go(workers: list[Any], eventually: Eventually) -> None:
    import gc

    g = chain(workers, "echo", "echo")
    assert g.execute(1).get() == 1
    del g
    gc.collect()
    eventually(lambda: left_nothing(workers))
    eventually(lambda: not len(watcher))


def test_a_compilation_that_fails_half_way_undoes_the_rest(workers: list[Any], eventually: Eventually) -> None:
    with raylane.InputNode() as x:
        node = raylane.bind(workers[1].add, raylane.bind(workers[0].echo, x), 1)
    node.method = "no_such_method"
    with pytest.raises(GraphPlanError, match="Worker has no method 'no_such_method'; it has add, count"):
        raylane.compile(node)
    eventually(lambda: left_nothing(workers))
    busy = workers[2].wait.remote()
    with pytest.raises(GraphTimeoutError, match="is running a long method"):
        chain(workers, "echo", "echo", "echo", timeout=0.5)
    ray.kill(workers[2])
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(busy)
    eventually(lambda: left_nothing(workers[:2]))


def test_compile_says_which_actor_has_not_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = ray.remote(resources={"of no node": 1})(Worker).remote()
    node = raylane.bind(nowhere.count)
    monkeypatch.setattr("raylane.graph.api.START_S", 0.5)
    monkeypatch.setattr("raylane.core.deadline.WORD_S", 0.2)
    with pytest.raises(GraphTimeoutError, match=r"within 0.5 s: it has not started \(its state in Ray: [A-Z_]+\)"):
        raylane.compile(node)
    assert "Worker has not answered: it has not started (its state in Ray: " in caplog.text
    with pytest.raises(GraphTimeoutError, match=r"within 0.1 s: it has not started"):
        raylane.compile(node, timeout=0.1)
    ray.kill(nowhere)


def test_ctrl_c_during_get_loses_nothing(workers: list[Any]) -> None:
    g = chain(workers, "wait")
    result = g.execute("kept")
    timer = threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        result.get(timeout=30)
    timer.join()
    workers[0].release.remote()
    assert result.get(timeout=30) == "kept"
    assert g.execute("more").get(timeout=30) == "more"
    g.teardown()


@pytest.mark.claim("graphs", "Ctrl-C anywhere leaves a graph usable or cleanly ended")
def test_ctrl_c_anywhere_leaves_the_graph_usable_or_cleanly_dead(workers: list[Any], eventually: Eventually) -> None:
    main = threading.main_thread().ident
    assert main is not None
    for seed in range(40):
        g = chain(workers, "echo", "echo")
        begun, stop = threading.Event(), threading.Event()

        def interrupt(begun: threading.Event = begun, stop: threading.Event = stop, seed: int = seed) -> None:
            begun.wait()  # before that, nothing would catch the KeyboardInterrupt
            time.sleep(0.001 + seed * 0.0003)
            if not stop.is_set():
                signal.pthread_kill(main, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            try:
                begun.set()
                for i in range(1_000_000):
                    g.execute(i).get()
            finally:
                stop.set()
        except KeyboardInterrupt:
            pass
        thread.join()
        try:
            answer = g.execute("after").get(timeout=20)
        except GraphClosedError as error:
            answer = str(error)
        assert answer == "after" or "interrupted" in answer
        g.teardown()
    eventually(lambda: left_nothing(workers))


def test_ctrl_c_right_after_reading_leaves_the_lock_free(workers: list[Any]) -> None:
    """Python looks for signals where a function begins: so none may begin before the lock is free."""
    g = chain(workers, "echo")
    result = g.execute(1)
    g._collector.missed_wake = True  # so that something is called after reading

    def interrupt(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is type(g._collector)._after_reading.__code__:
            sys.settrace(None)
            raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            result.get()
    finally:
        sys.settrace(before)
    assert not g._collector._section.locked
    assert (result.get(), g.execute(2).get(timeout=20)) == (1, 2)
    g.teardown()


CHECK = "assert result.get() == 1"
FORKING = """
    import os, sys
    import ray
    ray.init(address={address!r}, namespace={namespace!r}, log_to_driver=False, logging_level="error")
    import numpy as np, raylane
    one = ray.get_actor("one")
    with raylane.InputNode() as x:
        node = raylane.bind(one.ones, x)
    g = raylane.compile(node)
    kept = [g.execute(100_000).get() for _ in range(3)]
    with raylane.InputNode() as x:
        waiting = raylane.compile(raylane.bind(one.wait, x))
    array = raylane.empty(100_000, np.float32)
    pending = [waiting.execute(array) for _ in range(2)]  # the second message stays unread for now
    child = os.fork()
    if child == 0:
        try:
            g.execute(1)
        except raylane.errors.GraphClosedError as error:
            print(error, flush=True)
        kept.clear()  # the parent's lease must not end here
        g.teardown()
        waiting.teardown()  # nor take what the actor has still to read
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    ray.get(one.release.remote())
    assert [len(result.get(timeout=60)) for result in pending] == [100_000] * 2
    waiting.teardown()
    more = [g.execute(100_000).get() * 0 for _ in range(3)]  # would reuse memory that the child had given back
    assert [float(array.sum()) for array in kept] == [100_000.0] * 3
    print("still", len(g.stats()["calls"]), flush=True)
    result = raylane.compile(node).execute(100_000)  # only the result refers to this graph
    child = os.fork()
    if child == 0:
        try:
            result.get()
        except raylane.errors.GraphClosedError as error:
            print("dropped:", error, flush=True)
        del result
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert float(result.get().sum()) == 100_000.0
"""


@pytest.mark.claim("graphs", "the end of the driver tears its graphs down, and a forked child has no part in them")
@pytest.mark.slow
def test_a_forked_child_has_no_part_in_the_graph(detached: Any) -> None:
    namespace, _ = detached
    code = textwrap.dedent(FORKING).format(address=ray.get_runtime_context().gcs_address, namespace=namespace)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr
    assert "this process was forked" in done.stdout
    assert "still 1" in done.stdout
    assert "dropped: this process was forked" in done.stdout


@pytest.fixture
def detached(cluster: None) -> Iterator[tuple[str, list[Any]]]:
    """Two detached actors, which outlive any driver, and their namespace."""
    namespace = uuid.uuid4().hex
    actor = ray.remote(num_cpus=0.1)(Worker)
    made = [actor.options(name=name, namespace=namespace, lifetime="detached").remote() for name in ("one", "two")]
    ray.get([worker.__ray_ready__.remote() for worker in made])
    yield namespace, made
    for worker in made:
        ray.kill(worker)
    made.clear()


@pytest.mark.claim("graphs", "detached actors take part in graphs, and leave one whose driver was killed")
def test_actors_leave_a_graph_whose_driver_was_killed(detached: Any, eventually: Eventually) -> None:
    namespace, workers = detached
    driver = start_driver(namespace, "keep", "echo", check=CHECK, end="time.sleep(600)")
    assert any(ray.get([worker.left.remote() for worker in workers]))
    driver.kill()
    driver.communicate()
    ray.get(workers[0].drop.remote())
    eventually(lambda: left_nothing(workers), within_s=5)
    with chain(workers, "echo", "echo") as g:  # and serve the next one
        assert g.execute(1).get() == 1


@pytest.mark.claim("graphs", "the end of the driver tears its graphs down, and a forked child has no part in them")
@pytest.mark.slow
def test_driver_that_ends_tears_its_graphs_down(detached: Any, eventually: Eventually) -> None:
    namespace, workers = detached
    driver = start_driver(namespace, "keep", "echo", check=CHECK)
    said, _ = driver.communicate(timeout=60)
    assert driver.returncode == 0, said
    assert not said.strip()
    ray.get(workers[0].drop.remote())
    eventually(lambda: left_nothing(workers))

    driver = start_driver(namespace, "keep", "wait", end="result.get()")
    driver.send_signal(signal.SIGINT)
    said, _ = driver.communicate(timeout=60)
    assert "KeyboardInterrupt" in said
    ray.get(workers[1].release.remote())
    ray.get(workers[0].drop.remote())
    eventually(lambda: left_nothing(workers))


FILL = (
    "h = raylane.compile(raylane.bind(one.ones, 125_000), max_lent_bytes=5 << 19, timeout=600); "
    "kept = [h.execute().get(), h.execute().get()]; waiting = h.execute()"
)


@pytest.mark.slow
def test_lane_without_memory_leaves_a_killed_driver(detached: Any, eventually: Eventually) -> None:
    namespace, workers = detached
    driver = start_driver(namespace, "echo", "echo", check=FILL, end="time.sleep(600)")
    driver.kill()
    driver.communicate()
    eventually(lambda: left_nothing(workers), within_s=10)


@pytest.mark.parametrize("kind", ["plain", "asyncio", "coroutine"])
def test_exit_of_an_actor_fails_all_results_at_once(workers: list[Any], kind: str) -> None:
    """Ray needs seconds to end an actor that has asked for it: nobody waits for that."""
    cls = {"plain": Worker, "asyncio": AsyncWorker, "coroutine": AsyncWorker}[kind]
    worker = ray.remote(num_cpus=0.1)(cls).remote()
    exit = worker.exit_coroutine if kind == "coroutine" else worker.exit
    with raylane.InputNode() as x:
        node = raylane.MultiOutputNode([raylane.bind(exit, x), raylane.bind(workers[0].wait, x)])
    g = raylane.compile(node, max_inflight=3)
    made = [g.execute(i) for i in range(3)]
    with pytest.raises(GraphError, match=r"exited its actor|ended, and with it the graph"):
        made[0].get(timeout=20)
    for result in made[1:]:
        with pytest.raises(GraphActorDiedError, match="ended, and with it the graph"):
            result.get(timeout=20)
    ray.get(workers[0].release.remote())
    g.teardown()
    ray.kill(worker)


def test_error_that_cannot_be_shown_fails_its_execution_alone(workers: list[Any]) -> None:
    with chain(workers, "echo") as other, chain(workers, "echo") as g:
        with pytest.raises(GraphValueError, match="input could not be unpickled by Worker: Speechless"):
            g.execute(Poison(Speechless)).get(timeout=30)
        assert g.execute(1).get() == other.execute(1).get() == 1
    with chain(workers, "poison") as g:
        with pytest.raises(GraphValueError, match="could not be unpickled by the driver: Speechless"):
            g.execute(1).get(timeout=30)
        assert g.execute(0).get(timeout=30) == 0

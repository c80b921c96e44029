"""Graphs that are repaired while they run: actors end by SIGKILL, and Ray restarts them."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from tests.graph.graph_actors import Worker
from tests.victims import Victims

import raylane
from raylane import MultiOutputNode, bind
from raylane.errors import GraphActorDiedError, GraphClosedError, GraphFullError, GraphPlanError, GraphTimeoutError
from raylane.graph import allreduce
from raylane.graph.driver.repair import Repairer
from raylane.graph.driver.repair_states import RepairState
from raylane.testing.leaks import descriptors

# `workers` first: the leak check of `cluster` must know the actors.
pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.usefixtures("workers", "cluster")]
Eventually = Callable[..., None]


@pytest.fixture(scope="module")
def pool(ray_session: None) -> Iterator[list[Any]]:
    """Start the four actors of this module, which Ray restarts whenever they die."""
    made = [ray.remote(num_cpus=0.1)(Worker).options(max_restarts=-1).remote() for _ in range(4)]
    yield made
    for worker in made:
        ray.kill(worker)
    made.clear()


@pytest.fixture
def workers(pool: list[Any]) -> Iterator[list[Any]]:
    """Return the four actors with the attributes of new ones. Fail if a graph leaves something in them."""
    for worker in pool:
        answer_of(worker, "__ray_call__", lambda self: self.__init__())
    yield list(pool)
    for worker in pool:  # the attributes may keep arrays
        answer_of(worker, "__ray_call__", lambda self: self.__init__())
    deadline = time.monotonic() + 30
    while any(left := [answer_of(worker, "left") for worker in pool]):
        assert time.monotonic() < deadline, f"left in the actors: {left}"
        time.sleep(0.05)


def answer_of(worker: Any, method: str, *args: Any) -> Any:
    """Return the answer of an ordinary call, as soon as Ray has restarted the actor."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return ray.get(getattr(worker, method).remote(*args), timeout=60)
        except ray.exceptions.RayActorError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def pid_of(worker: Any) -> int:
    return int(answer_of(worker, "pid"))


def kill(*workers: Any) -> None:
    for pid in [pid_of(worker) for worker in workers]:
        os.kill(pid, signal.SIGKILL)


def compiled(write: Callable[[Any], Any], **options: Any) -> Any:
    with raylane.InputNode() as x:
        node = write(x)
    return raylane.compile(node, **{"on_death": "repair", "timeout": 60, **options})


def chain(workers: list[Any], *methods: str, **options: Any) -> Any:
    def write(x: Any) -> Any:
        for worker, method in zip(workers, methods, strict=False):
            x = bind(getattr(worker, method), x)
        return x

    return compiled(write, **options)


def state_of(g: Any) -> RepairState:
    state: RepairState = g._repairer.state
    return state


def until(g: Any, state: RepairState, eventually: Eventually) -> None:
    """Wait until the repair of a graph is in this state."""
    eventually(lambda: state_of(g) is state, within_s=60)


def fails(result: Any, *workers: Any) -> None:
    """Check that a result fails because of one of these actors."""
    with pytest.raises(
        GraphActorDiedError, match=r"ended during this execution.*execute again.*graph\.replace"
    ) as death:
        result.get()
    assert death.value.fields["actor"] in [worker._actor_id.hex() for worker in workers]


def value_of(g: Any, x: Any) -> Any:
    """Return the value of the first execution that does not fail because of a death."""
    while True:
        try:
            return g.execute(x).get()
        except GraphActorDiedError as error:
            if "ended during this execution" not in str(error):
                raise


def sent_by(g: Any, member: int) -> int:
    """Return the number of calls of an actor whose results were sent."""
    tasks = g._connections.control.ask(member, "stats")["tasks"]
    return min(task["count"] for task in tasks.values())


@pytest.mark.claim("graphs", 'with `on_death="repair"` a graph continues after Ray has restarted a dead actor')
def test_repair_fails_what_needs_the_actor_and_continues(workers: list[Any]) -> None:
    with chain(workers, "echo", "wait_unless", "echo", max_inflight=2) as g:
        assert [g.execute(1).get() for _ in range(5)] == [1] * 5
        pending = [g.execute(i) for i in (0, 2)]
        kill(workers[1])
        for result in pending:
            fails(result, workers[1])
        assert [g.execute(1).get() for _ in range(5)] == [1] * 5
        stats = g.stats()
        assert stats["executions"] == {"submitted": 12, "completed": 12}
        assert [edge["count"] for edge in stats["edges"].values()] == [12, 5, 10, 12]  # of processes that live
        # The others are the same processes as before.
        assert [answer_of(workers[i], "count") for i in (0, 2)] == [12, 10]


def test_repair_completes_what_the_dead_actor_has_sent(workers: list[Any], eventually: Eventually) -> None:
    with chain(workers, "echo", "wait_unless", "echo", max_inflight=2) as g:
        pending = [g.execute(i) for i in (0, 2)]
        eventually(lambda: sent_by(g, 1) == 2)
        kill(workers[0])
        eventually(lambda: state_of(g) is not RepairState.INTACT)
        with pytest.raises(GraphFullError, match="Worker#1 ended"):
            g.execute_nowait(1)
        answer_of(workers[1], "release")
        assert [result.get() for result in pending] == [0, 2]
        assert [g.execute(i).get() for i in range(5)] == list(range(5))


def test_repair_waits_for_a_busy_writer_of_the_actor(workers: list[Any], eventually: Eventually) -> None:
    with chain(workers, "wait_unless", "echo", max_inflight=2) as g:
        pending = [g.execute(i) for i in (0, 2)]
        kill(workers[1])
        # At once, although the first actor is still busy with these executions.
        for result in pending:
            fails(result, workers[1])
        until(g, RepairState.OPENING, eventually)
        with pytest.raises(GraphFullError, match="Worker#2 was restarted, and its channels are not open yet"):
            g.execute_nowait(1)
        answer_of(workers[0], "release")
        assert [g.execute(i).get() for i in range(5)] == list(range(5))


def test_repair_reports_only_failures_that_the_output_needs(workers: list[Any], eventually: Eventually) -> None:
    def write(x: Any) -> Any:
        bind(workers[1].wait_unless, x)  # nobody reads this result
        return bind(workers[0].echo, x)

    with compiled(write) as g:
        result = g.execute(0)
        assert not answer_of(workers[1], "count")
        kill(workers[1])
        assert result.get() == 0
        assert [type(error) for error in result.leaf_errors] == [GraphActorDiedError]
        assert g.execute(1).get() == 1


def test_repair_after_a_death_during_the_repair(workers: list[Any], eventually: Eventually) -> None:
    with chain(workers, "echo", "echo", "wait_unless") as g:
        result = g.execute(0)
        kill(workers[1], workers[2])
        fails(result, workers[1], workers[2])
        until(g, RepairState.AWAITING, eventually)
        kill(workers[0])
        first = pid_of(workers[1])
        os.kill(first, signal.SIGKILL)  # before or after it has joined
        assert pid_of(workers[1]) != first
        assert value_of(g, 1) == 1
        assert [g.execute(1).get() for _ in range(5)] == [1] * 5


def test_repair_of_two_graphs_that_share_the_actor(workers: list[Any]) -> None:
    with chain(workers, "echo", "wait_unless", "echo") as one, chain(workers[1:4:2], "wait_unless", "echo") as two:
        assert (one.execute(1).get(), two.execute(1).get()) == (1, 1)
        pending = [one.execute(0), two.execute(0)]
        kill(workers[1])
        for result in pending:
            fails(result, workers[1])
        assert [one.execute(1).get() + two.execute(1).get() for _ in range(5)] == [2] * 5


def test_repair_of_a_collective(workers: list[Any]) -> None:
    with compiled(lambda x: MultiOutputNode(allreduce.bind([bind(w.echo, x) for w in workers[:3]]))) as g:
        assert [value.tolist() for value in g.execute(np.ones(2)).get()] == [[3, 3]] * 3
        kill(workers[2])
        for number in range(6):
            try:
                values = g.execute(np.full(2, number)).get()
            except GraphActorDiedError:
                assert number < 2
            else:
                assert [value.tolist() for value in values] == [[3 * number] * 2] * 3


def test_repair_lets_asyncio_run(workers: list[Any]) -> None:
    async def use(g: Any) -> tuple[list[int], int]:
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0.01)

        beating = asyncio.create_task(beat())
        assert await (await g.execute_async(1)) == 1
        pending = [await g.execute_async(i) for i in (0, 2)]
        await asyncio.to_thread(kill, workers[1])
        for result in pending:
            with pytest.raises(GraphActorDiedError):
                await result
        before = beats
        values = [await (await g.execute_async(1)) for _ in range(3)]
        beating.cancel()
        return values, beats - before

    with chain(workers, "echo", "wait_unless", max_inflight=2) as g:
        values, beats = asyncio.run(use(g))
        assert values == [1, 1, 1]
        assert beats > 1


def test_repair_frees_memory_that_the_dead_actor_kept(workers: list[Any]) -> None:
    array = np.ones(100_000)
    with (
        chain(workers, "ones", "keep", max_lent_bytes=1 << 20) as from_actor,
        chain(workers[1:2], "keep", max_lent_bytes=1 << 20) as from_driver,
    ):
        assert from_actor.execute(array.size).get() == 1
        assert from_driver.execute(array).get() == 2
        # The actor keeps an array of each sender, so a second one cannot be sent.
        blocked = from_actor.execute(array.size)
        with pytest.raises(GraphFullError, match="readers keep arrays"):
            from_driver.execute_nowait(array)
        kill(workers[1])
        fails(blocked, workers[1])
        assert value_of(from_driver, array) == 1
        assert from_actor.execute(array.size).get() == 2


def test_repair_keeps_arrays_of_a_dead_actor(workers: list[Any]) -> None:
    with chain(workers, "ones", "echo") as g:
        kept = g.execute(100_000).get()
        kill(workers[0], workers[1])
        assert kept.sum() == value_of(g, 100_000).sum() == 100_000


def test_repair_takes_back_unread_arrays_of_empty(workers: list[Any], eventually: Eventually) -> None:
    array = raylane.empty(1 << 17, np.float64)
    array[:] = 1
    with chain([workers[0]] * 2, "echo", "wait", max_inflight=2) as g:
        pending = [g.execute(array) for _ in range(2)]
        eventually(lambda: answer_of(workers[0], "count"))  # the first message is open, the second is unread
        assert not raylane.is_free(array)
        kill(workers[0])
        for result in pending:
            fails(result, workers[0])
        answer_of(workers[0], "release")
        assert g.execute(1).get() == 1
        assert raylane.is_free(array)


def test_repair_opens_only_channels_of_the_actor(workers: list[Any]) -> None:
    with chain(workers, "echo", "echo", "echo", "echo") as g:
        assert g.execute(1).get() == 1
        pids = [pid_of(worker) for worker in workers]
        before = [answer_of(worker, "left") for worker in workers]
        of_driver = descriptors()
        kill(workers[0])
        assert value_of(g, 1) == 1
        after = [answer_of(worker, "left") for worker in workers]
        assert [pid_of(worker) for worker in workers[1:]] == pids[1:]
        assert after[2:] == before[2:]  # no neighbours: descriptors and mappings at the same places
        assert len(after[1]) == len(before[1])
        assert len(descriptors()) == len(of_driver)


def test_repair_halts_if_ray_does_not_restart_the_actor(victims: Victims, workers: list[Any]) -> None:
    victim = victims.take(Worker)
    with chain([workers[0], victim], "echo", "wait_unless") as g:
        result = g.execute(0)
        kill(victim)
        fails(result, victim)
        for _ in range(2):
            with pytest.raises(
                GraphActorDiedError, match=r"Worker#2 is dead, and Ray does not.*graph\.replace"
            ) as death:
                g.execute(1)
            assert death.value.fields["actor"] == victim._actor_id.hex()
        with pytest.raises(GraphActorDiedError, match="does not restart"):
            g.execute_nowait(1)
        with pytest.raises(GraphActorDiedError, match="does not restart"):
            asyncio.run(g.execute_async(1))


def test_repair_halts_after_an_exit_of_the_actor(victims: Victims, workers: list[Any]) -> None:
    victim = victims.take(Worker)
    with chain([workers[0], victim], "echo", "exit") as g:
        with pytest.raises(raylane.errors.GraphError, match="Worker#2"):
            g.execute(0).get()
        with pytest.raises(GraphActorDiedError, match="Worker#2 is dead, and Ray does not restart it"):
            value_of(g, 0)


class Leaver(Worker):
    def exit_unless(self, x: Any) -> Any:
        return x if x == 1 else self.exit(x)


def test_repair_after_an_exit_with_others_in_flight(victims: Victims, workers: list[Any]) -> None:
    old, new = (victims.take(Leaver) for _ in range(2))
    with chain([old, workers[0]], "exit_unless", "echo", max_inflight=3) as g:
        exited, *others = [g.execute(i) for i in (0, 1, 1)]
        with pytest.raises(raylane.errors.GraphError, match="exited its actor"):
            exited.get()
        for result in others:  # at once, although the process lives some seconds longer
            fails(result, old)
        g.replace(old, new)
        assert [g.execute(1).get() for _ in range(5)] == [1] * 5
        assert sent_by(g, 1) == 5


def test_repair_lets_no_order_into_a_new_channel(workers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with chain(workers, "echo", "echo") as g:
        control = g._connections.control
        replace = control.replace

        def ask_and_replace(member: int, *channel: Any) -> None:
            with pytest.raises(GraphActorDiedError):
                control.ask(member, "stats", timeout_s=1)
            replace(member, *channel)

        monkeypatch.setattr(control, "replace", ask_and_replace)
        kill(workers[1])
        assert value_of(g, 1) == 1
        assert isinstance(control.ask(2, "trace"), list)
        assert sent_by(g, 2) == 1


def test_repair_of_an_early_death(workers: list[Any], monkeypatch: pytest.MonkeyPatch, eventually: Eventually) -> None:
    create = Repairer.__init__

    def kill_and_create(self: Repairer, owner: Any, connections: Any, *rest: Any) -> None:
        kill(workers[1])
        eventually(lambda: connections.control.dead, within_s=60)
        create(self, owner, connections, *rest)

    monkeypatch.setattr(Repairer, "__init__", kill_and_create)
    with chain(workers, "echo", "echo") as g:
        assert value_of(g, 1) == 1


def test_execute_times_out_while_the_graph_is_repaired(workers: list[Any], eventually: Eventually) -> None:
    with chain(workers, "wait_unless", "echo", timeout=3) as g:
        result = g.execute(0)
        kill(workers[1])
        fails(result, workers[1])
        eventually(lambda: state_of(g) is not RepairState.SETTLING)
        # The first actor is busy, so the channels cannot be opened; or Ray takes longer than the limit.
        with pytest.raises((GraphTimeoutError, GraphActorDiedError), match="Worker#2 was"):
            g.execute(1)
        answer_of(workers[0], "release")


@pytest.mark.parametrize("how", ["teardown", "drop"])
def test_repair_ends_with_its_graph(workers: list[Any], how: str, eventually: Eventually) -> None:
    g = chain(workers, "echo", "wait_unless")
    result = g.execute(0)
    kill(workers[1])
    fails(result, workers[1])
    until(g, RepairState.AWAITING, eventually)
    if how == "teardown":
        g.teardown()
        with pytest.raises(GraphClosedError, match="torn down"):
            g.execute(1)
    del g, result
    gc.collect()
    assert answer_of(workers[1], "count") == 0


def test_fork_during_a_repair_leaves_the_child_an_ended_graph(workers: list[Any], eventually: Eventually) -> None:
    with chain(workers, "echo", "wait_unless") as g:
        result = g.execute(0)
        kill(workers[1])
        fails(result, workers[1])
        until(g, RepairState.AWAITING, eventually)
        child = os.fork()
        if not child:
            code = 1
            try:
                g.execute(1)
            except GraphClosedError:
                g.teardown()
                code = 0
            finally:
                os._exit(code)
        eventually(lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT), within_s=30)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert g.execute(1).get() == 1


def test_compile_refuses_graphs_that_cannot_be_repaired(workers: list[Any]) -> None:
    with pytest.raises(ValueError, match="on_death must be 'end' or 'repair', got 'restart'"):
        chain(workers, "echo", on_death="restart")
    with pytest.raises(GraphPlanError, match=r"on_death='repair' needs.*Worker#1\.echo has 'tcp'"):
        compiled(lambda x: bind(workers[1].echo, bind(workers[0].echo, x).with_tensor_transport("tcp")))


class Other:
    """Actor without the methods that the graphs call."""

    def nothing(self) -> None:
        return


@pytest.mark.claim("graphs", "an actor that Ray does not restart can be replaced in a running graph")
def test_replace_lets_the_graph_continue(victims: Victims, workers: list[Any]) -> None:
    for victim in (old := [victims.take(Worker) for _ in range(2)]):
        answer_of(victim, "count")
    with chain([workers[0], *old], "echo", "wait_unless", "echo") as g:
        with pytest.raises(raylane.errors.GraphError, match=r"replace: Worker#2 runs, or Ray has restarted it"):
            g.replace(old[0], workers[1])
        with pytest.raises(GraphPlanError, match="the old actor is not in the graph"):
            g.replace(workers[3], workers[1])
        result = g.execute(0)
        kill(*old)
        fails(result, *old)
        with pytest.raises(GraphPlanError, match="Worker is in the graph already, in another place"):
            g.replace(old[0], workers[0])
        g.replace(old[0], workers[1])
        with pytest.raises(GraphActorDiedError, match="Worker#3 is dead") as death:
            g.execute(1)
        assert death.value.fields["actor"] == old[1]._actor_id.hex()
        g.replace(old[1], workers[2])
        assert [g.execute(1).get() for _ in range(5)] == [1] * 5
        kill(workers[1])  # the new one, which Ray restarts
        assert value_of(g, 1) == 1
        with g.recompile() as again:
            assert again.execute(1).get() == 1


def test_replace_by_an_unfit_actor_raises_and_can_be_repeated(victims: Victims, workers: list[Any]) -> None:
    old, unfit, dead = victims.take(Worker), victims.take(Other), victims.take(Worker)
    pids = [pid_of(old), pid_of(dead)]
    with chain([workers[0], old], "echo", "add") as g:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(GraphActorDiedError):
            value_of(g, 1)
        with pytest.raises(GraphPlanError, match="Other has no method 'add'"):
            g.replace(old, unfit)
        with pytest.raises(GraphPlanError, match="Other has no method 'add'"):
            g.execute(1)
        with pytest.raises(GraphActorDiedError, match="Worker#2 is dead"):
            g.replace(old, dead)
        g.replace(old, workers[1])
        assert g.execute(1).get() == 1


def test_replace_does_not_wait_for_ray_to_restart_the_actor(workers: list[Any], eventually: Eventually) -> None:
    with chain(workers, "echo", "wait_unless") as g:
        result = g.execute(0)
        kill(workers[1])
        fails(result, workers[1])
        until(g, RepairState.AWAITING, eventually)
        assert repr(g) == "CompiledGraph(2 calls on 2 actors, 0 under way, repair: awaiting)"
        g.replace(workers[1], workers[2])
        assert g.execute(1).get() == 1


def wait_for_file(_: Worker, path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def test_replace_refuses_an_actor_that_joins(
    workers: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    with chain(workers, "echo", "echo") as g:
        setup, gate = g._repairer._setup, tmp_path / "gate"
        reopen, calls = setup.reopen_own_ends, []

        def reopen_and_call(members: Any) -> None:
            reopen(members)
            if not calls:  # the new process joins after this call
                calls.append(workers[0].__ray_call__.remote(wait_for_file, gate))

        monkeypatch.setattr(setup, "reopen_own_ends", reopen_and_call)
        kill(workers[0])
        eventually(lambda: calls, within_s=60)
        kill(workers[1])
        until(g, RepairState.SETTLING, eventually)
        with pytest.raises(raylane.errors.GraphError, match="Worker#1 runs, or Ray has restarted it"):
            g.replace(workers[0], workers[2])
        gate.touch()
        assert [value_of(g, i) for i in range(5)] == list(range(5))


def test_replace_after_teardown_raises_that_the_graph_has_ended(workers: list[Any]) -> None:
    g = chain(workers, "echo")
    g.teardown()
    with pytest.raises(GraphClosedError, match="torn down"):
        g.replace(workers[0], workers[1])
    with (
        chain(workers, "echo", on_death="end") as g,
        pytest.raises(raylane.errors.GraphError, match=r"replace needs a graph.*on_death='repair'"),
    ):
        g.replace(workers[0], workers[1])
    with chain(workers, "echo") as g, pytest.raises(TypeError, match="replace: str is no actor"):
        g.replace(workers[0], "worker")

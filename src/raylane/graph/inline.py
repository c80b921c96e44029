"""The same graph in one process, without Ray: for users' own tests (`compile(..., backend="inline")`).

Methods are those of plain objects. Every value that would travel is pickled once by its sender and unpickled by each of
its readers, and each object gets its own copy of its constants: what cannot travel fails here too, and nobody sees
another's objects. Every execution is done when `execute` returns.
"""

from __future__ import annotations

import asyncio
import collections
import pickle
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import CoroutineType
from typing import Any

from raylane import _ray
from raylane.core.deadline import Deadline
from raylane.errors import GraphActorDiedError, GraphClosedError, GraphError, GraphPlanError, GraphValueError
from raylane.graph.channels.ring import LEND_FROM_BYTES
from raylane.graph.driver.completion import conclude
from raylane.graph.driver.result import Failed, GraphResult
from raylane.graph.inspect import drawing
from raylane.graph.inspect import stats as view
from raylane.graph.inspect.text import describe
from raylane.graph.inspect.trace import chrome_trace
from raylane.graph.plan.ir import DRIVER, INPUT, Edge, Plan, Step, Task
from raylane.graph.values import message as m
from raylane.graph.values import operations as ops
from raylane.graph.values.arguments import Arguments
from raylane.graph.worker.executor import KEPT_RECORDS, method_of
from raylane.graph.worker.program import only


class InlineGraph:
    """Offers what `CompiledGraph` offers; see there. Thread-safe: one execution runs at a time."""

    def __init__(self, plan: Plan, objects: Sequence[Any], *, max_inflight: int, timeout_s: float | None) -> None:
        self.plan = plan
        self.max_inflight = max_inflight
        self.timeout_s = timeout_s
        self._methods = [method_of(objects[task.member - 1], task.method) for task in plan.tasks]
        self._order = _with_own_constants(plan, _one_after_the_other(plan))
        self._arguments = Arguments(plan)
        self._encoder = m.Encoder()
        self._lock = threading.Lock()  # held while an execution runs; guards everything below
        self._count = 0
        self._end: GraphError | None = None
        """Why there are no more executions."""
        self._running: GraphResult
        """Result of the execution that runs."""
        self._loop: _Loop | None = None
        """Where coroutine methods run; made for the first of them."""
        self._bytes = [0] * len(plan.edges)
        self._spent_s = [[0.0, 0.0] for _ in plan.tasks]
        """Each call's seconds computing and sending."""
        self._records: collections.deque[tuple[int, int, float, float, float, float]] = collections.deque(
            maxlen=KEPT_RECORDS
        )
        self._executions: collections.deque[tuple[int, float, float]] = collections.deque(maxlen=KEPT_RECORDS)

    def execute(self, *args: Any, **kwargs: Any) -> GraphResult:
        """Run everything now. Errors of methods come with the result's `get`, as from actors."""
        with self._lock:
            if self._end is not None:
                raise type(self._end)(self._end.message, **self._end.fields)
            inputs = self._arguments.values(args, kwargs)
            sent = [(edge, self._encoder.encode(inputs[edge.value])) for edge in self.plan.edges_from(DRIVER)]
            result = GraphResult(self, self._count, 0, [], False)
            self._count += 1
            places: list[list[Any]] = [[None] * len(inputs) for _ in self.plan.members]
            self._running = result
            for edge, message in sent:
                self._deliver(edge, message, places)
            for value in self.plan.collects:
                if self.plan.values[value].source == INPUT:
                    places[DRIVER][value] = m.duplicate(self._encoder.encode(inputs[value]))
            for task in self._order:
                self._run(task, result.number, places)
            conclude(self.plan, result, places[DRIVER])
            self._executions.append((result.number, result.submitted_s, time.perf_counter()))
            return result

    execute_nowait = execute

    async def execute_async(self, *args: Any, **kwargs: Any) -> GraphResult:
        return await asyncio.to_thread(self.execute, *args, **kwargs)

    def _run(self, task: Task, number: int, places: list[list[Any]]) -> None:
        mine = places[task.member]
        started = time.perf_counter()
        result: Any = next((mine[value] for value in task.reads if type(mine[value]) is Failed), None)
        if result is None:
            result = self._call(task, mine)
            self._note(result, task.index in self.plan.fatal_tasks)
        returned = time.perf_counter()
        for value in self.plan.values:
            if value.source == task.index:
                self._hand_on(value.index, self._selected(result, value.steps, task), task, places)
        sent = time.perf_counter()
        self._spent_s[task.index][0] += returned - started
        self._spent_s[task.index][1] += sent - returned
        self._records.append((task.index, number, started, started, returned, sent))

    def _note(self, found: Any, fatal: bool) -> None:
        """The first failure that the output cannot do without is the result, as with actors; the other calls go on."""
        if fatal and type(found) is Failed and not self._running._done:
            self._running.complete(None, found.error)

    def _call(self, task: Task, mine: list[Any]) -> Any:
        label = self.plan.labels[task.index]
        try:
            made: dict[int, Any] = {}
            args = [ops.evaluate(expression, mine, made) for expression in task.args]
            kwargs = {key: ops.evaluate(expression, mine, made) for key, expression in task.kwargs}
            result = self._methods[task.index](*args, **kwargs)
            return self._finished(result) if type(result) is CoroutineType else result
        except SystemExit:  # what ends an actor
            who = self.plan.members[task.member]
            self._end = GraphActorDiedError(f"{who} exited, and with it the graph; compile it again")
            return _failed(GraphError(f"{label} exited its actor"), label)
        except (Exception, asyncio.CancelledError) as error:
            return _raised(error, label)

    def _finished(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if self._loop is None:
            self._loop = _Loop()
            weakref.finalize(self, self._loop.stop)
        return self._loop.run(coroutine)

    def _selected(self, result: Any, steps: tuple[Step, ...], task: Task) -> Any:
        if type(result) is Failed or not steps:
            return result
        try:
            return ops.select(result, steps)
        except Exception as error:
            return _failed(error, self.plan.labels[task.index])

    def _hand_on(self, value: int, found: Any, task: Task, places: list[list[Any]]) -> None:
        """To the task's own object as it is, to all others by a message."""
        places[task.member][value] = found
        self._note(found, value in self.plan.fatal_values)
        for edge in self.plan.edges:
            if edge.value != value:
                continue
            try:
                if type(found) is not Failed:
                    self._deliver(edge, self._encoder.encode(found), places)
                    continue
                arrived = found
            except GraphError as error:
                arrived = _failed(error, self.plan.labels[task.index])
                self._note(arrived, value in self.plan.fatal_values)
            for reader in edge.readers:
                places[reader][value] = arrived

    def _deliver(self, edge: Edge, message: m.Message, places: list[list[Any]]) -> None:
        self._bytes[edge.index] += message.nbytes
        shared = len(edge.readers) > 1 and message.nbytes - len(message.body) >= LEND_FROM_BYTES
        for reader in edge.readers:
            buffers: list[Any] = [bytearray(buffer) for buffer in message.buffers]
            if shared:
                buffers = [memoryview(buffer).toreadonly() for buffer in buffers]
            try:
                arrived = m.decode(message.kind, message.body, buffers, shared=shared)
            except Exception as error:
                what, who = self.plan.source_label(edge.value), self.plan.members[reader]
                arrived = _failed(
                    GraphValueError(f"{what} could not be unpickled by {who}: {m.shown(error, repr)}"), who
                )
                self._note(arrived, self._is_fatal_to(reader, edge.value))
            places[reader][edge.value] = arrived

    def _is_fatal_to(self, reader: int, value: int) -> bool:
        if reader == DRIVER:
            return value in self.plan.fatal_values
        tasks = [task for task in self.plan.fatal_tasks if self.plan.tasks[task].member == reader]
        return any(value in self.plan.tasks[task].reads for task in tasks)

    # Seeing

    def show(self) -> str:
        """The graph as text: objects with their calls in order, and who sends what to whom."""
        return describe(self.plan, max_inflight=self.max_inflight)

    def draw(self, path: str | Path) -> None:
        """Write the graph as an SVG picture."""
        Path(path).write_text(drawing.draw(self.plan, max_inflight=self.max_inflight))

    def stats(self) -> dict[str, Any]:
        """Counters as `CompiledGraph.stats` has them; nobody waits here, and nothing is lent."""
        count = self._count
        calls = {
            self.plan.labels[task.index]: {
                "actor": self.plan.members[task.member],
                "count": count,
                "wait_s": 0.0,
                "compute_s": self._spent_s[task.index][0],
                "send_s": self._spent_s[task.index][1],
            }
            for task in self.plan.tasks
        }
        edges = {
            view.edge_label(self.plan, edge): {"count": count, "bytes": nbytes}
            for edge, nbytes in enumerate(self._bytes)
        }
        executions = {"submitted": count, "completed": count}
        return {"executions": executions, "calls": calls, "edges": edges, "lent_bytes": {}, "unanswered": []}

    def trace(self, path: str | Path) -> list[str]:
        """Write the last executions as a trace for Perfetto or chrome://tracing."""
        view.save_trace(path, chrome_trace(self.plan, list(self._records), list(self._executions)))
        return []

    # What a result asks of its graph; every result is done.

    def finish(self, result: GraphResult, timeout_s: float | None) -> bool:
        return True

    def pump_until(self, ready: Callable[[], bool], deadline: Deadline) -> bool:
        return ready()

    def future(self, loop: asyncio.AbstractEventLoop) -> None:
        return None

    def nudge(self) -> None:
        return

    def waiting_for(self, number: int) -> str:
        return "nothing"

    # Ending

    def teardown(self, timeout: float = 5.0) -> None:
        """No further executions. A second call does nothing."""
        with self._lock:
            self._end = self._end or GraphClosedError("the graph was torn down; compile it again")
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.stop()

    def __enter__(self) -> InlineGraph:
        return self

    def __exit__(self, *_: object) -> None:
        self.teardown()

    def __repr__(self) -> str:
        state = "ready" if self._end is None else "ended"
        return f"InlineGraph({len(self.plan.tasks)} calls on {len(self.plan.members) - 1} objects, {state})"


class _Loop:
    """An asyncio loop on a thread of its own, which lasts from one call of a coroutine method to the next, as an
    actor's does: what a method leaves running there goes on."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_serve, args=(self._loop,), name="raylane-inline", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def stop(self) -> None:
        """End it, and all that still runs there. A second call does nothing."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        loop.run_until_complete(_cancel_the_others())
    finally:
        loop.close()


async def _cancel_the_others() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def _failed(error: BaseException, where: str) -> Failed:
    """An error as those receive it who are told of it; one of ours says where by itself."""
    if not isinstance(error, GraphError):
        return _raised(error, where)
    return Failed(m.decode(m.ERROR, m.encode_error(error).body, ()))


def _raised(error: BaseException, where: str) -> Failed:
    """What a method has raised. An error of ours is that of another graph, and must not pass for this one's."""
    error = _ray.task_error(where, "".join(traceback.format_exception(error)), error)
    return Failed(m.decode(m.ERROR, m.encode_error(error).body, ()))


def _with_own_constants(plan: Plan, tasks: Sequence[Task]) -> list[Task]:
    """The tasks, those of each member with constants that nobody else sees."""
    own: dict[int, Plan] = {}
    for member in range(1, len(plan.members)):
        try:
            own[member] = pickle.loads(_ray.dumps(only(plan, member)))
        except Exception as error:
            raise GraphPlanError(
                f"the constants among the arguments of {plan.members[member]}'s calls cannot be pickled: {error}"
            ) from error
    return [own[task.member].tasks[task.index] for task in tasks]


def _one_after_the_other(plan: Plan) -> list[Task]:
    """All tasks in an order that each member's own order and all data allow; there is one, the schedule was checked."""
    made: set[int] = set()
    left = [list(order) for order in plan.order]
    found: list[Task] = []
    while any(left):
        before = len(found)
        for order in left:
            while order and all(
                (source := plan.values[value].source) == INPUT or source in made for value in plan.tasks[order[0]].reads
            ):
                made.add(order[0])
                found.append(plan.tasks[order.pop(0)])
        if len(found) == before:
            raise GraphError("these orders wait for one another")
    return found

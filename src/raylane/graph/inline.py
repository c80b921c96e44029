"""Inline backend: the same graph in one process, without Ray, for users' own tests (`compile(..., backend="inline")`).

The methods are those of plain objects. Every value that would travel is pickled once by its sender and unpickled by
each of its readers, and each object gets its own copy of its constants: a value that cannot travel fails here too, and
no object sees another one's values. Every execution is complete when `execute` returns.
"""

from __future__ import annotations

import asyncio
import collections
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import CoroutineType
from typing import Any

from raylane import _ray
from raylane.core.deadline import Deadline
from raylane.errors import GraphActorDiedError, GraphClosedError, GraphError, GraphPlanError, GraphValueError
from raylane.graph.channels.ring import LEND_FROM_BYTES
from raylane.graph.driver.completion import complete_result
from raylane.graph.driver.result import GraphResult
from raylane.graph.inspect import drawing, stats, trace
from raylane.graph.inspect.text import describe
from raylane.graph.plan.ir import DRIVER, INPUT, Edge, Plan, Step, Task
from raylane.graph.values import message as messages
from raylane.graph.values import operations
from raylane.graph.values.arguments import Arguments
from raylane.graph.values.failures import Failure, error_message, raised_message
from raylane.graph.values.message import Message
from raylane.graph.worker.executor import KEPT_RECORDS, method_of
from raylane.graph.worker.program import share_of


class InlineGraph:
    """Graph with the interface of `CompiledGraph` that runs in this process. Thread-safe: one execution at a time."""

    def __init__(self, plan: Plan, objects: Sequence[Any], *, max_inflight: int, timeout_s: float | None) -> None:
        self.plan = plan
        self.max_inflight = max_inflight
        self.timeout_s = timeout_s
        self._methods = [method_of(objects[task.member - 1], task.method) for task in plan.tasks]
        self._order = _with_own_constants(plan, _sequential_order(plan))
        self._arguments = Arguments(plan)
        self._encoder = messages.Encoder()
        self._lock = threading.Lock()  # held during an execution; guards everything below
        self._count = 0
        """Number of executions."""
        self._end: GraphError | None = None
        """Error that ended the graph."""
        self._running: GraphResult
        """Result of the execution that runs."""
        self._loop: _EventLoopThread | None = None
        """Event loop of coroutine methods, created for the first of them."""
        self._bytes = [0] * len(plan.edges)
        """Bytes sent over each edge."""
        self._spent_s = [[0.0, 0.0] for _ in plan.tasks]
        """Seconds that each call spent computing and sending."""
        self._records: collections.deque[tuple[int, int, float, float, float, float]] = collections.deque(
            maxlen=KEPT_RECORDS
        )
        self._executions: collections.deque[tuple[int, float, float]] = collections.deque(maxlen=KEPT_RECORDS)

    def execute(self, *args: Any, **kwargs: Any) -> GraphResult:
        """Run all calls now. Errors of methods are raised by the result's `get`, as with actors."""
        with self._lock:
            if self._end is not None:
                raise type(self._end)(self._end.message, **self._end.fields)
            # Encode all inputs before any method runs: an input that cannot be pickled fails as with actors.
            inputs = self._arguments.values(args, kwargs)
            sent = [(edge, self._encoder.encode(inputs[edge.value])) for edge in self.plan.edges_from(DRIVER)]
            result = GraphResult(self, self._count, 0, [], False)
            self._count += 1
            values: list[list[Any]] = [[None] * len(inputs) for _ in self.plan.members]
            self._running = result
            for edge, message in sent:
                self._deliver(edge, message, values)
            for value in self.plan.collects:
                if self.plan.values[value].source == INPUT:
                    values[DRIVER][value] = messages.duplicate(self._encoder.encode(inputs[value]))
            for task in self._order:
                self._run(task, result.number, values)
            complete_result(self.plan, result, values[DRIVER])
            self._executions.append((result.number, result.submitted_s, time.perf_counter()))
            return result

    execute_nowait = execute

    async def execute_async(self, *args: Any, **kwargs: Any) -> GraphResult:
        """Run all calls on a thread, while the event loop runs."""
        return await asyncio.to_thread(self.execute, *args, **kwargs)

    def _run(self, task: Task, number: int, values: list[list[Any]]) -> None:
        """Run one task. `values` has the values of each member."""
        own = values[task.member]
        started = time.perf_counter()
        result: Any = next((own[value] for value in task.reads if type(own[value]) is Failure), None)
        if result is None:
            result = self._call(task, own)
            self._fail_result(result, task.index in self.plan.fatal_tasks)
        returned = time.perf_counter()
        for value in self.plan.values:
            if value.source == task.index:
                self._send(value.index, self._selected(result, value.steps, task), task, values)
        sent = time.perf_counter()
        self._spent_s[task.index][0] += returned - started
        self._spent_s[task.index][1] += sent - returned
        self._records.append((task.index, number, started, started, returned, sent))

    def _fail_result(self, found: Any, fatal: bool) -> None:
        """Fail the result with the first fatal failure, as with actors; the other calls still run."""
        if fatal and type(found) is Failure and not self._running._done:
            self._running.complete(None, found.error)

    def _call(self, task: Task, own: list[Any]) -> Any:
        label = self.plan.labels[task.index]
        try:
            made: dict[int, Any] = {}
            args = [operations.evaluate(expression, own, made) for expression in task.args]
            kwargs = {key: operations.evaluate(expression, own, made) for key, expression in task.kwargs}
            result = self._methods[task.index](*args, **kwargs)
            return self._run_coroutine(result) if type(result) is CoroutineType else result
        except SystemExit:  # ends an actor
            name = self.plan.members[task.member]
            self._end = GraphActorDiedError(f"{name} exited, and with it the graph; compile it again")
            return _failure(error_message(GraphError(f"{label} exited its actor"), label))
        except (Exception, asyncio.CancelledError) as error:
            return _failure(raised_message(error, label))

    def _run_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if self._loop is None:
            self._loop = _EventLoopThread()
            # A graph that is dropped without teardown must not leave a thread.
            weakref.finalize(self, self._loop.stop)
        return self._loop.run(coroutine)

    def _selected(self, result: Any, steps: tuple[Step, ...], task: Task) -> Any:
        if type(result) is Failure or not steps:
            return result
        try:
            return operations.select(result, steps)
        except Exception as error:
            return _failure(error_message(error, self.plan.labels[task.index]))

    def _send(self, value: int, found: Any, task: Task, values: list[list[Any]]) -> None:
        """Give a value to the task's own object as it is, and to all others as a message."""
        values[task.member][value] = found
        self._fail_result(found, value in self.plan.fatal_values)
        for edge in self.plan.edges:
            if edge.value != value:
                continue
            try:
                if type(found) is not Failure:
                    self._deliver(edge, self._encoder.encode(found), values)
                    continue
                failure = found
            except GraphError as error:
                failure = _failure(error_message(error, self.plan.labels[task.index]))
                self._fail_result(failure, value in self.plan.fatal_values)
            for reader in edge.readers:
                values[reader][value] = failure

    def _deliver(self, edge: Edge, message: Message, values: list[list[Any]]) -> None:
        self._bytes[edge.index] += message.nbytes
        # The same rule as for leased memory: several readers share it, so their arrays are read-only.
        shared = len(edge.readers) > 1 and message.nbytes - len(message.body) >= LEND_FROM_BYTES
        for reader in edge.readers:
            buffers: list[Any] = [bytearray(buffer) for buffer in message.buffers]
            if shared:
                buffers = [memoryview(buffer).toreadonly() for buffer in buffers]
            try:
                received = messages.decode(message.kind, message.body, buffers, shared=shared)
            except Exception as error:
                label, name = self.plan.source_label(edge.value), self.plan.members[reader]
                refused = GraphValueError(
                    f"{label} could not be unpickled by {name}: {messages.error_text(error, repr)}"
                )
                received = _failure(error_message(refused, name))
                self._fail_result(received, edge.value in self.plan.fatal_inputs(reader))
            values[reader][edge.value] = received

    # Inspection

    def show(self) -> str:
        """Return the graph as text: objects with their calls in order, and the edges between them."""
        return describe(self.plan, max_inflight=self.max_inflight)

    def draw(self, path: str | Path) -> None:
        """Write the graph as an SVG picture."""
        Path(path).write_text(drawing.draw(self.plan, max_inflight=self.max_inflight))

    def stats(self) -> dict[str, Any]:
        """Return counters like `CompiledGraph.stats`. There is no waiting and no leased memory here."""
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
            stats.edge_label(self.plan, edge): {"count": count, "bytes": nbytes}
            for edge, nbytes in enumerate(self._bytes)
        }
        executions = {"submitted": count, "completed": count}
        return {"executions": executions, "calls": calls, "edges": edges, "lent_bytes": {}, "unanswered": []}

    def trace(self, path: str | Path) -> list[str]:
        """Write the last executions as a trace for Perfetto or chrome://tracing. Return an empty list."""
        trace.save(path, trace.chrome_trace(self.plan, list(self._records), list(self._executions)))
        return []

    # The interface `ResultSource`. Every result is done, so nothing waits.

    def wait_for_result(self, result: GraphResult, timeout_s: float | None) -> bool:
        """Return True: the result is done."""
        return True

    def collect_until(self, ready: Callable[[], bool], deadline: Deadline) -> bool:
        """Return `ready()` without waiting."""
        return ready()

    def future(self, loop: asyncio.AbstractEventLoop) -> None:
        """Return None: there is nothing to wait for."""
        return None

    def overstayed(self) -> bool:
        """Return False: awaiting a result that is done takes no time."""
        return False

    def glance(self, result: GraphResult) -> None:
        """Do nothing: the result is done."""

    def look(self) -> None:
        """Do nothing: no message is on its way."""

    def notify(self) -> None:
        """Do nothing: no thread waits."""
        return

    def describe_wait(self, number: int) -> str:
        """Return a text for messages; no result is ever waited for."""
        return "nothing"

    # Ending

    def teardown(self, timeout: float = 5.0) -> None:
        """End the graph: `execute` raises GraphClosedError from now on. A second call does nothing."""
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


class _EventLoopThread:
    """Event loop on a thread of its own. Like an actor's loop it runs between calls too: background tasks continue."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name="raylane-inline", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the loop and return its result. Waits."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def stop(self) -> None:
        """Cancel all tasks and end the thread. A second call does nothing."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        loop.run_until_complete(_cancel_other_tasks())
    finally:
        loop.close()


async def _cancel_other_tasks() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def _failure(message: Message) -> Failure[BaseException]:
    """Return the failure as a reader in another process would receive it: pickled and unpickled."""
    return Failure(messages.decode(messages.ERROR, message.body, ()))


def _with_own_constants(plan: Plan, tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks with copies of their constants, one copy for each member."""
    own: dict[int, Plan] = {}
    for member in range(1, len(plan.members)):
        try:
            own[member] = pickle.loads(_ray.dumps(share_of(plan, member)))
        except Exception as error:
            raise GraphPlanError(
                f"a constant in the calls of {plan.members[member]} cannot be pickled: {error}. Pass a value that can, "
                "or create it in the object"
            ) from error
    return [own[task.member].tasks[task.index] for task in tasks]


def _sequential_order(plan: Plan) -> list[Task]:
    """Return all tasks in one order that each member's own order and all data allow.

    There is such an order, because the schedule was checked for deadlock.
    """
    made: set[int] = set()
    left = [list(order) for order in plan.order]
    found: list[Task] = []
    while any(left):
        before = len(found)
        # Round after round: each member runs as far as its inputs allow.
        for order in left:
            while order and all(
                (source := plan.values[value].source) == INPUT or source in made for value in plan.tasks[order[0]].reads
            ):
                made.add(order[0])
                found.append(plan.tasks[order.pop(0)])
        if len(found) == before:
            raise GraphError("these orders wait for one another")
    return found

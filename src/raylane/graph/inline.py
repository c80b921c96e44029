"""The same graph in one process, without Ray: for users' own tests (`compile(..., backend="inline")`).

Methods are those of plain objects. Every value that would travel is pickled and unpickled on the way, so what cannot
travel fails here too, and nobody sees another's objects; every execution is done when `execute` returns.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from raylane.core.deadline import Deadline
from raylane.errors import GraphClosedError, GraphError
from raylane.graph import message as m
from raylane.graph import ops
from raylane.graph.arguments import Arguments
from raylane.graph.outcome import Failed, conclude
from raylane.graph.plan import INPUT, Plan, Task
from raylane.graph.resident import method_of
from raylane.graph.result import GraphResult

log = logging.getLogger("raylane.graph")


class InlineGraph:
    """Offers what `CompiledGraph` offers; see there."""

    def __init__(self, plan: Plan, objects: Sequence[Any], *, max_inflight: int, timeout_s: float | None) -> None:
        self.plan = plan
        self.max_inflight = max_inflight
        self.timeout_s = timeout_s
        self._calls = [method_of(objects[task.member - 1], task.method) for task in plan.tasks]
        self._arguments = Arguments(plan)
        self._encoder = m.Encoder()
        self._lock = threading.Lock()  # held while an execution runs: methods never run at the same time
        self._order = _one_after_the_other(plan)
        self._count = 0
        self._open = True

    def execute(self, *args: Any, **kwargs: Any) -> GraphResult:
        """Run everything now. Errors of methods come with the result's `get`, as from actors."""
        with self._lock:
            if not self._open:
                raise GraphClosedError("the graph was torn down; compile it again")
            inputs = self._arguments.values(args, kwargs)
            result = GraphResult(self, self._count, 0, [], False)
            self._count += 1
            values: list[Any] = [
                self._traveled(value) if found.source == INPUT else None
                for found, value in zip(self.plan.values, inputs, strict=True)
            ]
            for task in self._order:
                self._run(task, values)
            for value in self.plan.collects:
                if self.plan.values[value].source == INPUT:
                    values[value] = inputs[value]
            conclude(self.plan, result, values)
            return result

    execute_nowait = execute

    async def execute_async(self, *args: Any, **kwargs: Any) -> GraphResult:
        return await asyncio.to_thread(self.execute, *args, **kwargs)

    def _traveled(self, value: Any) -> Any:
        """What arrives at the other end of an edge."""
        message = self._encoder.encode(value)
        return m.decode(message.kind, message.body, [bytearray(buffer) for buffer in message.buffers])

    def _run(self, task: Task, values: list[Any]) -> None:
        result: Any = next((values[value] for value in task.reads if type(values[value]) is Failed), None)
        if result is None:
            try:
                args = [ops.evaluate(expression, values) for expression in task.args]
                kwargs = {key: ops.evaluate(expression, values) for key, expression in task.kwargs}
                result = self._calls[task.index](*args, **kwargs)
                if inspect.iscoroutine(result):
                    result = _finished(result)
            except Exception as error:
                result = Failed.of(error, self.plan.labels[task.index])
        for found in self.plan.values:
            if found.source == task.index:
                values[found.index] = self._selected(result, found.index, task)

    def _selected(self, result: Any, index: int, task: Task) -> Any:
        if type(result) is Failed:
            return result
        try:
            value = ops.select(result, self.plan.values[index].steps) if self.plan.values[index].steps else result
            travels = any(edge.value == index for edge in self.plan.edges)
            return self._traveled(value) if travels else value
        except Exception as error:
            return Failed.of(error, self.plan.labels[task.index])

    # What a result asks of its graph; every result is done.

    def finish(self, result: GraphResult, timeout_s: float | None) -> bool:
        return True

    def pump_until(self, ready: Callable[[], bool], deadline: Deadline) -> bool:
        return ready()

    def future(self, loop: asyncio.AbstractEventLoop) -> None:
        return None

    def waiting_for(self, number: int) -> str:
        return "nothing"

    def teardown(self, timeout: float = 0.0) -> None:
        """No further executions."""
        self._open = False

    def __enter__(self) -> InlineGraph:
        return self

    def __exit__(self, *_: object) -> None:
        self.teardown()


def _finished(coroutine: Any) -> Any:
    """Run a coroutine to its end, also when this thread has a running loop."""
    box: list[Any] = []

    def work() -> None:
        try:
            box.append((asyncio.run(coroutine), None))
        except BaseException as error:
            box.append((None, error))

    thread = threading.Thread(target=work, name="raylane-inline")
    thread.start()
    thread.join()
    value, error = box[0]
    if error is not None:
        raise error
    return value


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

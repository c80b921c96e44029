"""What `execute` returns: the outcome of one execution, now or later. Made and completed by `compiled` and `inline`."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from raylane import _ray
from raylane.core.deadline import Deadline
from raylane.errors import GraphTimeoutError, RaylaneError
from raylane.graph.driver.asyncio_bridge import resolve


class Pump(Protocol):
    """Who completes results."""

    timeout_s: float | None

    def finish(self, result: GraphResult, timeout_s: float | None) -> bool:
        """Wait until it is done; whether it is."""
        ...

    def pump_until(self, ready: Callable[[], bool], deadline: Deadline) -> bool: ...

    def future(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None] | None:
        """What a flagged result's waiter awaits; None where a thread has to wait."""
        ...

    def waiting_for(self, number: int) -> str: ...

    def nudge(self) -> None:
        """Have whoever waits look again."""
        ...


class Failed:
    """In the place of a value: the error that came instead."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class GraphResult:
    """The outcome of one execution. `get` and `await` may be used by any number of threads and tasks, in any order,
    any number of times; a timeout loses nothing. Pickled, or passed to another graph, it is its value (which waits).

    `leaf_errors` holds the errors of calls whose result nobody reads: once the result is done, or, if it has failed,
    once all its calls have ended.
    """

    leaf_errors: Sequence[BaseException] = ()
    # What most results never set is set here: one is made for every execution.
    _done = False
    _value: Any = None
    _error: BaseException | None = None
    _waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] | None = None

    def __init__(self, graph: Pump, number: int, left: int, values: list[Any], flagged: bool) -> None:
        self._graph: Pump | None = graph
        """None once the result is done: a result that is kept does not keep the graph and its actors."""
        self.number = number
        """Of this execution, from 0."""
        self._left = left
        """Messages still to come."""
        self._values: list[Any] | None = values
        self._flagged = flagged
        """Whether its messages wake the asyncio loop."""
        self.submitted_s = time.perf_counter()

    def done(self) -> bool:
        """Whether `get` would return, or raise, at once. Does not wait."""
        graph = self._graph
        if graph is not None:
            graph.pump_until(self._is_done, Deadline(0))
        return self._done

    def get(self, timeout: float | None = None) -> Any:
        """The output (for a MultiOutputNode the list of outputs). Waits up to `timeout` seconds (None: the graph's
        `timeout_s`), without using CPU. As soon as one call that the output needs has failed, raises its error, while
        the others may still be running.

        Raises what a method raised (an instance of its class and of `ray.exceptions.RayTaskError`, with the remote
        traceback), GraphTimeoutError (ask again later), GraphActorDiedError, GraphClosedError.
        Arrays above 32 KB lie in memory shared with the actor that made them: they may be kept for ever, and are
        read-only where several processes received them.
        """
        graph = self._graph
        if graph is not None:
            limit = graph.timeout_s if timeout is None else timeout
            if not graph.finish(self, limit):
                raise GraphTimeoutError(
                    f"execution {self.number} did not end within {limit} s: "
                    f"{graph.waiting_for(self.number)}. Its result is not lost: get it later",
                    execution=self.number,
                )
        if self._error is None:
            return self._value
        return self._outcome()

    def __await__(self) -> Generator[Any, Any, Any]:
        if not self._done:
            yield from self.arrival()
        if self._error is None:
            return self._value
        return self._outcome()

    def arrival(self) -> Generator[Any, Any, None]:
        """For `await`: until the result is done, of which nothing is taken. GraphTimeoutError after `timeout_s`."""
        graph = self._graph
        if graph is None:
            return
        yield from self._until(graph, self._is_done)
        if not self._done:
            raise GraphTimeoutError(
                f"execution {self.number} did not end within {graph.timeout_s} s: "
                f"{graph.waiting_for(self.number)}. Its result is not lost: await it again",
                execution=self.number,
            )

    def departure(self, graph: Pump) -> Generator[Any, Any, None]:
        """For the graph's `execute_async`: until every message of the execution was read, or `timeout_s` is over."""
        while not self._is_over():
            waited = Deadline(graph.timeout_s)
            yield from self._until(graph, self._is_over)
            if waited.left_s() == 0:
                return

    def _until(self, graph: Pump, ready: Callable[[], bool]) -> Generator[Any, Any, None]:
        """Until the result is completed, or its last message was read, or `timeout_s` is over: ask again then."""
        loop = asyncio.get_running_loop()
        future = graph.future(loop) if self._flagged else None
        if future is None:
            yield from loop.run_in_executor(None, graph.pump_until, ready, Deadline(graph.timeout_s))
            return
        if self._waiting is None:
            self._waiting = []
        self._waiting.append((loop, future))
        if ready():  # another thread was quicker
            resolve(self._waiting)
        yield from future

    def complete(self, value: Any, error: BaseException | None) -> None:
        """For the graph only."""
        self._value = value
        if error is not None:
            self._error = error
        self._done = True
        self._graph = None  # after _done: whoever finds none here finds the result done
        if self._waiting:
            resolve(self._waiting)

    def fail(self, error: BaseException) -> None:
        """For the graph only: complete the result although messages are still to come. What has arrived is dropped, but
        for errors, which may be those of leaves."""
        assert self._values is not None
        for index, value in enumerate(self._values):
            if type(value) is not Failed:
                self._values[index] = None
        self.complete(None, error)

    def end(self) -> None:
        """For the graph only: every message of the execution was read."""
        self._values = None
        if self._waiting:
            resolve(self._waiting)

    def _is_done(self) -> bool:
        return self._done

    def _is_over(self) -> bool:
        return self._values is None

    def _outcome(self) -> Any:
        """Raise the error. Each time a new object where it can be copied: others have the one of before, and its
        traceback grows with every raise."""
        error = self._error
        if error is None:
            return self._value
        raised = _ray.raised_form(error)
        if raised is error and isinstance(error, RaylaneError):
            raised = copy.copy(error)
            raised.__cause__ = error.__cause__
        raise raised.with_traceback(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.get(),)

    def __repr__(self) -> str:
        state = "failed" if self._error is not None else "done" if self._done else "under way"
        return f"GraphResult(execution {self.number}, {state})"


class Departure:
    """Awaits the end of an execution without taking its value, or its error."""

    def __init__(self, graph: Pump, result: GraphResult) -> None:
        self._graph = graph
        self._result = result

    def __await__(self) -> Generator[Any, Any, None]:
        yield from self._result.departure(self._graph)


def _itself(value: Any) -> Any:
    return value


def wait(
    results: Sequence[GraphResult], *, num_returns: int = 1, timeout: float | None = None
) -> tuple[list[GraphResult], list[GraphResult]]:
    """(done, not done), each in the order given: like `ray.wait`, for results of one or several graphs.

    Returns when `num_returns` are done or after `timeout` seconds (None: the first graph's `timeout_s`).
    """
    for result in results:
        if not isinstance(result, GraphResult):
            raise TypeError(f"wait: {result!r} is no GraphResult; pass a list of what execute has returned")
    if not 0 < num_returns <= len(results):
        raise ValueError(f"num_returns={num_returns} of {len(results)} results: it is between 1 and their number")
    graphs = {id(graph): graph for result in results if (graph := result._graph) is not None}
    if graphs:
        limit_s = next(iter(graphs.values())).timeout_s if timeout is None else timeout
        _pump_all(list(graphs.values()), lambda: sum(r._done for r in results) >= num_returns, Deadline(limit_s))
    done = [result for result in results if result.done()]
    return done, [result for result in results if result not in done]


def _pump_all(graphs: list[Pump], ready: Callable[[], bool], deadline: Deadline) -> None:
    """Read messages of several graphs until `ready` or the deadline: each has its own doorbell, so each but the first
    is waited for on a thread."""
    over = False

    def over_or_ready() -> bool:
        return over or ready()

    def pump(graph: Pump) -> None:
        graph.pump_until(over_or_ready, deadline)
        for other in graphs:  # these sleep, and nothing rings there
            if other is not graph:
                other.nudge()

    threads = [threading.Thread(target=pump, args=(graph,), name="raylane-wait", daemon=True) for graph in graphs[1:]]
    for thread in threads:
        thread.start()
    try:
        graphs[0].pump_until(over_or_ready, deadline)
    finally:
        over = True
        for graph in graphs[1:]:
            graph.nudge()
        for thread in threads:
            thread.join()

"""What `execute` returns: the outcome of one execution, now or later. Made and completed by `compiled` and `inline`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from raylane import _ray
from raylane.core.deadline import Deadline
from raylane.errors import GraphTimeoutError
from raylane.graph.awaiting import resolve


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


class GraphResult:
    """The outcome of one execution. `get` and `await` may be used by any number of threads and tasks, in any order,
    any number of times; a timeout loses nothing. Pickled, or passed to another graph, it is its value (which waits).

    `leaf_errors` holds, once done, the errors of calls whose result nobody reads.
    """

    leaf_errors: Sequence[BaseException] = ()
    # What most results never set is set here: one is made for every execution.
    _done = False
    _value: Any = None
    _error: BaseException | None = None
    _waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] | None = None

    def __init__(self, graph: Pump, number: int, left: int, values: list[Any], flagged: bool) -> None:
        self._graph = graph
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
        if not self._done:
            self._graph.pump_until(self._is_done, Deadline(0))
        return self._done

    def get(self, timeout: float | None = None) -> Any:
        """The output (for a MultiOutputNode the list of outputs). Waits up to `timeout` seconds (None: the graph's
        `timeout_s`), without using CPU.

        Raises what a method raised (an instance of its class and of `ray.exceptions.RayTaskError`, with the remote
        traceback), GraphTimeoutError (ask again later), GraphActorDiedError, GraphClosedError.
        Arrays above 32 KB lie in memory shared with the actor that made them: they may be kept for ever, and are
        read-only where several processes received them.
        """
        if not self._done:
            limit = self._graph.timeout_s if timeout is None else timeout
            if not self._graph.finish(self, limit):
                raise GraphTimeoutError(
                    f"execution {self.number} did not end within {limit} s: "
                    f"{self._graph.waiting_for(self.number)}. Its result is not lost: get it later",
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
        loop = asyncio.get_running_loop()
        timeout_s = self._graph.timeout_s
        future = self._graph.future(loop) if self._flagged else None
        if future is None:
            yield from loop.run_in_executor(None, self._graph.pump_until, self._is_done, Deadline(timeout_s))
        else:
            if self._waiting is None:
                self._waiting = []
            self._waiting.append((loop, future))
            if self._done:  # completed by another thread in between
                resolve(self._waiting)
            yield from future
        if not self._done:
            raise GraphTimeoutError(
                f"execution {self.number} did not end within {timeout_s} s: "
                f"{self._graph.waiting_for(self.number)}. Its result is not lost: await it again",
                execution=self.number,
            )

    def complete(self, value: Any, error: BaseException | None) -> None:
        """For the graph only."""
        self._values = None
        self._value = value
        if error is not None:
            self._error = error
        self._done = True
        if self._waiting:
            resolve(self._waiting)

    def _is_done(self) -> bool:
        return self._done

    def _outcome(self) -> Any:
        if self._error is not None:
            raise _ray.raised_form(self._error)
        return self._value

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.get(),)

    def __repr__(self) -> str:
        state = "failed" if self._error is not None else "done" if self._done else "under way"
        return f"GraphResult(execution {self.number}, {state})"


def _itself(value: Any) -> Any:
    return value


def wait(
    results: Sequence[GraphResult], *, num_returns: int = 1, timeout: float | None = None
) -> tuple[list[GraphResult], list[GraphResult]]:
    """(done, not done), each in the order given: like `ray.wait`, for results of one or several graphs.

    Returns when `num_returns` are done or after `timeout` seconds (None: the first graph's `timeout_s`).
    """
    if not 0 < num_returns <= len(results):
        raise ValueError(f"num_returns={num_returns} of {len(results)} results: it is between 1 and their number")
    deadline = Deadline(results[0]._graph.timeout_s if timeout is None else timeout)
    graphs = {id(result._graph): result._graph for result in results}
    if len(graphs) == 1:
        results[0]._graph.pump_until(lambda: sum(r._done for r in results) >= num_returns, deadline)
    else:
        while sum(result.done() for result in results) < num_returns:
            left = deadline.left_s()
            if left is not None and left <= 0:
                break
            waiting = next(result for result in results if not result._done)
            waiting._graph.pump_until(waiting._is_done, Deadline(0.005 if left is None else min(left, 0.005)))
    done = [result for result in results if result.done()]
    return done, [result for result in results if result not in done]

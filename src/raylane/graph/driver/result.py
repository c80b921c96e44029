"""Result of one execution: returned by `execute` at once, completed later by the collector or the inline backend.

`Executions` are those of one graph that are under way, shared by the submitter and the collector of the driver.
"""

from __future__ import annotations

import asyncio
import collections
import copy
import logging
import threading
import types
from collections.abc import Callable, Generator, Sequence
from typing import Any

from raylane import _ray
from raylane.core import native
from raylane.core.deadline import Deadline
from raylane.errors import GraphTimeoutError, RaylaneError
from raylane.graph.driver.asyncio_bridge import resolve
from raylane.graph.plan.ir import Plan
from raylane.graph.values import operations
from raylane.graph.values.failures import Failure
from raylane.graph.worker.executor import KEPT_RECORDS

log = logging.getLogger("raylane.graph")

CLOCK_S = 1e-3
"""Seconds that a timer of asyncio waits beyond a deadline: it may come a tick of the clock early."""


class GraphResult(native.Result):
    """Result of one execution of a graph.

    `get` and `await` may be used by any number of threads and tasks, in any order, any number of times; a timeout loses
    nothing. A result that is pickled, or passed to another graph, is replaced by its value (which waits).

    `leaf_errors` holds the errors of calls whose result no output needs: complete once the result is done or, if it has
    failed, once all its calls have ended.
    """

    __slots__ = ("__weakref__",)

    def done(self) -> bool:
        """Return True if `get` would return, or raise, at once. Does not wait."""
        source = self._source
        if source is not None:
            source.collect_until(self._is_done, Deadline(0))
        return self._done

    def get(self, timeout: float | None = None) -> Any:
        """Return the output (for a MultiOutputNode the list of outputs).

        Waits up to `timeout` seconds (None: the graph's `timeout`), without using CPU. Raises the error of a call
        that the output needs as soon as it has failed, while other calls may still be running.

        Raises the method's exception (an instance of its class and of `ray.exceptions.RayTaskError`, with the remote
        traceback), GraphTimeoutError (call `get` again later), GraphActorDiedError or GraphClosedError.

        Arrays above 32 KB lie in memory shared with the actor that created them. They may be kept for any time, and are
        read-only if several processes received them.
        """
        source = self._source
        if source is not None:
            limit = source.timeout_s if timeout is None else timeout
            if not source.collect_until(self._is_done, Deadline(limit)):
                raise GraphTimeoutError(
                    f"execution {self.number} did not end within {limit} s: "
                    f"{source.describe_wait(self.number)}. Its result is not lost: call get again later",
                    execution=self.number,
                )
        if self._error is None:
            return self._value
        return self._raise()

    def cancel(self) -> bool:
        """Let the execution fail with GraphCancelledError, unless it is done. Return False if it is. Does not wait.

        Actors on the driver's host skip the calls of the execution that have not begun. A method that runs is not
        interrupted, and until it returns the execution counts as in flight: later results wait for it.
        """
        source = self._source
        return source is not None and source.cancel(self)

    def __await__(self) -> Generator[Any, Any, Any]:
        source = self._source
        if source is not None and self._wakes_asyncio:
            if source.overstayed():
                yield  # other coroutines and timers run
            source.glance(self)
        if not self._done and source is not None:
            yield from self._wait(source, self._is_done)
            if not self._done:
                raise GraphTimeoutError(
                    f"execution {self.number} did not end within {source.timeout_s} s: "
                    f"{source.describe_wait(self.number)}. Its result is not lost: await it again",
                    execution=self.number,
                )
        if self._error is None:
            return self._value
        return self._raise()

    @types.coroutine
    def wait_until_ended(self, source: Any, timeout_s: float | None) -> Generator[Any, Any, None]:
        """Wait in asyncio until every message of the execution was read, or `timeout_s` has passed. For the graph."""
        waited = Deadline(source.timeout_s if timeout_s is None else timeout_s)
        while self._values is not None:
            yield from self._wait(source, lambda: self._values is None, timeout_s and waited.left_s())
            if waited.left_s() == 0:
                return

    def _wait(
        self, source: Any, ready: Callable[[], bool], timeout_s: float | None = None
    ) -> Generator[Any, Any, None]:
        """Wait in asyncio until the result changes, or a timeout has passed: check `ready` again afterwards.

        The timeout is that of the source, or an earlier one.
        """
        loop = asyncio.get_running_loop()
        future = source.future(loop) if self._wakes_asyncio else None
        if future is None:
            yield from loop.run_in_executor(
                None, source.collect_until, ready, Deadline(source.timeout_s if timeout_s is None else timeout_s)
            )
            return
        if self._waiting is None:
            self._waiting = []
        self._waiting.append((loop, future))
        # Messages that came before the future was in the list have woken nobody.
        source.look()
        if ready():
            resolve(self._waiting)
        deadline = source.expiring.get(self)
        timers = [] if deadline is None else [loop.call_later((deadline.left_s() or 0) + CLOCK_S, source.look)]
        if timeout_s is not None:
            timers.append(loop.call_later(timeout_s + CLOCK_S, resolve, [(loop, future)]))
        try:
            yield from future
        finally:
            for timer in timers:
                timer.cancel()

    def wake(self) -> None:
        """Let coroutines that wait for this result look at it. For the source only."""
        if self._waiting:
            resolve(self._waiting)

    def fail(self, error: BaseException) -> None:
        """Complete with an error although messages are still to come. For the source only.

        Values that have arrived are dropped, except failures: those of leaves are reported at the end.
        """
        assert self._values is not None
        for index, value in enumerate(self._values):
            if type(value) is not Failure:
                self._values[index] = None
        self.complete(None, error)

    def end(self) -> None:
        """Note that every message of the execution was read. For the source only."""
        self._values = None
        self.wake()

    @property
    def failed_call(self) -> str | None:
        """Label (of `plan.labels`) of the call that raised the error of this result; None if no method raised."""
        return _ray.raised_at(self._error)

    def _raise(self) -> Any:
        """Raise the error, each time as a new object where it can be copied.

        Other callers may hold the object that was raised before, and its traceback would grow with every raise.
        """
        error = self._error
        assert error is not None
        raised = _ray.raised_form(error)
        if raised is error and isinstance(error, RaylaneError):
            # `copy` does not copy the cause, which holds the remote traceback.
            raised = copy.copy(error)
            raised.__cause__ = error.__cause__
        raise raised.with_traceback(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _identity, (self.get(),)

    def __repr__(self) -> str:
        state = "failed" if self._error is not None else "done" if self._done else "under way"
        return f"GraphResult(execution {self.number}, {state})"


def _identity(value: Any) -> Any:
    return value


class Executions(native.Executions):
    """State of the executions of one graph.

    The submitter adds to `submitted` and `pending`, and the collector ends executions, each in a section of its own. A
    failed execution stays pending until all its messages were read: until then its slots in the rings are in use.
    """

    __slots__ = ("_recorder", "early_failures")

    pending: collections.deque[GraphResult]

    def __init__(self) -> None:
        self._recorder = native.Recorder(1, KEPT_RECORDS)
        super().__init__(collections.deque(), self._recorder)
        self.early_failures: collections.deque[tuple[int, Any]] = collections.deque()
        """(execution, pickled error) of failures reported ahead of the messages of the execution. From any thread."""

    def records(self) -> list[tuple[int, float, float]]:
        """Return (execution, submitted, completed) of the last ones, in seconds of time.perf_counter()."""
        return [(number, submitted, completed) for _, number, submitted, _, _, completed in self._recorder.records()]

    @property
    def inflight(self) -> int:
        """Number of executions under way."""
        return self.submitted - self.completed


def complete_result(plan: Plan, result: GraphResult, values: list[Any]) -> None:
    """Complete a result from its values, unless it has failed before. Errors of leaves are logged and kept with it."""
    if plan.leaves:
        errors = []
        for value, task in plan.leaves:
            if type(values[value]) is Failure:
                errors.append(values[value].error)
                log.error(
                    "execution %d: %s failed; no output needs its result: %s",
                    result.number,
                    plan.labels[task],
                    errors[-1],
                )
        result.leaf_errors = tuple(errors)
    if result._done:
        return
    # The first error in the order of the output, so that the same failure gives the same error each time.
    for value in plan.output_values:
        if type(values[value]) is Failure:
            output, error = None, values[value].error
            break
    else:
        try:
            output, error = operations.evaluate(plan.output, values), None
        except Exception as failure:  # for example a gather of arrays whose shapes do not fit together
            output, error = None, failure
    result.complete(output, error)


def wait(
    results: Sequence[GraphResult], *, num_returns: int = 1, timeout: float | None = None
) -> tuple[list[GraphResult], list[GraphResult]]:
    """Return (done, not done), each in the order given: like `ray.wait`, for results of one or several graphs.

    Waits until `num_returns` are done or for `timeout` seconds (None: the first graph's `timeout`).
    """
    for result in results:
        if not isinstance(result, GraphResult):
            raise TypeError(f"wait: {result!r} is no GraphResult; pass a list of results that execute has returned")
    if not 0 < num_returns <= len(results):
        raise ValueError(f"num_returns must be between 1 and the number of results, {len(results)}, got {num_returns}")
    sources = {id(source): source for result in results if (source := result._source) is not None}
    if sources:
        limit_s = next(iter(sources.values())).timeout_s if timeout is None else timeout
        _collect_all(list(sources.values()), lambda: sum(r._done for r in results) >= num_returns, Deadline(limit_s))
    # Asked again: results may have completed since the condition was checked.
    done = [result for result in results if result.done()]
    return done, [result for result in results if result not in done]


def _collect_all(sources: list[Any], ready: Callable[[], bool], deadline: Deadline) -> None:
    """Read messages of several graphs until `ready` or the deadline.

    Each graph has its own doorbell, so a thread waits for each graph but the first.
    """
    over = False

    def over_or_ready() -> bool:
        return over or ready()

    def collect(source: Any) -> None:
        source.collect_until(over_or_ready, deadline)
        for other in sources:  # their threads sleep, and no message wakes them
            if other is not source:
                other.notify()

    # A thread for each further graph: one thread cannot wait for two semaphores.
    threads = [
        threading.Thread(target=collect, args=(source,), name="raylane-wait", daemon=True) for source in sources[1:]
    ]
    for thread in threads:
        thread.start()
    try:
        sources[0].collect_until(over_or_ready, deadline)
    finally:
        over = True
        for source in sources[1:]:
            source.notify()
        for thread in threads:
            thread.join()

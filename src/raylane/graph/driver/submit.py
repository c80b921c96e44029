"""Submission of executions: checks inputs, waits for capacity, sends the inputs to the actors.

    caller's thread:  enter the section -> encode inputs -> wait for capacity -> append the result -> write messages

The result is appended to the pending ones before the first message is sent: an answer may come before the last input
was written.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from raylane.core.deadline import Deadline
from raylane.core.native import BUSY, Section
from raylane.errors import GraphClosedError, GraphError, GraphFullError, GraphTimeoutError
from raylane.graph.channels.layout import GraphOptions
from raylane.graph.channels.lease import LeasePool
from raylane.graph.channels.published import EdgeWriter, PublishingWriter
from raylane.graph.channels.ring import LEND_FROM_BYTES, WAKE
from raylane.graph.driver import forks
from raylane.graph.driver.collect import CHECK_S, Collector
from raylane.graph.driver.connections import Connections
from raylane.graph.driver.result import Executions, GraphResult
from raylane.graph.plan.ir import INPUT, Plan
from raylane.graph.values import message as messages
from raylane.graph.values.arguments import Arguments
from raylane.graph.values.failures import error_message
from raylane.graph.values.message import Encoder, Message

InputMessage: TypeAlias = tuple[EdgeWriter, Message, int]
"""(writer, message, index of the value)."""
Prepared: TypeAlias = tuple[list[InputMessage], list[Any]]
"""(messages, initial values of the result)."""


class NotAdmitted(GraphFullError):
    """There is no capacity, or no memory. `prepared` are the encoded inputs, for `submit_prepared`."""

    prepared: Prepared | None = None


class Paused(NotAdmitted):
    """The graph is being repaired. `prepared` are the encoded inputs."""


class Pause(NamedTuple):
    """Reason why no execution starts at present."""

    reason: str
    error: GraphError | None = None
    """Error that `execute` raises at once; None if it waits."""


class SubmitBusy(GraphFullError):
    """Another thread is submitting an execution. There may be capacity."""


class NoMemory(NotAdmitted):
    """There is capacity for an execution, but no memory for the input: readers keep too much."""


def has_memory(pool: LeasePool | None, inputs: Sequence[InputMessage]) -> bool:
    """Return True if these messages can be sent without waiting for memory."""
    # Small messages, the usual case, are sorted out without looking at the pool.
    large = [sent for sent in inputs if sent[1].buffers or len(sent[1].body) > LEND_FROM_BYTES]
    leased = [nbytes for writer, message, _ in large if (nbytes := writer.leased_bytes(message))]
    return not leased or pool is None or pool.has_room(leased)


class Submitter:
    """Submission half of a compiled graph. Thread-safe."""

    def __init__(
        self,
        plan: Plan,
        connections: Connections,
        executions: Executions,
        collector: Collector,
        options: GraphOptions,
    ) -> None:
        self._section = Section()
        """One thread at a time submits."""
        self._connections = connections
        self._deadlines = connections.deadlines
        self._lifecycle = connections.lifecycle
        self._executions = executions
        self._collector = collector
        self._max_inflight = options.max_inflight
        self._limit = options.max_inflight
        """Number of executions that may be in flight at present: 0 while the graph is repaired."""
        self._pause: Pause | None = None
        """State of the repair, while it lasts."""
        self._resumed = threading.Event()
        self._resumed.set()
        self._waits_for_capacity = False
        """True while the thread that runs the section waits, and changes nothing."""
        self._arguments = Arguments(plan)
        self._encode = Encoder().encode
        self._fatal = plan.fatal_values
        self._empty: list[Any] = [None] * len(plan.values)
        self._collected_inputs = [v for v in plan.collects if plan.values[v].source == INPUT]
        """Input values that are outputs too."""
        self._inputs = [
            (writer, writer.encode if isinstance(writer, PublishingWriter) else self._encode, value)
            for writer, value in connections.inputs
        ]
        """(writer, encoder, value) of each input."""
        forks.register(self)

    def submit(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float | None, deadline: Deadline | None = None
    ) -> GraphResult:
        """Start one execution, which fails at `deadline`.

        Waits at most `timeout_s` seconds for capacity (0: raises GraphFullError instead).
        """
        if self._lifecycle.error is not None:
            raise self._ended()
        result: GraphResult = self._section.run(0, self._submit, args, kwargs, timeout_s, None, deadline)
        if result is BUSY:
            result = self._submit_after_wait(args, kwargs, timeout_s, None, deadline)
        return result

    def submit_prepared(self, prepared: Prepared, deadline: Deadline | None) -> GraphResult:
        """Start an execution whose inputs an earlier attempt has encoded. Does not wait, and raises like `submit`."""
        result: GraphResult = self._section.run(0, self._submit, (), {}, 0, prepared, deadline)
        if result is BUSY:
            result = self._submit_after_wait((), {}, 0, prepared, deadline)
        return result

    def _submit(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout_s: float | None,
        prepared: Prepared | None,
        deadline: Deadline | None,
        admission: Deadline | None = None,
    ) -> GraphResult:
        """Encode the inputs, unless they are, wait for capacity, and send them.

        `admission` is the end of the wait for capacity, if `timeout_s` has begun before.
        """
        if prepared is None:
            # Before the wait for capacity: an error in an input is raised at once.
            arguments, values = self._arguments.values(args, kwargs), self._empty.copy()
            for value in self._collected_inputs:
                # A copy, as if the input had travelled: the caller may change its object before it gets the result.
                values[value] = messages.duplicate(self._encode(arguments[value]))
            inputs: list[InputMessage] = []
            for writer, encode, value in self._inputs:
                inputs.append((writer, encode(arguments[value]), value))
        else:
            inputs, values = prepared
        executions, collector = self._executions, self._collector
        if timeout_s == 0 or executions.submitted - executions.completed >= self._limit:
            self._wait_for_capacity(inputs, values, timeout_s, admission)
        number = executions.submitted
        # Outside of asyncio no message needs to wake a loop, and the actors save a system call.
        wakes = collector.bridge.active and asyncio._get_running_loop() is not None
        flags = WAKE if wakes else 0
        result = GraphResult(collector, number, collector.edge_count, values, wakes)
        try:
            if self._deadlines.used or deadline is not None:
                self._set_deadline(number, deadline)
            executions.pending.append(result)  # before the first message: its answer may come at once
            executions.submitted = number + 1
            if deadline is not None and deadline.at < math.inf:
                collector.expire(result, deadline)
            for writer, message, value in inputs:
                try:
                    writer.write(number, message, flags)
                except (GraphError, OSError, MemoryError) as error:  # too large, or no memory: this execution fails
                    # The readers of this edge wait for message `number`, so they get the error in its place.
                    failure = error_message(error, "execute")
                    writer.write(number, failure, flags)
                    if value in self._fatal:
                        executions.early_failures.append((number, failure.body))
                        collector.notify()
        except BaseException as error:
            self._interrupted(number, error)
            raise
        return result

    def _set_deadline(self, number: int, deadline: Deadline | None) -> None:
        """Show the actors the deadline of an execution, or that it has none."""
        if deadline is None or deadline.at == math.inf:
            self._deadlines.clear(number)
        else:
            self._deadlines.set(number, deadline.at)

    def _wait_for_capacity(
        self, inputs: list[InputMessage], values: list[Any], timeout_s: float | None, admission: Deadline | None
    ) -> None:
        try:
            deadline = admission or Deadline(timeout_s)
            # Again after each wait: the graph may have been paused since the thread has seen that it may go on.
            while not self._has_capacity():
                self._raise_if_halted()
                self._waits_for_capacity = True
                try:
                    admitted = self._collector.collect_until(self._has_capacity_or_halted, deadline)
                finally:
                    self._waits_for_capacity = False
                if not admitted:
                    raise self._not_admitted(timeout_s)
            if timeout_s == 0 and not has_memory(self._connections.pool, inputs):
                raise NoMemory(
                    "no memory for this input: readers keep arrays that they received. Try again, or drop those arrays"
                )
        except NotAdmitted as error:
            error.prepared = inputs, values
            raise
        if self._lifecycle.error is not None:  # again: the graph may have ended during the wait
            raise self._ended()

    def _has_capacity(self) -> bool:
        # A graph that has ended admits the thread, which then raises the reason.
        return self._executions.inflight < self._limit or self._lifecycle.error is not None

    def _has_capacity_or_halted(self) -> bool:
        pause = self._pause
        return self._has_capacity() or (pause is not None and pause.error is not None)

    def _raise_if_halted(self) -> None:
        pause = self._pause
        if pause is not None and pause.error is not None:
            raise type(pause.error)(pause.error.message, **pause.error.fields)

    def _not_admitted(self, timeout_s: float | None) -> GraphError:
        """Return the error for an execution that got no capacity."""
        if timeout_s != 0:
            return self.timeout_error(timeout_s)
        pause = self._pause
        if pause is not None:
            return Paused(f"{pause.reason}: try again later, or call execute, which waits")
        return NotAdmitted(
            f"{self._max_inflight} executions are under way, which is max_inflight: get a result first, or call "
            "execute, which waits"
        )

    # Repair

    def pause(self, pause: Pause) -> None:
        """Start no execution from now on, for this reason. From any thread. A second call replaces the reason."""
        self._resumed.clear()
        self._pause = pause
        self._limit = 0
        if pause.error is not None:
            self._resumed.set()
            self._collector.notify()

    def resume(self) -> None:
        """Start executions again. From any thread."""
        self._limit = self._max_inflight
        self._pause = None
        self._resumed.set()
        self._collector.notify()

    def is_quiet(self) -> bool:
        """Return True if no thread writes messages, after `pause`: then none does until `resume`."""
        return not self._section.locked or self._waits_for_capacity

    def wait_until_resumed(self, timeout_s: float | None) -> None:
        """Wait until the graph is repaired or has ended, at most `timeout_s` and CHECK_S seconds. Runs on a thread."""
        self._resumed.wait(CHECK_S if timeout_s is None else min(timeout_s, CHECK_S))

    def _submit_after_wait(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout_s: float | None,
        prepared: Prepared | None,
        deadline: Deadline | None,
    ) -> GraphResult:
        """Submit like `_submit`, after the wait for a thread that submits at the moment."""
        if self._section.runs_here():
            raise GraphError(
                "execute was called while the same thread sends an input of the same graph: the code that pickles an "
                "input (__reduce__ or __getstate__) uses the graph. Execute before, and pass the result"
            )
        if timeout_s == 0:
            raise SubmitBusy("another thread is submitting an execution: try again, or call execute, which waits")
        wait_s = math.inf if timeout_s is None else timeout_s
        admission = Deadline(timeout_s)  # before the wait for the other thread, which is a part of it
        result: GraphResult = self._section.run(
            wait_s, self._submit, args, kwargs, timeout_s, prepared, deadline, admission
        )
        if result is BUSY:
            raise self.timeout_error(timeout_s)
        return result

    def wait_until_free(self, timeout_s: float | None) -> None:
        """Wait until no other thread is submitting, at most `timeout_s` and CHECK_S seconds. Runs on a thread."""
        self._section.run(CHECK_S if timeout_s is None else min(timeout_s, CHECK_S), int)

    def release_memory(self, timeout_s: float) -> None:
        """Free the memory of an ended graph. Waits a second, or `timeout_s`, for a thread that submits."""
        self._section.run(min(timeout_s, CHECK_S), self._connections.release_memory)

    def _interrupted(self, number: int, error: BaseException) -> None:
        """End the graph after an interrupted submission, for example by Ctrl-C.

        Some actors have the inputs of the execution and others do not: later executions would get these inputs.
        """
        self._collector.fail(
            GraphClosedError(
                f"execution {number} was interrupted while it was submitted: {messages.error_text(error, repr)}"
            )
        )

    def disown(self) -> None:
        """Free the section in a forked child: a thread of the parent may run it."""
        self._section.reset()

    def _ended(self) -> GraphError:
        """Return the error that ended the graph, as a new object."""
        error = self._lifecycle.error
        assert error is not None
        return type(error)(error.message, **error.fields)

    def timeout_error(self, timeout_s: float | None) -> GraphTimeoutError:
        """Return the error for an execution that got no capacity in `timeout_s` seconds."""
        pause = self._pause
        if pause is not None:
            return GraphTimeoutError(
                f"{pause.reason}, for longer than {timeout_s} s. Nothing was started: execute again, or raise timeout"
            )
        return GraphTimeoutError(
            f"{self._max_inflight} executions were under way for {timeout_s} s: "
            f"{self._collector.describe_wait(self._executions.completed)}. Nothing was started; raise timeout, or "
            "look for a slow call in stats()"
        )

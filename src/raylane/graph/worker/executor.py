"""Executor of one graph in one actor: waits for the values of the next task, calls the method, sends what it returns.

    advance():  read messages that are here --> all inputs of the next task? --> call the method --> write the results
                                                 no: return False

An `Executor` is a state machine that never waits for a message. Only the graph loop's thread uses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import CoroutineType
from typing import Any

import ray

from raylane import _ray
from raylane.core import native
from raylane.core.deadline import Deadline
from raylane.errors import GraphActorDiedError, GraphError, GraphPlanError, GraphTimeoutError, GraphValueError
from raylane.graph.channels.deadlines import ExecutionDeadlines
from raylane.graph.channels.lease import PoolFull, SegmentGone
from raylane.graph.channels.published import EdgeWriter, PublishingWriter, fetched_edge
from raylane.graph.channels.ring import WAKE, ProcessDoorbell, RingReader
from raylane.graph.collectives import Collective
from raylane.graph.lifecycle import EXECUTOR_TRANSITIONS, ExecutorEvent, ExecutorState
from raylane.graph.plan.ir import DRIVER, Edge, Plan, Ref, Step, Task
from raylane.graph.values import message as messages
from raylane.graph.values import operations, shares
from raylane.graph.values.failures import Failure, error_message, raised_message
from raylane.graph.values.message import ERROR, TICKET, Encoder, Message
from raylane.graph.worker.fetches import Fetches

log = logging.getLogger("raylane.graph")

KEPT_RECORDS = 8192
"""Number of past tasks that are kept for `trace`; each is a tuple of six numbers."""

_UNLOCKED = contextlib.nullcontext()


class InboundEdge:
    """One edge into this actor."""

    __slots__ = ("bytes", "edge", "fatal", "label", "lost_before", "read", "reader", "skipped", "value", "writer")

    def __init__(self, edge: Edge, reader: RingReader, label: str, fatal: bool) -> None:
        self.edge = edge.index
        self.writer = edge.writer
        """Member that computes the value; a relay may pass it on."""
        self.lost_before = 0
        """Number of an execution: of earlier ones, messages that have not arrived are lost, because the writer died."""
        self.reader = reader
        self.skipped = reader.sequence
        """Number of messages that were not read here: lost ones, and those of executions before this process."""
        self.read = reader.read
        self.value = edge.value
        """Index of the value that the edge carries."""
        self.label = label
        self.fatal = fatal
        """True if the execution fails when the message cannot be read."""
        self.bytes = 0
        """Bytes of unusual messages; the reader counts the others."""


class OutboundEdge:
    """One edge out of a task: the steps that select its value from the task's result, and its writer."""

    __slots__ = ("encode", "fatal", "kept", "reports", "steps", "write")

    def __init__(
        self, steps: tuple[Step, ...], writer: EdgeWriter, encoder: Encoder, fatal: bool, to_driver: bool
    ) -> None:
        self.steps = steps
        self.fatal = fatal
        """True if the execution fails when the message cannot be sent."""
        self.reports = fatal and not to_driver
        """True if such a failure must be reported to the driver, because the edge does not lead there."""
        self.write = writer.write
        self.encode: Callable[[Any], Message] = encoder.encode
        self.kept: Callable[[int, Message], Message] = _copied
        """Function (sequence, message) that returns a message in memory of its own."""
        if isinstance(writer, PublishingWriter):
            self.encode, self.kept = writer.encode, writer.published


@dataclass(slots=True)
class _BlockedSend:
    """Messages of a task that wait for memory. Meanwhile the actor serves its other graphs."""

    task: PreparedTask
    waiting: list[tuple[OutboundEdge, Message]]
    """Messages in order. Each has memory of its own, because code of the actor runs before they are sent."""
    deadline: Deadline


@dataclass(slots=True, eq=False)
class PreparedTask:
    """One task with everything that is looked up once."""

    task: Task
    label: str
    call: Callable[..., Any]
    inputs: list[InboundEdge]
    """Edges whose message no earlier task of the same execution reads."""
    index: int = field(init=False)
    reads: tuple[int, ...] = field(init=False)
    single_argument: int | None = field(init=False)
    """Index of the value that is the one argument: the usual case, which needs no evaluation."""
    reports: bool = False
    """True if a failure of the call must be reported to the driver, because none of its edges does so."""
    outputs: list[OutboundEdge] = field(default_factory=list)
    local: list[tuple[int, tuple[Step, ...], bool]] = field(default_factory=list)
    """(value, steps, fatal) for each value of this task that later tasks of this actor use without a channel."""
    done_with: list[int] = field(default_factory=list)
    """Values that no later task of this actor reads; left empty for its last task, after which all values go."""

    def __post_init__(self) -> None:
        task = self.task
        self.index, self.reads = task.index, task.reads
        alone = len(task.args) == 1 and not task.kwargs and isinstance(task.args[0], Ref)
        self.single_argument = task.reads[0] if alone and len(task.reads) == 1 else None


class Executor:
    """State machine of one graph in this actor. `advance` makes one step."""

    before_user_code: Callable[[], None] | None = None
    """Hook that applies this graph's thread settings, if the actor has graphs of different settings."""
    _exiting = False
    """True after a method has asked its actor to exit."""
    _blocked: _BlockedSend | None = None

    def __init__(
        self,
        plan: Plan,
        member: int,
        instance: Any,
        readers: Mapping[int, RingReader],
        writers: Mapping[int, EdgeWriter],
        *,
        loop: asyncio.AbstractEventLoop | None,
        lock: Any | None,
        on_exit: Callable[[], None],
        on_failure: Callable[[int, Message, int], None],
        timeout_s: float | None,
        doorbell: ProcessDoorbell | None = None,
        first_execution: int = 0,
        deadlines: ExecutionDeadlines | None = None,
    ) -> None:
        """Prepare all tasks of `member`. `readers` and `writers` are those of its edges.

        `loop` runs coroutine methods; `lock` is held around methods of an exclusive graph; `on_exit` is called when a
        method has asked the actor to end, `on_failure` (execution, error, flags) when an execution is known to fail;
        transfers of tensors post `doorbell` at their end.
        """
        fatal_here = plan.fatal_inputs(member)
        self.plan = plan
        self.member = member
        self.execution = first_execution
        """Number of the execution that the next task belongs to."""
        self.recorder = native.Recorder(len(plan.tasks), KEPT_RECORDS)
        self.inbound = {
            edge: InboundEdge(plan.edges[edge], reader, plan.source_label(value), value in fatal_here)
            for edge, reader in readers.items()
            for value in [plan.edges[edge].value]
        }
        fetched = {edge.index: fetched_edge(plan, edge, member, timeout_s) for edge in plan.edges_to(member)}
        self.fetches = Fetches(
            {edge: edge_fetch for edge, edge_fetch in fetched.items() if edge_fetch is not None}, doorbell
        )
        """Tensors that are on their way."""
        self._asyncio_loop = loop
        self._lock = lock
        self._callbacks = on_exit, on_failure
        self._reported = -1
        """Last execution whose failure was reported."""
        self._timeout_s = timeout_s
        self._deadlines = deadlines
        self._encoder = Encoder()
        self.values: list[Any] = [None] * len(plan.values)
        """Values of the current execution; the prepared list is copied for each."""
        self.flags = 0
        """Flags of all messages of the current execution, for the messages that it sends."""
        self.tasks = self._prepare(instance, writers)
        self._next = 0
        """Position of the next task in `_tasks`."""
        self._task = self.tasks[0]
        self._missing = self._task.inputs.copy()
        """Edges whose message the next task still needs."""
        self.state = ExecutorState.READY
        self._steps: tuple[Callable[[], bool], ...] = (self._run_next, self._send_blocked, _do_nothing)
        self.advance = self._steps[self.state]
        """Function that takes the next step of the present state. It returns False if there was nothing to do."""

    def _failed(self, message: Message, report: bool) -> Message:
        """Return the message of an error that has arisen here; report it to the driver first if `report`.

        The report lets the result fail at once: the message itself travels along the edges and waits wherever values
        wait.
        """
        # One report for each execution: the reports ring has one slot for it.
        if report and self._reported != self.execution:
            self._reported = self.execution
            self._callbacks[1](self.execution, message, self.flags)
        return message

    def _prepare(self, instance: Any, writers: Mapping[int, EdgeWriter]) -> list[PreparedTask]:
        plan, arrived, prepared = self.plan, set[int](), []
        by_value = {plan.edges[edge].value: inbound for edge, inbound in self.inbound.items()}
        own_tasks = plan.order[self.member]
        used_here = {value for index in own_tasks for value in plan.tasks[index].reads}
        # By their task, because a graph may have thousands of values and edges.
        local, outputs = defaultdict[int, list[Any]](list), defaultdict[int, list[OutboundEdge]](list)
        for value in plan.values:
            if value.index in used_here:
                local[value.source].append((value.index, value.steps, value.index in plan.fatal_values))
        for number, writer in writers.items():
            edge = plan.edges[number]
            value = plan.values[edge.value]
            fatal, to_driver = value.index in plan.fatal_values, DRIVER in edge.readers
            outputs[value.source].append(OutboundEdge(value.steps, writer, self._encoder, fatal, to_driver))
        for index in own_tasks:
            task = plan.tasks[index]
            # A value that an earlier task of the execution has read is here already.
            inputs = [by_value[read] for read in task.reads if read in by_value and read not in arrived]
            arrived.update(inbound.value for inbound in inputs)
            collective = task.collective
            call = method_of(instance, task.method) if collective is None else function_of(plan, collective)
            prepared_task = PreparedTask(task, plan.labels[index], call, inputs)
            prepared_task.local.extend(local[index])
            prepared_task.outputs.extend(outputs[index])
            seen_by_driver = any(edge.fatal and not edge.reports for edge in prepared_task.outputs)
            # The driver reads errors on its own edges anyway; a report would only come twice.
            prepared_task.reports = index in plan.fatal_tasks and not seen_by_driver
            prepared.append(prepared_task)
        last_readers = {read: prepared_task for prepared_task in prepared for read in prepared_task.reads}
        for read, reader in last_readers.items():
            if reader is not prepared[-1]:
                reader.done_with.append(read)
        return prepared

    def _enter(self, event: ExecutorEvent) -> None:
        self.state = EXECUTOR_TRANSITIONS[self.state, event]
        self.advance = self._steps[self.state]

    def _run_next(self) -> bool:
        """Run the next task if all its inputs are here. Return False if there was nothing to do."""
        # An edge whose message has arrived is removed, so that the next call does not poll it again.
        missing = self._missing
        while missing:
            inbound = missing[-1]
            try:
                message = inbound.read(self.values, inbound.value, self.before_user_code)
                if message is None:
                    if self.execution >= inbound.lost_before:
                        return False
                    inbound.reader.sequence += 1
                    inbound.skipped += 1
                    self.values[inbound.value] = self._lost(inbound, inbound.writer)
                elif type(message) is int:
                    self.flags |= message
                else:
                    self._read(inbound, *message)
            except SegmentGone:
                self.values[inbound.value] = self._lost(inbound, inbound.reader.writer)
            except native.DamagedRing:
                raise
            except BaseException as error:  # out of descriptors or memory, or an error of unpickling
                self.values[inbound.value] = self._unreadable(error, inbound)
            missing.pop()
        if self.fetches.pending and not self._take_fetched():
            return False
        deadlines = self._deadlines
        # The word is looked at here, because most executions have no deadline.
        refused = deadlines is not None and deadlines.words[self.execution % deadlines.slots] != 0
        self._run(self._task, self._refusal(self._task) if refused else None)
        self._end_task()
        return True

    def mark_dead(self, members: Collection[int], execution: int) -> None:
        """Treat messages that these members have not sent before `execution` as lost. Their processes have ended."""
        for inbound in self.inbound.values():
            if inbound.writer in members:
                inbound.lost_before = execution

    def has_run_all_before(self, execution: int) -> bool:
        """Return True if the next task is the first one of `execution`."""
        return self.execution == execution and self._next == 0

    @property
    def needs_polling(self) -> bool:
        """True while a message waits for memory: readers post no doorbell when they return memory.

        Also while tensors are on their way: their doorbell has no flag.
        """
        return self._blocked is not None or bool(self.fetches.pending)

    def _end_task(self) -> None:
        """Go to the next task, unless messages of this one wait for memory."""
        if self._blocked is not None:
            return
        # The reset at the end of an execution comes before the next one begins: values of two never mix.
        self._next += 1
        if self._exiting:
            self._enter(ExecutorEvent.STOP)
            self._callbacks[0]()
            return
        if self._next == len(self.tasks):
            self._next = 0
            self.execution += 1
            self.flags = 0
            self.values = [None] * len(self.values)
        self._task = self.tasks[self._next]
        self._missing = self._task.inputs.copy()

    def _read(self, inbound: InboundEdge, kind: int, flags: int, body: bytes | None) -> None:
        """Take over an unusual message, or start to fetch its tensors."""
        self.flags |= flags & WAKE
        if self.before_user_code is not None:  # unpickling runs code of the value's class, and creates tensors
            self.before_user_code()
        received = inbound.reader.received(kind, flags, body)
        inbound.bytes += received.nbytes
        if kind == TICKET:
            inbound.bytes += self.fetches.start(inbound.edge, inbound, received.body)
            return
        # An error is not decoded here but passed on as it is: this actor may lack the error's class.
        self.values[inbound.value] = (
            Failure(Message(ERROR, bytes(received.body)))
            if kind == ERROR
            else messages.decode(kind, received.body, received.buffers, shared=received.shared)
        )

    def _take_fetched(self) -> bool:
        """Take over the tensors that have arrived. Return False if some are still on their way."""
        fetched = self.fetches.take()
        if fetched is None:
            return False
        if self.before_user_code is not None:
            self.before_user_code()
        for inbound, fetch in fetched:
            try:
                value = fetch.value()
            except SegmentGone:
                value = self._lost(inbound, inbound.writer)
            except GraphError as error:  # of the transport
                value = Failure(self._failed(error_message(error, self.plan.members[self.member]), inbound.fatal))
            except BaseException as error:
                value = self._unreadable(error, inbound)
            self.values[inbound.value] = value
        return True

    def _lost(self, inbound: InboundEdge, writer: int) -> Failure[Message]:
        """Return the failure for a message whose sender has ended. The driver finds the actor by the field `member`."""
        me = self.plan.members[self.member]
        error = GraphActorDiedError(
            f"{self.plan.members[writer]} ended before {me} had read {inbound.label}", member=writer
        )
        return Failure(self._failed(error_message(error, me), inbound.fatal))

    def _unreadable(self, error: BaseException, inbound: InboundEdge) -> Failure[Message]:
        """Return the Failure of a message that could not be unpickled."""
        me = self.plan.members[self.member]
        refused = GraphValueError(f"{inbound.label} could not be unpickled by {me}: {messages.error_text(error, repr)}")
        return Failure(self._failed(error_message(refused, me), inbound.fatal))

    def _refusal(self, task: PreparedTask) -> Failure[Message] | None:
        """Return the failure of a call that must not begin, because its execution was cancelled or is too late."""
        assert self._deadlines is not None
        error = self._deadlines.refusal(self.execution, task.label)
        return None if error is None else Failure(self._failed(error_message(error, task.label), task.reports))

    def _run(self, task: PreparedTask, refusal: Failure[Message] | None = None) -> None:
        """Call the method and send its result, or pass on the failure of an input, or a refusal to call."""
        values, recorder = self.values, self.recorder
        if self.before_user_code is not None:
            self.before_user_code()
        recorder.started()
        try:
            if refusal is not None:
                result: Any = refusal
            elif task.single_argument is None or self._lock is not None:
                result = self._call(task, values)
            elif type(result := values[task.single_argument]) is not Failure:
                result = task.call(result)
            if type(result) is CoroutineType:
                result = self._run_coroutine(result)
        except BaseException as error:  # a cancelled coroutine too: a failed call must not end the loop
            result = self._call_failed(task, error)
        recorder.returned()
        # Memory of large values is used again within the execution.
        for value in task.done_with:
            values[value] = None
        # Values for this actor are stored before messages are sent: a send may fail or wait for memory.
        for value, steps, fatal in task.local:
            values[value] = self._selected(result, steps, task, fatal)
        for edge in task.outputs:
            selected = self._selected(result, edge.steps, task, edge.reports) if edge.steps else result
            try:
                message = selected.error if type(selected) is Failure else edge.encode(selected)
                edge.write(self.execution, message, self.flags)
            except PoolFull:
                # The rest is encoded now: code of the actor may change the values before there is memory.
                later = task.outputs[task.outputs.index(edge) :]
                waiting = [(edge, self._message(edge, result, task)) for edge in later]
                self._blocked = _BlockedSend(task, waiting, Deadline(self._timeout_s))
                self._enter(ExecutorEvent.BLOCK)
                return
            except BaseException as error:
                if type(selected) is Failure:  # an error above max_lent_bytes
                    message = messages.small_error(selected.error)
                else:
                    # The value cannot be pickled, is too large, or there is no memory. The readers wait for a message
                    # of this execution, so they get the error.
                    message = self._failed(error_message(error, task.label), edge.reports)
                edge.write(self.execution, message, self.flags)
        recorder.sent(task.index, self.execution)

    def _send_blocked(self) -> bool:
        """Send messages that wait for memory; False if none could be sent."""
        blocked = self._blocked
        assert blocked is not None
        sent = False
        while blocked.waiting:
            edge, message = blocked.waiting[0]
            try:
                edge.write(self.execution, message, self.flags)
            except PoolFull as full:
                if blocked.deadline.left_s() != 0:
                    return sent
                timeout = GraphTimeoutError(full.reason)
                message = self._failed(error_message(timeout, blocked.task.label), edge.fatal)
                edge.write(self.execution, message, self.flags)
            except BaseException as error:
                # Even a small error cannot be written: the loop ends this graph.
                if message.kind == ERROR:
                    edge.write(self.execution, messages.small_error(message), self.flags)
                    blocked.waiting.pop(0)
                    continue
                blocked.waiting[0] = edge, self._failed(error_message(error, blocked.task.label), edge.fatal)
                continue
            blocked.waiting.pop(0)
            sent = True
        self._blocked = None
        self._enter(ExecutorEvent.RESUME)
        self.recorder.sent(blocked.task.index, self.execution)
        self._end_task()
        return True

    def _call(self, task: PreparedTask, values: list[Any]) -> Any:
        """Call the method with its evaluated arguments, or return the first failure that it reads."""
        for value in task.reads:
            if type(values[value]) is Failure:
                return values[value]
        results: dict[int, Any] = {}
        args = [operations.evaluate(expression, values, results) for expression in task.task.args]
        kwargs = {key: operations.evaluate(value, values, results) for key, value in task.task.kwargs}
        with self._lock or _UNLOCKED:
            return task.call(*args, **kwargs)

    def _call_failed(self, task: PreparedTask, error: BaseException) -> Failure[Message]:
        """Return the Failure of a call that has raised `error`."""
        if isinstance(error, SystemExit | ray.exceptions.AsyncioActorExit):  # ray.actor.exit_actor
            # Ray ends the actor later; until then no method of this graph may run.
            self._exiting = True
            exited = GraphError(f"{task.label} exited its actor")
            return Failure(self._failed(error_message(exited, task.label), False))
        return Failure(self._failed(raised_message(error, task.label), task.reports))

    def _run_coroutine(self, coroutine: Any) -> Any:
        """Run a coroutine method on the actor's own event loop, as Ray does. Other calls of the actor run meanwhile."""
        if self._asyncio_loop is None:  # a method of an ordinary actor that returns a coroutine
            return asyncio.run(coroutine)
        return asyncio.run_coroutine_threadsafe(coroutine, self._asyncio_loop).result()

    def _selected(self, result: Any, steps: tuple[Step, ...], task: PreparedTask, fatal: bool) -> Any:
        if type(result) is Failure or not steps:
            return result
        try:
            return operations.select(result, steps)
        except Exception as error:
            return Failure(self._failed(error_message(error, task.label), fatal))

    def _message(self, edge: OutboundEdge, result: Any, task: PreparedTask) -> Message:
        """Return the message of a result for an edge, in memory of its own."""
        result = self._selected(result, edge.steps, task, edge.fatal)
        try:
            if type(result) is Failure:
                error: Message = result.error
                return error
            return edge.kept(self.execution, edge.encode(result))
        except BaseException as error:
            return self._failed(error_message(error, task.label), edge.fatal)

    def close(self) -> None:
        """Stop: `advance` does nothing any more, and blocked messages are dropped."""
        self._steps = (_do_nothing, _do_nothing, _do_nothing)  # cuts the cycle of references, as below
        self._enter(ExecutorEvent.STOP)
        self._blocked = None
        self.fetches.close()
        # The callbacks are methods of the session, which holds this executor: cut the cycle to free memory now.
        self._callbacks = (lambda: None), (lambda execution, error, flags: None)

    def stats(self) -> dict[str, Any]:
        """Return the counters of tasks and inbound edges, for the driver."""
        totals = {prepared.index: self.recorder.totals(prepared.index) for prepared in self.tasks}
        tasks = {
            task: {"count": count, "wait_s": wait, "compute_s": compute, "send_s": send}
            for task, (count, wait, compute, send) in totals.items()
        }
        edges = {
            edge: {
                "count": inbound.reader.sequence - inbound.skipped,
                "bytes": inbound.reader.read_bytes + inbound.bytes,
            }
            for edge, inbound in self.inbound.items()
        }
        return {"tasks": tasks, "received": edges}


def _copied(sequence: int, message: Message) -> Message:
    return message.copied()


def _do_nothing() -> bool:
    return False


def function_of(plan: Plan, collective: Collective) -> Callable[..., Any]:
    """Return the function that computes a part of a collective."""
    if collective.role == "share":
        return functools.partial(shares.share, collective)
    return functools.partial(shares.combine, collective, [plan.members[member] for member in collective.members])


def method_of(instance: Any, name: str) -> Callable[..., Any]:
    """Return the bound method `name`. GraphPlanError if there is none, or if it is a generator."""
    method = _ray.untraced_method(instance, name)
    kind = type(instance).__name__
    if not callable(method):
        known = [
            key for key in dir(type(instance)) if not key.startswith("_") and callable(getattr(instance, key, None))
        ]
        raise GraphPlanError(f"{kind} has no method {name!r}; it has {', '.join(known)}")
    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        raise GraphPlanError(f"cannot call {kind}.{name} in a graph: it is a generator. Return a list instead")
    call: Callable[..., Any] = method
    return call

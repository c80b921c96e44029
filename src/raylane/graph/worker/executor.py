"""One graph in one actor: waits for the values that the next task needs, calls the method, sends what it returns.

A `Resident` is a state machine that never waits for a message: `advance` does what can be done now and says whether it
did anything. The lane's thread is the only one that touches it. Called by `lane`.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import inspect
import logging
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from types import CoroutineType
from typing import Any

import ray

from raylane import _ray
from raylane.core.deadline import Deadline
from raylane.core.semaphore import try_wait
from raylane.errors import GraphActorDiedError, GraphError, GraphPlanError, GraphTimeoutError, GraphValueError
from raylane.graph.channels.lease import NoRoom, SegmentGone
from raylane.graph.channels.ring import WAKE, RingReader, Taken
from raylane.graph.plan.ir import DRIVER, Plan, Ref, Step, Task
from raylane.graph.values import message as m
from raylane.graph.values import operations as ops
from raylane.graph.values.message import ERROR, NOTHING, VALUE, Encoder, Message

log = logging.getLogger("raylane.graph")

KEPT_RECORDS = 8192
"""Records of past tasks kept for `trace`; each is a tuple of six numbers."""


_NO_GUARD = contextlib.nullcontext()


class Failure:
    """In the place of a value: the error that came instead, as it will be passed on."""

    __slots__ = ("message",)

    def __init__(self, message: Message) -> None:
        self.message = message


class _Inbound:
    """One edge into this actor. `value` is where its messages go."""

    __slots__ = ("bytes", "count", "fatal", "full", "label", "reader", "value")

    def __init__(self, reader: RingReader, value: int, label: str, fatal: bool) -> None:
        self.reader = reader
        self.full = reader.full
        self.value = value
        self.label = label
        self.fatal = fatal
        """True if the result fails when the message cannot be read."""
        self.count = 0
        self.bytes = 0


class _Send:
    """One edge out of a task: what to select from its result, and the writer."""

    __slots__ = ("fatal", "steps", "tells", "write")

    def __init__(self, steps: tuple[Step, ...], write: Callable[..., None], fatal: bool, to_driver: bool) -> None:
        self.steps = steps
        self.fatal = fatal
        """True if the result fails when the message cannot be sent."""
        self.tells = fatal and not to_driver
        """True if the driver must be told of that: this edge does not lead to it."""
        self.write = write


class _Unsent:
    """Messages of a task for which there was no memory yet. While they wait, the actor serves its other graphs."""

    __slots__ = ("deadline", "returned", "started", "waiting", "work")

    def __init__(self, work: _Work, waiting: list[tuple[_Send, Message]], deadline: Deadline, times: Any) -> None:
        self.work = work
        self.waiting = waiting
        """In order; each in memory of its own, because code of the actor runs before they are sent."""
        self.deadline = deadline
        self.started, self.returned = times


class _Work:
    """One task, ready to run."""

    __slots__ = ("call", "index", "label", "local", "needs", "only", "reads", "sends", "task", "tells", "total")

    def __init__(self, task: Task, label: str, call: Callable[..., Any], needs: Sequence[_Inbound]) -> None:
        self.task = task
        self.tells = False
        """True if the result fails with this call, and no edge leads from the call to the driver."""
        self.label = label
        self.call = call
        self.index = task.index
        self.needs = list(needs)
        """Edges whose message no earlier task of an execution has taken."""
        self.total: list[float] = [0, 0.0, 0.0, 0.0]
        """Calls; seconds waited, computed, sent."""
        self.reads = task.reads
        alone = len(task.args) == 1 and not task.kwargs
        self.only: int | None = task.args[0].value if alone and isinstance(task.args[0], Ref) else None
        """The value that is the one argument, the usual case."""
        self.sends: list[_Send] = []
        self.local: list[tuple[int, tuple[Step, ...], bool]] = []
        """Values of this task that later tasks of this actor use: they do not travel."""


class Resident:
    """See above. `taken` counts messages, for the lane's account of its doorbell."""

    def __init__(
        self,
        plan: Plan,
        member: int,
        instance: Any,
        readers: dict[int, RingReader],
        writers: dict[int, Callable[[int, Message, int], None]],
        *,
        loop: asyncio.AbstractEventLoop | None,
        guard: contextlib.AbstractContextManager[Any] | None,
        exit: Callable[[], object],
        tell: Callable[[int, Message, int], None],
        timeout_s: float | None = None,
    ) -> None:
        """`exit` is called when a method asks for its actor to exit; `tell` when the result of an execution fails here,
        once an execution at most and before any other member can know; `timeout_s` limits the wait for memory."""
        self.plan = plan
        self.member = member
        self.sequence = 0
        self.taken = 0
        self.records: collections.deque[tuple[int, int, float, float, float, float]] = collections.deque(
            maxlen=KEPT_RECORDS
        )
        """(task, execution, idle since, started, returned, sent), seconds on the monotonic clock."""
        self.inbound = {
            edge: _Inbound(reader, value, plan.source_label(value), self._is_fatal_here(value))
            for edge, reader in readers.items()
            for value in [plan.edges[edge].value]
        }
        self._loop = loop
        self._guard = guard
        self._exit = exit
        self._exiting = False
        self._tell = tell
        self._told = -1
        """The last execution for which `tell` was called."""
        self._timeout_s = timeout_s
        self.enter: Callable[[], None] | None = None
        """Called before code of the actor runs, if the lane has graphs of different thread settings."""
        self._unsent: _Unsent | None = None
        self._encoder = Encoder()
        self._empty: list[Any] = [None] * len(plan.values)
        self._values = self._empty.copy()
        self._flags = 0
        self._work = self._prepare(instance, writers)
        self._next = 0
        self._missing = self._work[0].needs.copy()
        """Edges whose message the next task still needs."""
        self._idle_since = time.perf_counter()

    def _is_fatal_here(self, value: int) -> bool:
        tasks = self.plan.order[self.member]
        return any(value in self.plan.tasks[task].reads for task in tasks if task in self.plan.fatal_tasks)

    def _failed(self, message: Message, tell: bool) -> Message:
        """Something has failed here first. The driver is told at once: the failure itself goes the way of the values
        and waits wherever they wait."""
        if tell and self._told != self.sequence:
            self._told = self.sequence
            self._tell(self.sequence, message, self._flags)
        return message

    def _prepare(self, instance: Any, writers: dict[int, Callable[[int, Message, int], None]]) -> list[_Work]:
        plan, arrived, prepared = self.plan, set[int](), []
        by_value = {plan.edges[edge].value: inbound for edge, inbound in self.inbound.items()}
        mine = plan.order[self.member]
        wanted = {value for index in mine for value in plan.tasks[index].reads}
        for index in mine:
            task = plan.tasks[index]
            needs = [by_value[value] for value in task.reads if value in by_value and value not in arrived]
            arrived.update(inbound.value for inbound in needs)
            work = _Work(task, plan.labels[index], method_of(instance, task.method), needs)
            for value in plan.values:
                if value.source == index and value.index in wanted:
                    work.local.append((value.index, value.steps, value.index in plan.fatal_values))
            for edge, write in writers.items():
                value = plan.values[plan.edges[edge].value]
                if value.source == index:
                    to_driver = DRIVER in plan.edges[edge].readers
                    work.sends.append(_Send(value.steps, write, value.index in plan.fatal_values, to_driver))
            seen = any(send.fatal and not send.tells for send in work.sends)
            work.tells = index in plan.fatal_tasks and not seen
            prepared.append(work)
        return prepared

    def advance(self) -> bool:
        """Run the next task if all it needs is here. False if there was nothing to do."""
        missing = self._missing
        while missing:
            inbound = missing[-1]
            if try_wait(inbound.full):
                return False
            missing.pop()
            self._accept(inbound)
        self._run(self._work[self._next])
        if self._unsent is not None:
            self.advance = self._send_the_rest  # type: ignore[method-assign]  # until there is memory
            return True
        self._step()
        return True

    @property
    def lacks_memory(self) -> bool:
        """True while a message waits for memory that readers keep: nobody rings when it comes back."""
        return self._unsent is not None

    def _step(self) -> None:
        """Go on to the next task."""
        self._next += 1
        if self._exiting:
            self.advance = _nothing  # type: ignore[method-assign]  # no method is called any more
            self._exit()
            return
        if self._next == len(self._work):
            self._next = 0
            self.sequence += 1
            self._flags = 0
            self._values = self._empty.copy()
        self._missing = self._work[self._next].needs.copy()

    def _accept(self, inbound: _Inbound) -> None:
        self.taken += 1
        if self.enter is not None:  # unpickling runs code, and makes tensors
            self.enter()
        try:
            taken = inbound.reader.take()
        except SegmentGone:
            self._values[inbound.value] = self._lost(inbound)
            return
        except (OSError, MemoryError) as error:  # out of descriptors or memory: that message is lost
            self._values[inbound.value] = self._unreadable(error, inbound)
            return
        kind, flags, body, buffers, _ = taken
        inbound.count += 1
        self._flags |= flags & WAKE
        if kind == VALUE and not buffers:
            inbound.bytes += len(body)
            try:
                self._values[inbound.value] = pickle.loads(body)
                return
            except BaseException as error:  # unpickling runs code of the value's class
                self._values[inbound.value] = self._unreadable(error, inbound)
        elif kind != NOTHING:
            inbound.bytes += taken.nbytes
            self._values[inbound.value] = (
                Failure(Message(ERROR, bytes(body))) if kind == ERROR else self._decoded(taken, inbound)
            )

    def _lost(self, inbound: _Inbound) -> Failure:
        """The sender has ended. The driver knows the field `member`, and names the actor by its id."""
        me, writer = self.plan.members[self.member], inbound.reader.writer
        error = GraphActorDiedError(
            f"{self.plan.members[writer]} ended before {me} had read {inbound.label}", member=writer
        )
        return Failure(self._failed(failed(error, me, error), inbound.fatal))

    def _decoded(self, taken: Taken, inbound: _Inbound) -> Any:
        try:
            return m.decode(taken.kind, taken.body, taken.buffers, shared=taken.shared)
        except BaseException as error:
            return self._unreadable(error, inbound)

    def _unreadable(self, error: BaseException, inbound: _Inbound) -> Failure:
        me = self.plan.members[self.member]
        refused = GraphValueError(f"{inbound.label} could not be unpickled by {me}: {m.shown(error, repr)}")
        return Failure(self._failed(failed(refused, me, error), inbound.fatal))

    def _run(self, work: _Work) -> None:
        clock = time.perf_counter
        values = self._values
        if self.enter is not None:
            self.enter()
        started = clock()
        result: Any = None
        for value in work.reads:
            if type(values[value]) is Failure:
                result = values[value]
                break
        else:
            result = self._call(work, values)
        returned = clock()
        for value, steps, fatal in work.local:
            values[value] = self._selected(result, steps, work, fatal)
        for number, send in enumerate(work.sends):
            try:
                self._send(send, result, work)
            except NoRoom:
                waiting = [(later, self._message(later, result, work)) for later in work.sends[number:]]
                self._unsent = _Unsent(work, waiting, Deadline(self._timeout_s), (started, returned))
                return
        self._account(work, started, returned)

    def _send_the_rest(self) -> bool:
        """In place of `advance` while messages wait for memory: send what can be sent. False if nothing could."""
        unsent = self._unsent
        assert unsent is not None
        sent = False
        while unsent.waiting:
            send, message = unsent.waiting[0]
            try:
                send.write(self.sequence, message, self._flags)
            except NoRoom as full:
                if unsent.deadline.left_s() != 0:
                    return sent
                error: BaseException = GraphTimeoutError(full.complaint)
                message = self._failed(failed(error, unsent.work.label, error), send.fatal)
                send.write(self.sequence, message, self._flags)
            except BaseException as error:
                if message.kind == ERROR:
                    raise
                unsent.waiting[0] = send, self._failed(failed(error, unsent.work.label, error), send.fatal)
                continue
            unsent.waiting.pop(0)
            sent = True
        self._unsent = None
        del self.advance  # the method of the class again
        self._account(unsent.work, unsent.started, unsent.returned)
        self._step()
        return True

    def _account(self, work: _Work, started: float, returned: float) -> None:
        sent = time.perf_counter()
        idle_since, self._idle_since = self._idle_since, sent
        self.records.append((work.index, self.sequence, idle_since, started, returned, sent))
        total = work.total
        total[0] += 1
        total[1] += started - idle_since
        total[2] += returned - started
        total[3] += sent - returned

    def _call(self, work: _Work, values: list[Any]) -> Any:
        try:
            if work.only is not None and self._guard is None:
                result = work.call(values[work.only])
            else:
                made: dict[int, Any] = {}
                args = [ops.evaluate(expression, values, made) for expression in work.task.args]
                kwargs = {key: ops.evaluate(expression, values, made) for key, expression in work.task.kwargs}
                with self._guard or _NO_GUARD:
                    result = work.call(*args, **kwargs)
            return self._finish(result) if type(result) is CoroutineType else result
        except (SystemExit, ray.exceptions.AsyncioActorExit) as error:  # ray.actor.exit_actor
            self._exiting = True
            return Failure(self._failed(failed(GraphError(f"{work.label} exited its actor"), work.label, error), False))
        except BaseException as error:  # a cancelled coroutine is a failed call, not the end of the lane
            return Failure(self._failed(raised(error, work.label), work.tells))

    def _finish(self, coroutine: Any) -> Any:
        """Run a coroutine method on the actor's own event loop, as Ray does; this graph waits, the actor does not."""
        if self._loop is None:  # a plain method that returns a coroutine
            return asyncio.run(coroutine)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _selected(self, result: Any, steps: tuple[Step, ...], work: _Work, fatal: bool) -> Any:
        if type(result) is Failure or not steps:
            return result
        try:
            return ops.select(result, steps)
        except Exception as error:
            return Failure(self._failed(failed(error, work.label, error), fatal))

    def _send(self, send: _Send, result: Any, work: _Work) -> None:
        if send.steps:
            result = self._selected(result, send.steps, work, send.tells)
        try:
            message = result.message if type(result) is Failure else self._encoder.encode(result)
            send.write(self.sequence, message, self._flags)
        except NoRoom:
            raise
        except BaseException as error:
            # It cannot be pickled, is too large, or there is no memory: the execution is answered with that.
            message = self._failed(failed(error, work.label, error), send.tells)
            send.write(self.sequence, message, self._flags)

    def _message(self, send: _Send, result: Any, work: _Work) -> Message:
        """Return the message that `_send` would send, in memory of its own."""
        result = self._selected(result, send.steps, work, send.fatal)
        try:
            return result.message if type(result) is Failure else self._encoder.encode(result).copied()
        except BaseException as error:
            return self._failed(failed(error, work.label, error), send.fatal)

    def leave(self) -> None:
        """Do nothing any more; let go of what was to be sent."""
        self.advance = _nothing  # type: ignore[method-assign]
        self._unsent = None
        self._exit, self._tell = _nothing, _tell_nobody  # no references in a circle: memory is freed now

    def stats(self) -> dict[str, Any]:
        """Counters, for the driver."""
        tasks = {
            task: {"count": int(n), "wait_s": wait, "compute_s": compute, "send_s": send}
            for task, (n, wait, compute, send) in ((work.index, work.total) for work in self._work)
        }
        edges = {edge: {"count": inbound.count, "bytes": inbound.bytes} for edge, inbound in self.inbound.items()}
        return {"tasks": tasks, "received": edges}


def _nothing() -> bool:
    return False


def _tell_nobody(sequence: int, error: Message, flags: int) -> None:
    return


def method_of(instance: Any, name: str) -> Callable[..., Any]:
    """The bound method. GraphPlanError if the object has none of this name that a graph could call."""
    found = _ray.untraced_method(instance, name)
    if not callable(found):
        known = [
            key for key in dir(type(instance)) if not key.startswith("_") and callable(getattr(instance, key, None))
        ]
        raise GraphPlanError(f"{type(instance).__name__} has no method {name!r}; it has {', '.join(known)}")
    if inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found):
        raise GraphPlanError(
            f"{type(instance).__name__}.{name} is a generator; a call in a graph has one result: return a list"
        )
    call: Callable[..., Any] = found
    return call


def failed(error: BaseException, where: str, shown: BaseException) -> Message:
    """The message that carries an error of a call at `where` on, with the traceback of `shown` as text; an error of
    ours says where by itself."""
    return m.encode_error(error) if isinstance(error, GraphError) else raised(error, where, shown)


def raised(error: BaseException, where: str, shown: BaseException | None = None) -> Message:
    """The message for what a method has raised. Also for an error of ours: it is that of another graph, which the
    method has used, and must not pass for this one's."""
    text = "".join(traceback.format_exception(shown or error))
    return m.encode_error(_ray.task_error(where, text, error))

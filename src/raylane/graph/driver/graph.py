"""A graph that runs: hands executions to its actors, collects their results, notices deaths, lets go at the end.

No thread of its own: whoever waits for a result reads the messages of all results meanwhile (the *pump*), and the
others that wait are told. An asyncio loop reads them when an eventfd says so. Made by `compile`.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raylane.core.deadline import Deadline
from raylane.core.semaphore import post, try_wait
from raylane.core.waiting import Waiter
from raylane.errors import (
    GraphActorDiedError,
    GraphClosedError,
    GraphError,
    GraphFullError,
    GraphTimeoutError,
    GraphValueError,
)
from raylane.graph.channels.lease import LOOK_EVERY_S, SegmentGone
from raylane.graph.channels.ring import WAKE
from raylane.graph.driver import forks
from raylane.graph.driver.asyncio_bridge import Awaiting
from raylane.graph.driver.completion import conclude
from raylane.graph.driver.deploy import Collected, Wiring
from raylane.graph.driver.handover import Busy, NoMemory, Sent, has_memory
from raylane.graph.driver.result import Departure, Failed, GraphResult
from raylane.graph.inspect import drawing
from raylane.graph.inspect import stats as view
from raylane.graph.inspect.text import describe
from raylane.graph.plan.ir import INPUT, Plan, Ref
from raylane.graph.values import message as m
from raylane.graph.values.arguments import Arguments
from raylane.graph.values.message import ERROR, NOTHING, VALUE, Encoder
from raylane.graph.worker.executor import KEPT_RECORDS, failed

log = logging.getLogger("raylane.graph")

LOOK_UP_S = 1.0


class CompiledGraph:
    """See `raylane.compile`. Thread-safe. Also a context manager, which ends with `teardown`."""

    def __init__(self, plan: Plan, wiring: Wiring, *, max_inflight: int, timeout_s: float | None) -> None:
        self.plan = plan
        self.max_inflight = max_inflight
        self.timeout_s = timeout_s
        self._wiring = wiring
        self._bell = wiring.bell.address
        self._arguments = Arguments(plan)
        self._encoder = Encoder()  # guarded by _submitting
        self._submitting = threading.Lock()
        self._handing = False
        """Set while _submitting is held, from right after taking it to right before letting go."""
        self._handovers = 0
        """How often it was set."""
        self._submitted = 0  # guarded by _submitting
        self._pumping = threading.Lock()
        """Held by the one who reads messages; guards everything down to _turn."""
        self._reading = False
        """Set while _pumping is held, from right after taking it to right before letting go."""
        self._readings = 0
        """How often it was set."""
        self._collected = [Collected(reader, plan.edges[edge].value) for edge, reader in wiring.readers.items()]
        self._pending: collections.deque[GraphResult] = collections.deque()
        """Executions under way, oldest first. Appended to under _submitting, before anything is sent. One that has
        failed stays until all its messages were read: until then its slots in the rings are in use."""
        self._failures: collections.deque[tuple[int, Any]] = collections.deque()
        """(execution, pickled error) as told by actors, before the messages of the execution come. From any thread."""
        self._fatal = plan.fatal_values
        self._completed = 0
        self._rung = 0
        """Times the bell was heard."""
        self._taken = 0
        """Messages read. More than `_rung` when they were found without waiting."""
        self._waiter = Waiter()
        self._turn = threading.Condition()
        """For those who wait while another one reads: told when results are done, and when the reader leaves."""
        self._followers = 0
        self._end: GraphError | None = None
        """Why the graph has ended: set once, by anyone; pending results are then failed by the pump."""
        self._awaiting = Awaiting(self._woken, timeout_s)
        self._missed = False
        """Whether the asyncio loop was woken while another thread read messages."""
        self._alone = plan.output.value if isinstance(plan.output, Ref) and not plan.leaves else None
        """The value that is the output, the usual case."""
        self._empty: list[Any] = [None] * len(plan.values)
        self._from_input = [v for v in plan.collects if plan.values[v].source == INPUT]
        whole = len(wiring.inputs) == 1 and not self._from_input and plan.values[wiring.inputs[0][1]].steps == ()
        self._one_input = wiring.inputs[0][0] if whole else None
        """Where the whole input goes, if that is all that `execute` sends: the usual case."""
        self._one_value = wiring.inputs[0][1] if whole else -1
        self.records: collections.deque[tuple[int, float, float]] = collections.deque(maxlen=KEPT_RECORDS)
        """(execution, submitted, completed), seconds on the monotonic clock."""
        weak = weakref.ref(self)

        def ended(error: GraphError) -> None:  # the watch must not keep the graph alive
            graph = weak()
            if graph is not None:
                graph._fail(error)

        forks.register(self)

        def told(execution: int, body: Any) -> None:
            graph = weak()
            if graph is not None:
                graph._failures.append((execution, body))
                graph.nudge()

        wiring.watch(ended, told)
        self._awaiting.start(wiring.wake_fd, wiring.wake_refused)
        weakref.finalize(self, self._awaiting.close)
        weakref.finalize(self, wiring.close, 0.0)  # forgotten, or at exit: the actors are told, nobody waits

    # Executing

    def execute(self, *args: Any, **kwargs: Any) -> GraphResult:
        """Start one execution with these inputs and return its result, which need not be there yet.

        Waits while `max_inflight` executions are under way, for at most `timeout_s` (GraphTimeoutError; nothing was
        started then). TypeError if the inputs are not those that the graph names; GraphValueError if one cannot be
        pickled; GraphActorDiedError or GraphClosedError if the graph has ended. The inputs may be changed as soon as
        this returns.
        """
        return self._execute(args, kwargs, self.timeout_s)

    def execute_nowait(self, *args: Any, **kwargs: Any) -> GraphResult:
        """Like `execute`, but raises GraphFullError instead of waiting."""
        return self._execute(args, kwargs, 0)

    async def execute_async(self, *args: Any, **kwargs: Any) -> GraphResult:
        """Like `execute`, but lets the event loop run while it waits for a free place; `await` its result as well."""
        deadline = Deadline(self.timeout_s)
        while True:
            try:
                return self._execute(args, kwargs, 0)
            except GraphFullError as error:
                kind = type(error)
            left = deadline.left_s()
            if left is not None and left <= 0:
                raise self._no_place() from None
            if kind is NoMemory:
                await asyncio.sleep(LOOK_EVERY_S)
                continue
            if kind is Busy:
                await asyncio.get_running_loop().run_in_executor(None, self._until_handed_over, left)
                continue
            try:
                oldest = self._pending[0]
            except IndexError:  # the place has just become free
                await asyncio.sleep(0)
            else:
                await Departure(self, oldest)

    def _until_handed_over(self, timeout_s: float | None) -> None:
        """On a thread: wait until no other thread hands an execution over, or not for longer than this."""
        submitting = self._submitting
        if submitting.acquire(timeout=LOOK_UP_S if timeout_s is None else min(timeout_s, LOOK_UP_S)):
            submitting.release()

    def _execute(self, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float | None) -> GraphResult:
        if self._end is not None:
            raise self._ended()
        if not self._submitting.acquire(False):
            self._queue(timeout_s)
        try:
            self._handovers += 1
            self._handing = True
            if self._one_input is not None and len(args) == 1 and not kwargs:
                kept = self._empty.copy()
                messages = [(self._one_input, self._encoder.encode(args[0]), self._one_value)]
            else:
                messages, kept = self._inputs(args, kwargs)
            if self._submitted - self._completed >= self.max_inflight:
                self._make_room(timeout_s)
            if timeout_s == 0 and not has_memory(self._wiring.pool, messages):
                raise NoMemory(
                    "readers keep so much memory that there is none for this input; try again, or drop arrays"
                )
            if self._end is not None:
                raise self._ended()
            return self._send(messages, kept)
        finally:
            self._handing = False
            self._submitting.release()

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Sent], list[Any]]:
        """What to send, and the values to begin the result with: inputs that are outputs too."""
        values = self._arguments.values(args, kwargs)
        kept = self._empty.copy()
        encode = self._encoder.encode
        for value in self._from_input:
            kept[value] = m.duplicate(encode(values[value]))
        return [(writer, encode(values[value]), value) for writer, value in self._wiring.inputs], kept

    def _queue(self, timeout_s: float | None) -> None:
        """Wait until no other thread hands an execution over."""
        if timeout_s == 0:
            raise Busy(
                "another thread is handing an execution over at the moment; try again, or call execute, which waits"
            )
        deadline = Deadline(timeout_s)
        while True:
            left = deadline.left_s()
            submitting, handovers = self._submitting, self._handovers
            if submitting.acquire(timeout=LOOK_UP_S if left is None else min(left, LOOK_UP_S)):
                return
            if left is not None and left <= 0:
                raise self._no_place()
            if left is not None and left < LOOK_UP_S:
                continue
            if handovers == self._handovers and not self._handing and submitting is self._submitting:
                # For a second nobody has begun and nobody could: Ctrl-C came between taking the lock and the next
                # instruction.
                self._submitting = threading.Lock()
                self._fail(GraphClosedError("execute was interrupted"))

    def _make_room(self, timeout_s: float | None) -> None:
        def room() -> bool:
            return self._submitted - self._completed < self.max_inflight

        if not self.pump_until(room, Deadline(timeout_s)):
            raise self._full() if timeout_s == 0 else self._no_place()

    def _send(self, messages: list[Sent], kept: list[Any]) -> GraphResult:
        number = self._submitted
        flagged = self._awaiting.active and asyncio._get_running_loop() is not None
        flags = WAKE if flagged else 0
        result = GraphResult(self, number, len(self._collected), kept, flagged)
        try:
            self._pending.append(result)
            self._submitted = number + 1
            for writer, message, value in messages:
                try:
                    writer.write(number, message, flags)
                except (GraphError, OSError, MemoryError) as error:  # too large, or no memory: this execution fails
                    broken = failed(error, "execute", error)
                    writer.write(number, broken, flags)
                    if value in self._fatal:
                        self._failures.append((number, broken.body))
                        self.nudge()
        except BaseException as error:
            # Interrupted half way, by Ctrl-C for one: some actors have this execution and others do not.
            self._fail(
                GraphClosedError(f"execution {number} was interrupted while it was handed over: {m.shown(error, repr)}")
            )
            raise
        return result

    # Collecting

    def finish(self, result: GraphResult, timeout_s: float | None) -> bool:
        """Wait until a result is done; whether it is. The usual case in few steps: nobody else reads, one wait."""
        if timeout_s is not None and timeout_s < LOOK_UP_S:
            return self.pump_until(result._is_done, Deadline(timeout_s))
        start = time.monotonic()
        if self._pumping.acquire(False):
            try:
                self._readings += 1
                self._reading = True
                # Asked again: another reader may have been here since, and then nothing need come for a long time.
                if not result._done:
                    if self._waiter.wait(self._bell, LOOK_UP_S):
                        self._rung += 1
                    self._drain()
            finally:
                self._reading = False
                self._pumping.release()  # before any call: Ctrl-C comes at calls
                self._has_read()
            if result._done:
                return True
        left = None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - start))
        return self.pump_until(result._is_done, Deadline(left))

    def _tell_followers(self) -> None:
        with self._turn:
            self._turn.notify_all()

    def pump_until(self, ready: Callable[[], bool], deadline: Deadline) -> bool:
        """Read messages, or wait while another thread does, until `ready` or the deadline; whether it is ready."""
        while not ready():
            if self._pumping.acquire(False):
                try:
                    self._readings += 1
                    self._reading = True
                    self._lead(ready, deadline)
                finally:
                    self._reading = False
                    self._pumping.release()  # before any call: Ctrl-C comes at calls
                    self._has_read()
            else:
                self._follow(ready, deadline)
            left = deadline.left_s()
            if left is not None and left <= 0:
                return ready()
        return True

    def _lead(self, ready: Callable[[], bool], deadline: Deadline) -> None:
        bell = self._bell
        while True:
            if self._drain() and self._followers:
                self._tell_followers()
            if ready():
                return
            left = deadline.left_s()
            if left is not None and left <= 0:
                return
            if self._settle():
                continue
            if self._rung > self._taken + self._wiring.heard:  # it rang, and not for a message of an edge
                heard = self._wiring.heard
                self._look()
                if self._wiring.heard > heard or self._failures:
                    continue
                self._rung = self._taken + heard  # a nudge
            if self._waiter.wait(bell, LOOK_UP_S if left is None else min(left, LOOK_UP_S)):
                self._rung += 1
            else:
                self._look()

    def _look(self) -> None:
        """Read what actors say unasked: failures, and what ends the graph."""
        trouble = self._wiring.listen()
        if trouble is not None:
            self._fail(trouble)

    def _follow(self, ready: Callable[[], bool], deadline: Deadline) -> None:
        with self._turn:
            self._followers += 1
            try:
                # Asked again under the lock: whoever leads notifies after letting go, if it saw a follower.
                if not self._pumping.locked() or ready():
                    return
                left = deadline.left_s()
                pumping, readings = self._pumping, self._readings
                told = self._turn.wait(LOOK_UP_S if left is None else min(left, LOOK_UP_S))
                if told or (left is not None and left < LOOK_UP_S) or readings != self._readings:
                    return
                if pumping.locked() and not self._reading and pumping is self._pumping:
                    # For a second nobody has begun to read, nobody reads, and nobody could: Ctrl-C came between taking
                    # the lock and the next instruction.
                    self._pumping = threading.Lock()
                    self._fail(GraphClosedError("reading results was interrupted"))
            finally:
                self._followers -= 1

    def _settle(self) -> bool:
        """Take the rings of messages that were found without waiting; True if there were any: look again then."""
        found = False
        while self._rung < self._taken + self._wiring.heard and not try_wait(self._bell):
            self._rung += 1
            found = True
        return found

    def _drain(self) -> bool:
        """Read every message that is here. Only with _pumping held. True if any result was completed."""
        if not self._pending:
            return False
        completed = False
        try:
            for collected in self._collected:
                while self._pending and not try_wait(collected.full):
                    completed |= self._accept(collected)
            if self._failures:
                completed |= self._fail_early()
        except BaseException as error:
            self._fail(GraphClosedError(f"reading results was interrupted: {m.shown(error, repr)}"))
            raise
        if self._end is not None and self._pending:
            self._fail_pending(self._end)
            completed = True
        return completed

    def _accept(self, collected: Collected) -> bool:
        reader = collected.reader
        result = self._pending[reader.sequence - self._completed]
        self._taken += 1
        values: Any = result._values
        failure: BaseException | None = None
        try:
            kind, _, body, buffers, shared = reader.take()
            if kind == VALUE and not buffers:
                collected.bytes += len(body)
                if not result._done:
                    values[collected.value] = pickle.loads(body)
            elif kind != NOTHING:
                collected.bytes += len(body) + sum(len(buffer) for buffer in buffers)
                if kind == ERROR:
                    failure = self._error_in(body)
                elif not result._done:
                    values[collected.value] = m.decode(kind, body, buffers, shared=shared)
        except SegmentGone:
            failure = self._lost(reader.writer)
        except Exception as error:
            label = self.plan.source_label(collected.value)
            failure = GraphValueError(f"{label} could not be unpickled by the driver: {m.shown(error)}")
        failed_now = failure is not None and self._arrived_broken(result, collected.value, failure)
        result._left -= 1
        if result._left:
            return failed_now
        # In order: an edge's messages come in order, so no later execution can be complete before this one.
        self._pending.popleft()
        self._completed += 1
        self.records.append((result.number, result.submitted_s, time.perf_counter()))
        if self._alone is not None and not result._done:
            result.complete(values[self._alone], None)
        else:
            conclude(self.plan, result, values)
        result.end()
        if result._error is not None:
            self._wiring.listen(to_all=True)  # what was told of this execution is here: see `program.report_slots`
        return True

    def _arrived_broken(self, result: GraphResult, value: int, error: BaseException) -> bool:
        """An error has come in the place of a value. True if the result fails with it, now."""
        assert result._values is not None
        result._values[value] = Failed(error)
        if result._done or value not in self._fatal:
            return False
        result.fail(error)
        return True

    def _fail_early(self) -> bool:
        """Fail results of which actors have told that they cannot succeed. True if there were any."""
        found = False
        while self._failures:
            execution, body = self._failures.popleft()
            index = execution - self._completed
            if 0 <= index < len(self._pending) and not (result := self._pending[index])._done:
                result.fail(self._error_in(body))
                found = True
        return found

    def _error_in(self, body: Any) -> BaseException:
        """The error of a message of kind ERROR."""
        error: BaseException = m.decode(ERROR, body, ())
        if type(error) is GraphActorDiedError:  # from whoever could not read what the dead one had lent
            return self._lost(error.fields["member"])
        return error

    def _lost(self, member: int) -> GraphError:
        """A message went with its sender, which is the first sign of its end: the watch may be milliseconds behind."""
        error = self._wiring.lost(member)
        self._fail(error)
        return error

    # asyncio

    def future(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None] | None:
        """For results: see `Awaiting.future`."""
        return self._awaiting.future(loop)

    def _woken(self) -> None:
        """On the loop's thread: never waits. If a thread is reading messages at the moment, it rings again when it has
        done with it, for it may have looked too early."""
        if not self._pumping.acquire(False):
            self._missed = True
            if not self._pumping.acquire(False):
                return
        try:
            self._readings += 1
            self._reading = True
            self._drain()
            self._settle()
            self._look()
            if self._failures:
                self._drain()
        finally:
            self._reading = False
            self._pumping.release()  # before any call: Ctrl-C comes at calls
            self._has_read()

    def _has_read(self) -> None:
        """_pumping was let go: whoever else waits may read now."""
        if self._followers:
            self._tell_followers()
        if self._missed:
            self._missed = False
            self._awaiting.ring()

    # Seeing

    def show(self) -> str:
        """The graph as text: actors with their calls in order, edges with their channels. Does not wait."""
        return describe(self.plan, self._wiring.channels(), max_inflight=self.max_inflight)

    def draw(self, path: str | Path) -> None:
        """Write the graph as an SVG picture."""
        Path(path).write_text(drawing.draw(self.plan, self._wiring.channels(), max_inflight=self.max_inflight))

    def stats(self) -> dict[str, Any]:
        """Counters since the graph was compiled; they are always on.

        `executions`: submitted, completed. `calls`, by name: count and seconds spent waiting (for the previous call
        to be followed by all inputs of this one), computing and sending. `edges`, by name: messages and bytes.
        `lent_bytes`: memory that a member has lent to readers that keep arrays. Asks every actor, up to 5 s for one
        that is busy in a method; `unanswered` names those.
        """
        driver = {"executions": {"submitted": self._submitted, "completed": self._completed}}
        collected = {
            edge: (c.reader.sequence, c.bytes) for edge, c in zip(self._wiring.readers, self._collected, strict=True)
        }
        return view.stats(self.plan, self._wiring, driver, collected)

    def trace(self, path: str | Path) -> list[str]:
        """Write the last executions (up to 8,192 calls an actor) as a trace for Perfetto or chrome://tracing.
        Returns who did not answer within 5 s, being busy."""
        return view.write_trace(path, self._wiring, list(self.records))

    # Ending

    def _fail(self, error: GraphError) -> None:
        """The graph has ended: whoever pumps fails what is pending. From any thread, also a finalizer's."""
        if self._end is None:
            self._end = error
        if self._wiring.pool is not None:
            self._wiring.pool.closed = True  # whoever hands an execution over waits for memory no more
        self.nudge()

    def nudge(self) -> None:
        """Have whoever waits look again. From any thread."""
        post(self._bell)
        self._awaiting.ring()

    def disown(self) -> None:
        """In a forked child: the graph is its parent's. Nothing that is shared is touched."""
        self._end = GraphClosedError("this process was forked, and the graph is its parent's; compile one here")
        self._pumping, self._submitting, self._turn = threading.Lock(), threading.Lock(), threading.Condition()
        self._awaiting.disown()
        self._wiring.disown()
        pending, self._pending = self._pending, collections.deque()
        for result in pending:
            if not result._done:
                result.complete(None, self._end)

    def _fail_pending(self, error: BaseException) -> None:
        while self._pending:
            result = self._pending.popleft()
            self._completed += 1
            if not result._done:
                result.complete(None, error)
            result.end()

    def _ended(self) -> GraphError:
        assert self._end is not None
        return type(self._end)(self._end.message, **self._end.fields)

    def _full(self) -> GraphFullError:
        return GraphFullError(
            f"{self.max_inflight} executions are under way, which is max_inflight; get a result first, or call "
            "execute, which waits"
        )

    def _no_place(self) -> GraphTimeoutError:
        return GraphTimeoutError(
            f"{self.max_inflight} executions were under way for {self.timeout_s} s: "
            f"{self.waiting_for(self._completed)}. Nothing was started; raise timeout_s, or find what is slow in show()"
        )

    def waiting_for(self, number: int) -> str:
        """Who has not answered, for messages."""
        late = [self.plan.source_label(c.value) for c in self._collected if c.reader.sequence <= number]
        return f"still waiting for {', '.join(late)}" if late else "its messages are being read"

    def teardown(self, timeout: float = 5.0) -> None:
        """End the graph: pending results raise GraphClosedError, the actors forget it, its memory is freed once nobody
        holds arrays of it. Waits at most `timeout` seconds for actors that are busy; they let go when they are done.
        A second call does nothing. Also done at exit and, without waiting, when the graph is garbage.
        """
        self._fail(GraphClosedError("the graph was torn down; compile it again"))
        if self._pumping.acquire(timeout=timeout):
            try:
                self._drain()
            finally:
                self._pumping.release()
        self._tell_followers()
        self._awaiting.close()
        self._wiring.close(timeout)

    def __enter__(self) -> CompiledGraph:
        return self

    def __exit__(self, *_: object) -> None:
        self.teardown()

    def __repr__(self) -> str:
        state = "ended" if self._end is not None else f"{self._submitted - self._completed} under way"
        return f"CompiledGraph({len(self.plan.tasks)} calls on {len(self.plan.members) - 1} actors, {state})"

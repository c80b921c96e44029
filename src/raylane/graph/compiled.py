"""A graph that runs: hands executions to its actors, collects their results, notices deaths, lets go at the end.

No thread of its own: whoever waits for a result reads the messages of all results meanwhile (the *pump*), and the
others that wait are told. An asyncio loop reads them when an eventfd says so. Made by `compile`.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raylane.core import wake
from raylane.core.deadline import Deadline
from raylane.core.semaphore import post, try_wait
from raylane.core.waiting import Waiter
from raylane.errors import GraphClosedError, GraphError, GraphFullError, GraphTimeoutError, GraphValueError
from raylane.graph import drawing, view
from raylane.graph import message as m
from raylane.graph.arguments import Arguments
from raylane.graph.channels.ring import WAKE, RingReader
from raylane.graph.message import ERROR, NOTHING, SIGNAL, Encoder, Message
from raylane.graph.outcome import Failed, conclude
from raylane.graph.plan import INPUT, Plan
from raylane.graph.resident import failed
from raylane.graph.result import GraphResult
from raylane.graph.setup import Wiring
from raylane.graph.show import describe

log = logging.getLogger("raylane.graph")

LOOK_UP_S = 1.0


class _Collected:
    """One edge into the driver."""

    __slots__ = ("bytes", "full", "reader", "value")

    def __init__(self, reader: RingReader, value: int) -> None:
        self.reader = reader
        self.full = reader.full
        self.value = value
        self.bytes = 0


class CompiledGraph:
    """See `raylane.compile`. Thread-safe. Also a context manager, which ends with `teardown`."""

    def __init__(self, plan: Plan, wiring: Wiring, *, max_inflight: int, timeout_s: float | None) -> None:
        self.plan = plan
        self.max_inflight = max_inflight
        self.timeout_s = timeout_s
        self._wiring = wiring
        self._arguments = Arguments(plan)
        self._encoder = Encoder()  # guarded by _submitting
        self._submitting = threading.Lock()
        self._submitted = 0  # guarded by _submitting
        self._pumping = threading.Lock()
        """Held by the one who reads messages; guards everything down to _turn."""
        self._collected = [_Collected(reader, plan.edges[edge].value) for edge, reader in wiring.readers.items()]
        self._pending: collections.deque[GraphResult] = collections.deque()
        """Executions under way, oldest first. Appended to under _submitting, before anything is sent."""
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
        self._loop: asyncio.AbstractEventLoop | None = None
        self._eventfd: int | None = None
        self._from_input = [v for v in plan.collects if plan.values[v].source == INPUT]
        self.records: collections.deque[tuple[int, float, float]] = collections.deque(maxlen=8192)
        """(execution, submitted, completed), seconds on the monotonic clock."""
        weak = weakref.ref(self)

        def ended(error: GraphError) -> None:  # the watch must not keep the graph alive
            graph = weak()
            if graph is not None:
                graph._fail(error)

        wiring.watch(ended)
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
            except GraphFullError:
                oldest = next(iter(self._pending), None)
                if oldest is None:
                    continue
                left = deadline.left_s()
                if left is not None and left <= 0:
                    raise self._no_place() from None
                await oldest._arrival()

    def _execute(self, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float | None) -> GraphResult:
        if self._end is not None:
            raise self._ended()
        if self._eventfd is None and asyncio._get_running_loop() is not None:
            self._start_listening()
        wait_s = -1 if timeout_s is None else timeout_s
        if not self._submitting.acquire(timeout=wait_s) if wait_s else not self._submitting.acquire(blocking=False):
            raise self._no_place() if wait_s else self._full()
        try:
            values = self._arguments.values(args, kwargs)
            messages = [
                (writer, SIGNAL if values[value] is None else self._encoder.encode(values[value]))
                for writer, value in self._wiring.inputs
            ]
            if self._submitted - self._completed >= self.max_inflight:
                self._make_room(wait_s, timeout_s)
            return self._send(messages, values)
        finally:
            self._submitting.release()

    def _make_room(self, wait_s: float, timeout_s: float | None) -> None:
        def room() -> bool:
            return self._submitted - self._completed < self.max_inflight

        if not self.pump_until(room, Deadline(timeout_s)):
            raise self._no_place() if wait_s else self._full()

    def _send(self, messages: list[tuple[Any, Message]], values: list[Any]) -> GraphResult:
        if self._end is not None:
            raise self._ended()
        number = self._submitted
        flags = 0 if self._eventfd is None else WAKE
        kept: list[Any] = [None] * len(values)
        for value in self._from_input:
            kept[value] = values[value]
        result = GraphResult(self, number, len(self._collected), kept, flagged=bool(flags))
        try:
            self._pending.append(result)
            self._submitted = number + 1
            for writer, message in messages:
                try:
                    writer.write(number, message, flags)
                except GraphError as error:  # too large, or no memory in time: this execution fails, the next may not
                    writer.write(number, failed(error, "execute", error), flags)
        except BaseException as error:
            # Interrupted half way, by Ctrl-C for one: some actors have this execution and others do not.
            self._fail(GraphClosedError(f"execution {number} was interrupted while it was handed over: {error!r}"))
            raise
        if not self._collected:
            raise AssertionError("a graph collects something of every task")
        return result

    # Collecting

    def pump_until(self, ready: Callable[[], bool], deadline: Deadline) -> bool:
        """Read messages, or wait while another thread does, until `ready` or the deadline; whether it is ready."""
        while not ready():
            if self._pumping.acquire(blocking=False):
                try:
                    self._lead(ready, deadline)
                finally:
                    self._pumping.release()
                    if self._followers:
                        with self._turn:
                            self._turn.notify_all()
            else:
                self._follow(ready, deadline)
            left = deadline.left_s()
            if left is not None and left <= 0:
                return ready()
        return True

    def _lead(self, ready: Callable[[], bool], deadline: Deadline) -> None:
        bell = self._wiring.bell.address
        while True:
            if self._drain() and self._followers:
                with self._turn:
                    self._turn.notify_all()
            if ready():
                return
            left = deadline.left_s()
            if left is not None and left <= 0:
                return
            if self._settle():
                continue
            if self._waiter.wait(bell, LOOK_UP_S if left is None else min(left, LOOK_UP_S)):
                self._rung += 1

    def _follow(self, ready: Callable[[], bool], deadline: Deadline) -> None:
        with self._turn:
            self._followers += 1
            try:
                # Asked again under the lock: whoever leads notifies after letting go, if it saw a follower.
                if not self._pumping.locked() or ready():
                    return
                left = deadline.left_s()
                self._turn.wait(LOOK_UP_S if left is None else min(left, LOOK_UP_S))
            finally:
                self._followers -= 1

    def _settle(self) -> bool:
        """Take the rings of messages that were found without waiting; True if there were any: look again then."""
        found = False
        while self._rung < self._taken and not try_wait(self._wiring.bell.address):
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
                while not try_wait(collected.full):
                    completed |= self._accept(collected)
        except BaseException as error:
            self._fail(GraphClosedError(f"reading results was interrupted: {error!r}"))
            raise
        if self._end is not None and self._pending:
            self._fail_pending(self._end)
            completed = True
        return completed

    def _accept(self, collected: _Collected) -> bool:
        reader = collected.reader
        result = self._pending[reader.sequence - self._completed]
        taken = reader.take()
        self._taken += 1
        collected.bytes += taken.nbytes
        values = result._values
        assert values is not None
        if taken.kind != NOTHING:
            try:
                arrived = m.decode(taken.kind, taken.body, taken.buffers, shared=taken.shared)
                values[collected.value] = Failed(arrived) if taken.kind == ERROR else arrived
            except Exception as error:
                label = self.plan.source_label(collected.value)
                values[collected.value] = Failed(
                    GraphValueError(f"{label} could not be unpickled by the driver: {type(error).__name__}: {error}")
                )
        result._left -= 1
        if result._left:
            return False
        # In order: an edge's messages come in order, so no later execution can be complete before this one.
        self._pending.popleft()
        self._completed += 1
        self.records.append((result.number, result.submitted_s, time.perf_counter()))
        conclude(self.plan, result, values)
        return True

    # asyncio

    def _start_listening(self) -> None:
        """Have the actors write to an eventfd of ours from the next execution on."""
        fd = wake.make()
        refused = self._wiring.tell_to_wake(os.getpid(), fd)
        if refused is not None:
            log.info("asyncio waits on a thread: %s", refused)
            os.close(fd)
            self._eventfd = -1
            return
        self._eventfd = fd

    def listen(self, result: GraphResult, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether this loop will be woken for that result; if not, its waiter needs a thread."""
        if not result._flagged or self._eventfd in (None, -1):
            return False
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                return False
            assert self._eventfd is not None
            loop.add_reader(self._eventfd, self._woken)
            self._loop = loop
        self._woken()
        return True

    def _woken(self) -> None:
        """The loop's reader: never waits. If a thread is reading messages at the moment, it completes the results."""
        if self._eventfd is not None:
            wake.drain(self._eventfd)
        if not self._pumping.acquire(blocking=False):
            return
        try:
            self._drain()
            self._settle()
        finally:
            self._pumping.release()
            if self._followers:
                with self._turn:
                    self._turn.notify_all()

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
        post(self._wiring.bell.address)
        if self._eventfd not in (None, -1):
            assert self._eventfd is not None
            os.eventfd_write(self._eventfd, 1)

    def _fail_pending(self, error: BaseException) -> None:
        while self._pending:
            result = self._pending.popleft()
            self._completed += 1
            result.complete(None, error)

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
        with self._turn:
            self._turn.notify_all()
        loop, self._loop = self._loop, None
        fd, self._eventfd = self._eventfd, None
        if fd is not None and fd >= 0:
            if loop is not None and not loop.is_closed():
                try:
                    loop.remove_reader(fd)
                except RuntimeError:  # another thread's loop, at work: it drops the descriptor by itself
                    log.debug("reader of a running loop left to it")
            os.close(fd)
        self._wiring.close(timeout)

    def __enter__(self) -> CompiledGraph:
        return self

    def __exit__(self, *_: object) -> None:
        self.teardown()

    def __repr__(self) -> str:
        state = "ended" if self._end is not None else f"{self._submitted - self._completed} under way"
        return f"CompiledGraph({len(self.plan.tasks)} calls on {len(self.plan.members) - 1} actors, {state})"

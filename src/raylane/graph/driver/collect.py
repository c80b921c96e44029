"""Collection of results: reads the messages of all executions, completes results, notices the end of the graph.

The driver has no thread for this. Of all threads that wait for results one is the *leader* and reads messages for all;
the others are *followers* and sleep until the leader notifies them. An event loop reads messages when its eventfd
becomes readable:

    leader:     enter the section -> read all messages that are here -> own result done? return
                                  -> wait for the doorbell, again
    follower:   sleep on a condition until results are done or the leader has left -> own result done? return
                                      -> else try to become the leader
    asyncio:    enter the section if it is free, read all messages; else the leader notifies the loop at its end
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Collection
from typing import Any

from raylane.core.deadline import Deadline
from raylane.core.native import BUSY, DamagedRing, Section
from raylane.core.signals.semaphore import post
from raylane.errors import (
    GraphActorDiedError,
    GraphCancelledError,
    GraphClosedError,
    GraphError,
    GraphTimeoutError,
    GraphValueError,
)
from raylane.graph.channels.lease import SegmentGone
from raylane.graph.channels.published import Fetch, Fetched, fetched_edge
from raylane.graph.channels.ring import RingReader
from raylane.graph.driver import forks
from raylane.graph.driver.asyncio_bridge import AsyncioBridge
from raylane.graph.driver.connections import Connections
from raylane.graph.driver.result import Executions, GraphResult, complete_result
from raylane.graph.lifecycle import Event
from raylane.graph.plan.ir import DRIVER, Edge, Plan, Ref
from raylane.graph.values import message as messages
from raylane.graph.values.failures import Failure, error_message
from raylane.graph.values.message import ERROR, TICKET

CHECK_S = 1.0
"""Seconds between two checks of a sleeping thread for the end of the graph."""


class CollectedEdge:
    """One edge into the driver."""

    __slots__ = ("bytes", "closed", "fetched", "fetching", "lost", "read", "reader", "value", "writer")

    def __init__(self, reader: RingReader, edge: Edge, fetched: Fetched | None) -> None:
        self.reader = reader
        self.writer = edge.writer
        """Member that computes the value; a relay may pass it on."""
        self.closed = False
        """True while the writer is dead: a message that has not arrived counts as lost."""
        self.lost = 0
        """Number of messages that were lost."""
        self.fetched = fetched
        """Set if tensors are fetched by a transport of the edge's own."""
        self.fetching: tuple[GraphResult, Fetch] | None = None
        """Message whose tensors are on their way; later messages of the edge wait behind it."""
        self.read = reader.read
        self.value = edge.value
        self.bytes = 0
        """Bytes of unusual messages; the reader counts the others."""


class Collector:
    """Collection half of a compiled graph. Thread-safe. Results hold it, so it lives as long as one is pending."""

    def __init__(self, plan: Plan, connections: Connections, executions: Executions, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self.plan = plan
        self._connections = connections
        self._control = connections.control
        self.doorbell = connections.doorbell
        self._lifecycle = connections.lifecycle
        self.executions = executions
        self._section = Section()
        """The leader runs it. Guards the edges."""
        self.edges = [
            CollectedEdge(reader, plan.edges[edge], fetched_edge(plan, plan.edges[edge], DRIVER, timeout_s))
            for edge, reader in connections.readers.items()
        ]
        self._deadlines = connections.deadlines
        self.expiring: dict[GraphResult, Deadline] = {}
        """Own deadline of each execution that has one and may be in flight."""
        self._any_closed = False
        """True if the writer of an edge is dead."""
        self._fetching: list[CollectedEdge] = []
        """Edges with a message whose tensors are on their way."""
        self.edge_count = len(self.edges)
        """Number of messages that complete one execution."""
        # Looked up once: the plan computes such sets on first use, and every message needs them.
        self._fatal = plan.fatal_values
        self._by_flag: dict[int, list[CollectedEdge]] = {}
        for edge in self.edges:
            self._by_flag.setdefault(edge.reader.flag, []).append(edge)
        self._changed = threading.Condition()
        """Notifies followers that results are done, or that the leader has left."""
        self.followers = 0
        self.bridge = AsyncioBridge(self.look, timeout_s)
        self.missed_wake = False
        """True if the event loop was woken while another thread read messages."""
        self._output_value = plan.output.value if isinstance(plan.output, Ref) and not plan.leaves else -1
        """Index of the value that is the whole output, the usual case; else -1."""
        weak = weakref.ref(self)  # the watch must not keep the graph alive

        def on_end(error: GraphError) -> None:
            collector = weak()
            if collector is not None:
                collector.fail(error)

        def on_failure(execution: int, body: Any) -> None:
            collector = weak()
            if collector is not None:
                collector.executions.early_failures.append((execution, body))
                collector.notify()

        # After everything above is set: callbacks may come at once, from other threads.
        connections.watch(on_end, on_failure)
        self.bridge.start(connections.wake_refused)
        # The collector, not the public graph: a pending result keeps this object alive, and with it the protection.
        forks.register(self)
        # At garbage collection or exit the actors are told to leave, and nothing waits for them.
        weakref.finalize(self, self.bridge.close)
        weakref.finalize(self, connections.close, 0.0)

    # Waiting

    def collect_until(self, ready: Callable[[], bool], deadline: Deadline) -> bool:
        """Read messages, or wait while another thread does, until `ready()`. Return False after the deadline."""
        while not ready():
            reached = self._section.run(0, self._lead, ready, deadline)
            if reached is BUSY:
                self._follow(ready, deadline)
            else:
                if self.followers or self.missed_wake:
                    self._after_reading()
                if reached:
                    return True
            remaining_s = deadline.left_s()
            if remaining_s is not None and remaining_s <= 0:
                return ready()
        return True

    def _lead(self, ready: Callable[[], bool], deadline: Deadline) -> bool:
        doorbell = self.doorbell
        # Each message that nobody has read has a post, unless Ctrl-C came right after the post was consumed. So this
        # thread waits first: the actor may share its CPU, and begins when this thread sleeps.
        look = deadline.timeout_s == 0 or doorbell.consumed > doorbell.read
        while True:
            # Read before looking at the deadline: a call with timeout 0 must find what has arrived.
            if look and self._read_all() and self.followers:
                self._notify_followers()
            look = True
            if ready():
                return True
            remaining_s = deadline.left_s()
            if remaining_s is not None and remaining_s <= 0:
                return False
            if doorbell.absorb():
                continue
            if doorbell.consumed > doorbell.read:  # a post that belongs to no message of an edge: a report, or `notify`
                read = doorbell.read
                self._poll_reports()
                # Reports of executions that have ended stay until the next execution.
                if doorbell.read > read or (self.executions.early_failures and self.executions.pending):
                    continue
                doorbell.read = doorbell.consumed  # it was `notify`
            # At most a second: a safety net in case a wake-up is missed.
            slice_s = CHECK_S if remaining_s is None else min(remaining_s, CHECK_S)
            if self.expiring:
                slice_s = min(slice_s, *(deadline.left_s() or 0 for deadline in tuple(self.expiring.values())))
            if not doorbell.wait(slice_s):
                self._poll_reports()

    def _follow(self, ready: Callable[[], bool], deadline: Deadline) -> None:
        with self._changed:
            self.followers += 1
            try:
                remaining_s = deadline.left_s()
                # Check again under the condition's lock: a leader that saw no follower did not notify.
                if remaining_s == 0 or not self._section.locked or ready():
                    return
                if self._section.runs_here():
                    raise GraphError(
                        "get was called while the same thread reads a result of the same graph: the code that "
                        "unpickles a value (__setstate__) uses the graph. Do so after the first get has returned"
                    )
                self._changed.wait(CHECK_S if remaining_s is None else min(remaining_s, CHECK_S))
            finally:
                self.followers -= 1

    def _notify_followers(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _after_reading(self) -> None:
        """Let other waiting threads and the event loop read, after the section."""
        if self.followers:
            self._notify_followers()
        if self.missed_wake:
            self.missed_wake = False
            self.bridge.notify()

    def notify(self) -> None:
        """Make all waiting threads and the event loop check again. From any thread."""
        post(self.doorbell.address)
        self.bridge.notify()

    # Reading

    def _poll_reports(self) -> None:
        """Read reports of the actors: failed executions, and the reason if an actor has ended the graph."""
        trouble = self._control.poll()
        if trouble is not None:
            self.fail(trouble)

    def _read_all(self) -> bool:
        """Read every message that is here; call in the section. Return True if a result was completed."""
        executions = self.executions
        if not executions.pending:
            return False
        completed = False
        try:
            edges = self.edges if self.edge_count == 1 or self._any_closed else self._flagged()
            if self._fetching:
                # Their flag may be taken already: messages that came behind the tensors are read after them.
                edges = list(dict.fromkeys([*self._fetching, *edges]))
            for edge in edges:
                if edge.fetching is not None:
                    completed |= self._take_fetched(edge)
                # An edge may have messages of several executions: read all, so that none waits for a later post.
                # Message n of every edge belongs to execution n.
                while edge.fetching is None and (result := executions.find(edge.reader.sequence)) is not None:
                    closed = edge.closed  # before the read: afterwards the message may be there, and the writer dead
                    try:
                        message = edge.read(None if result._done else result._values, edge.value, None)
                        if message is None:
                            if not closed:
                                break
                            edge.reader.sequence += 1
                            edge.lost += 1
                            failure: BaseException | None = self._control.died(edge.writer)
                        else:
                            failure = None if type(message) is int else self._read(edge, result, *message)
                    except SegmentGone:
                        failure = self._lost(edge.reader.writer)
                    except DamagedRing:
                        raise
                    except Exception as error:
                        failure = self._unreadable(edge, error)
                    if self._fetching and edge in self._fetching:
                        break
                    settled = executions.settle(result, self._output_value) if failure is None else None
                    completed |= self._arrived(edge, result, failure) if settled is None else settled
            if self.expiring:
                self._expire()
            while executions.early_failures:
                execution, body = executions.early_failures.popleft()
                # A report may come after its execution has ended with the same error; then the index is negative.
                index = execution - executions.completed
                if 0 <= index < len(executions.pending) and not (failed := executions.pending[index])._done:
                    try:
                        failure = self._decode_error(body)
                    except Exception as error:  # of this execution alone
                        failure = GraphValueError(f"its error could not be unpickled: {messages.error_text(error)}")
                    failed.fail(failure)
                    completed = True
        except BaseException as error:  # Ctrl-C too
            # Between a message and its value: edges are no longer in step.
            reason = messages.error_text(error, repr)
            self.fail(GraphClosedError(f"reading results was interrupted: {reason}; compile again"))
            raise
        if completed and self.expiring:
            self._expire()  # forgets the results that are done: the graph must not keep their values
        if self._lifecycle.error is not None and executions.pending:
            for edge in self._fetching:  # their threads end by themselves
                edge.fetching = None
            self._fetching.clear()
            while executions.pending:
                result = executions.end_oldest()
                if not result._done:
                    result.complete(None, self._lifecycle.error)
                result.end()
            completed = True
        return completed

    def expire(self, result: GraphResult, deadline: Deadline) -> None:
        """Let an execution fail at a deadline. From any thread."""
        self.expiring[result] = deadline
        if self._section.locked:  # the leader may sleep until a later time, which it has chosen before
            post(self.doorbell.address)

    def _expire(self) -> None:
        """Let executions fail whose own deadline has passed."""
        for result, deadline in tuple(self.expiring.items()):
            passed = deadline.left_s() == 0
            if passed and not result._done:
                error = GraphTimeoutError(
                    f"execution {result.number} did not end within its timeout_s of {deadline.timeout_s} s: "
                    f"{self.describe_wait(result.number)}. Calls that had not begun are skipped; the next results wait "
                    "for the call that runs",
                    execution=result.number,
                )
                self.executions.early_failures.append((result.number, error_message(error, "execute").body))
            if passed or result._done:
                self.expiring.pop(result, None)

    def cancel(self, result: GraphResult) -> bool:
        """Let an execution fail, and its calls that have not begun be skipped. See `GraphResult.cancel`."""
        if result.done():
            return False
        self._deadlines.cancel(result.number)
        error = GraphCancelledError(f"execution {result.number} was cancelled", execution=result.number)
        self.executions.early_failures.append((result.number, error_message(error, "cancel").body))
        self.notify()
        self.look()
        return not result._done or isinstance(result._error, GraphCancelledError)

    def _take_fetched(self, edge: CollectedEdge) -> bool:
        """Take over the tensors of a message if they have arrived. Return True if that completed a result."""
        assert edge.fetching is not None
        result, fetch = edge.fetching
        if not fetch.done():
            return False
        edge.fetching = None
        self._fetching.remove(edge)
        failure: BaseException | None = None
        try:
            if not result._done and result._values is not None:
                result._values[edge.value] = fetch.value()
        except SegmentGone:
            failure = self._lost(edge.writer)
        except GraphError as error:  # of the transport
            failure = error
        except Exception as error:
            failure = self._unreadable(edge, error)
        return self._arrived(edge, result, failure)

    def _flagged(self) -> list[CollectedEdge]:
        """Return the edges that may have messages: those whose flag is set, or all if there is none."""
        flagged: list[CollectedEdge] = []
        while (flag := self.doorbell.flagged()) >= 0:
            flagged += self._by_flag.get(flag, ())
        return flagged or self.edges

    def _read(
        self, edge: CollectedEdge, result: GraphResult, kind: int, flags: int, body: bytes | None
    ) -> BaseException | None:
        """Take over an unusual message, or start to fetch its tensors. Return the error that it carries."""
        received = edge.reader.received(kind, flags, body)
        edge.bytes += received.nbytes
        if kind == ERROR:
            return self._decode_error(received.body)
        values: Any = result._values
        if result._done:
            return None
        if kind != TICKET:
            values[edge.value] = messages.decode(kind, received.body, received.buffers, shared=received.shared)
        elif edge.fetched is not None:
            fetch = Fetch(edge.fetched, received.body, self.notify)
            edge.bytes += fetch.nbytes
            edge.fetching = result, fetch
            self._fetching.append(edge)
        return None

    def _unreadable(self, edge: CollectedEdge, error: Exception) -> GraphValueError:
        """Return the error for a message that could not be unpickled."""
        label = self.plan.source_label(edge.value)
        return GraphValueError(f"{label} could not be unpickled by the driver: {messages.error_text(error)}")

    def _arrived(self, edge: CollectedEdge, result: GraphResult, failure: BaseException | None) -> bool:
        """Note that a value of an execution has arrived, or its failure. Return True if that completed a result."""
        executions = self.executions
        values: Any = result._values
        failed_now = False
        if failure is not None:
            values[edge.value] = Failure(failure)
            if not result._done and edge.value in self._fatal:
                result.fail(failure)
                failed_now = True
        result._messages_left -= 1
        if result._messages_left:
            return failed_now
        # Executions end in order: each edge delivers in order, so no later execution can be complete before this one.
        executions.end_oldest()
        complete_result(self.plan, result, values)
        result.end()
        if result._error is not None:
            # Reports of this execution have arrived by now and must be read before the next execution is admitted:
            # see `channels.layout.report_slots`.
            self._control.poll(all_channels=True)
        return True

    def _decode_error(self, body: Any) -> BaseException:
        # Every reader gets an object of its own: tracebacks grow when an exception is raised.
        error: BaseException = messages.decode(ERROR, body, ())
        if type(error) is GraphActorDiedError:  # from an actor that could not open memory of a dead one
            return self._lost(error.fields["member"])
        return error

    def _lost(self, member: int) -> GraphError:
        """End the graph because memory of a member vanished, and return the error. A graph that is repaired continues.

        This may be the first sign of the member's death: the process watcher can be milliseconds behind.
        """
        error = self._connections.lost(member)
        if self._connections.on_death is None or not isinstance(error, GraphActorDiedError):
            self.fail(error)
        return error

    # Repair

    def mark_dead(self, members: Collection[int]) -> None:
        """Treat messages that these members have not sent as lost. Their processes must have ended. From any thread."""
        for edge in self.edges:
            edge.closed |= edge.writer in members
        self._any_closed = any(edge.closed for edge in self.edges)
        self.notify()

    def mark_alive(self, members: Collection[int]) -> None:
        """Expect messages of these members again. No execution is in flight. From any thread."""
        for edge in self.edges:
            edge.closed &= edge.writer not in members
        self._any_closed = any(edge.closed for edge in self.edges)

    # asyncio

    def future(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None] | None:
        """Return a future for a coroutine of this loop to await; None if a thread has to wait instead.

        Call `look` afterwards: messages that came before woke nobody.
        """
        future = self.bridge.future(loop)
        if future is not None:
            self.doorbell.sleeping(True)
        return future

    def overstayed(self) -> bool:
        """Return True if coroutines have used `glance` for so long that the event loop must run before the next one."""
        return self.bridge.overstayed()

    def glance(self, result: GraphResult) -> None:
        """Read messages until the result is done, but only as long as waiting without sleep pays off.

        Sleeping in the event loop and waking up takes 15-30 us, often longer than the execution. Nothing is done if
        other callbacks of the loop are ready to run.
        """
        if self.bridge.idle() and self._section.run(0, self._glance, result) is not BUSY:
            self._after_reading()

    def _glance(self, result: GraphResult) -> None:
        while not result._done and self.doorbell.glance():
            self._read_all()

    def look(self) -> None:
        """Read messages on the event loop's thread. Never waits.

        If another thread reads at the moment, it may already have passed the edge of the new message: it notifies the
        event loop again when it has finished.
        """
        if self._section.run(0, self._look) is BUSY:
            self.missed_wake = True
            # The other thread may have left the section before it could see the flag.
            if self._section.run(0, self._look) is BUSY:
                return
        self._after_reading()

    def _look(self) -> None:
        self._read_all()
        absorbed = self.doorbell.absorb()
        self._poll_reports()
        if absorbed or self.executions.early_failures:
            self._read_all()
        if not self.executions.pending:
            self.doorbell.sleeping(False)
            self.bridge.waiting = False

    # Ending

    def fail(self, error: GraphError) -> None:
        """End the graph. Whichever thread reads next fails the pending results. From any thread or finalizer."""
        # Only marked here: results are completed in the section, for which a finalizer must not wait.
        self._lifecycle.advance(Event.FAIL, error)
        self.notify()

    def close(self, timeout_s: float) -> None:
        """Fail the pending results of an ended graph and detach from asyncio. Waits at most `timeout_s` seconds."""
        self._section.run(timeout_s, self._read_all)
        self._notify_followers()
        self.bridge.close()

    def disown(self) -> None:
        """Give up the graph in a forked child, without touching anything that is shared with the parent."""
        self._connections.disown(
            GraphClosedError("this process was forked, and the graph belongs to its parent; compile a graph here")
        )
        self._section.reset()
        self._changed = threading.Condition()
        self.bridge.disown()
        executions = self.executions
        while executions.pending:
            result = executions.pending.popleft()
            if not result._done:
                result.complete(None, self._lifecycle.error)

    # Inspection

    def describe_wait(self, number: int) -> str:
        """Return for messages which results of execution `number` have not arrived."""
        late = [self.plan.source_label(edge.value) for edge in self.edges if edge.reader.sequence <= number]
        return f"still waiting for {', '.join(late)}" if late else "its messages are being read"

    def late_members(self, number: int) -> list[int]:
        """Return the members whose messages of execution `number` have not arrived, ascending."""
        return sorted({edge.reader.writer for edge in self.edges if edge.reader.sequence <= number})

    def counters(self) -> dict[int, tuple[int, int]]:
        """Return (messages, bytes) read so far, for each edge into the driver."""
        return {
            edge: (collected.reader.sequence - collected.lost, collected.reader.read_bytes + collected.bytes)
            for edge, collected in zip(self._connections.readers, self.edges, strict=True)
        }

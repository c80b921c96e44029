"""Inline backend: the same graph in one process, without Ray, for users' own tests (`compile(..., backend="inline")`).

The methods are those of plain objects. Each object gets an executor, as an actor has one, and rings lie between them:
so a value that cannot travel fails here too, and no object sees another one's values or constants. The caller's thread
runs all executors in turn: every execution is complete when `execute` returns.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import inspect
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raylane.core import trace_file
from raylane.errors import GraphActorDiedError, GraphClosedError, GraphError, GraphPlanError, GraphValueError
from raylane.graph.channels import ring
from raylane.graph.channels.lease import LeasePool, LeaseReader
from raylane.graph.channels.ring import ProcessDoorbell, Received, RingReader, RingSpec, RingWriter
from raylane.graph.driver.result import GraphResult, complete_result
from raylane.graph.inspect import critical_path, drawing, stats, trace
from raylane.graph.inspect.arrivals import Arrivals, CallRecord
from raylane.graph.inspect.text import describe
from raylane.graph.plan.ir import DRIVER, INPUT, Edge, Plan
from raylane.graph.values import message as messages
from raylane.graph.values import references
from raylane.graph.values.arguments import Arguments
from raylane.graph.values.failures import Failure
from raylane.graph.worker.executor import KEPT_RECORDS, Executor
from raylane.graph.worker.program import share_of

NO_LIMIT = 1 << 62
"""Bytes that an inline graph may lend: a wait for readers would never end, because they are on the same thread."""


class InlineGraph:
    """Graph with the interface of `CompiledGraph` that runs in this process. Thread-safe: one execution at a time."""

    def __init__(self, plan: Plan, objects: Sequence[Any], *, max_inflight: int, timeout_s: float | None) -> None:
        self.plan = plan
        self.max_inflight = max_inflight
        self.timeout_s = timeout_s
        self._objects = list(objects)
        self._arguments = Arguments(plan)
        self._encoder = messages.Encoder()
        self._lock = threading.Lock()  # held during an execution; guards everything below
        self._count = 0
        """Number of executions."""
        self._end: GraphError | None = None
        """Error that ended the graph."""
        self._interrupt: KeyboardInterrupt | None = None
        """Ctrl-C that a method has received instead of the caller of `execute`."""
        self._reported: list[Any] = []
        """Pickled errors that the executors have reported ahead of their messages."""
        self._exited: list[int] = []
        """Members whose method has asked to exit."""
        has_coroutines = any(
            inspect.iscoroutinefunction(inspect.getattr_static(kind, name, None))
            for kind in map(type, objects)
            for name in dir(kind)
        )
        self._loop = _EventLoopThread() if has_coroutines else None
        """Event loop of coroutine methods, as an asyncio actor has one."""
        if self._loop is not None:
            weakref.finalize(self, self._loop.stop)  # a graph that is dropped without teardown must not leave a thread
        writers, readers = self._open_rings()
        self._writers = writers
        self._collected = [(edge, readers[edge.index, DRIVER]) for edge in plan.edges_to(DRIVER)]
        """Edges into the driver, with their readers."""
        self._bytes = dict.fromkeys((edge.index for edge, _ in self._collected), 0)
        """Bytes received over each edge into the driver."""
        self._executors = [
            self._executor(member, instance, {edge: reader for (edge, to), reader in readers.items() if to == member})
            for member, instance in enumerate(objects, 1)
        ]
        self._executions: collections.deque[tuple[int, float, float]] = collections.deque(maxlen=KEPT_RECORDS)

    def _open_rings(self) -> tuple[dict[int, RingWriter], dict[tuple[int, int], RingReader]]:
        """Return the writing ends by edge and the reading ends by (edge, member).

        Rings have one slot: an execution begins when the one before has ended.
        """
        plan, writers, readers = self.plan, {}, {}
        pool = LeasePool(NO_LIMIT, self.timeout_s, len(plan.edges))
        sizes = [
            RingSpec(tuple(plan.members[reader] for reader in edge.readers), 1, (0,) * len(edge.readers), edge.writer)
            for edge in plan.edges
        ]
        doorbell = ProcessDoorbell()  # nobody waits for it: the executors are asked in turn
        doorbell.segment.close_fd()
        for edge, (spec, segment) in zip(plan.edges, ring.make_rings(sizes), strict=True):
            segment.close_fd()  # no other process opens it
            writers[edge.index] = RingWriter(segment, spec, [doorbell.segment] * len(edge.readers), pool)
            for index, reader in enumerate(edge.readers):
                readers[edge.index, reader] = RingReader(segment, spec, index, LeaseReader(), doorbell)
        return writers, readers

    def _executor(self, member: int, instance: Any, readers: dict[int, RingReader]) -> Executor:
        try:
            # Each object has its own constants.
            plan: Plan = references.unpack(*references.pack(share_of(self.plan, member)))
        except Exception as error:
            raise GraphPlanError(
                f"a constant in the calls of {self.plan.members[member]} cannot be pickled: {error}. Pass a value that "
                "can, or create it in the object"
            ) from error
        # The callbacks do not refer to this object: a graph that is dropped must be freed without a collection.
        reported = self._reported
        return Executor(
            plan,
            member,
            instance,
            readers,
            {edge.index: self._writers[edge.index] for edge in plan.edges_from(member)},
            loop=None if self._loop is None else self._loop.loop,
            lock=None,
            on_exit=functools.partial(self._exited.append, member),
            on_failure=lambda execution, error, flags: reported.append(error.body),
            timeout_s=self.timeout_s,
        )

    def execute(self, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> GraphResult:
        """Run all calls now, without a deadline. Errors of methods are raised by the result's `get`, as with actors."""
        with self._lock:
            if self._end is not None:
                raise type(self._end)(self._end.message, **self._end.fields)
            # Encode all inputs before any method runs: an input that cannot be pickled fails as with actors.
            inputs = self._arguments.values(args, kwargs)
            sent = [(edge.index, self._encoder.encode(inputs[edge.value])) for edge in self.plan.edges_from(DRIVER)]
            values: list[Any] = [None] * len(inputs)
            for value in self.plan.collects:
                if self.plan.values[value].source == INPUT:
                    values[value] = messages.duplicate(self._encoder.encode(inputs[value]))
            result = GraphResult(None, self._count, 0, [], False)
            try:
                for edge, message in sent:
                    self._writers[edge].write(self._count, message)
                self._run(result, values)
            except BaseException:  # Ctrl-C between two calls: the executors are no longer in step
                self._end = GraphClosedError("execute was interrupted; compile the graph again")
                raise
            self._count += 1
            self._executions.append((result.number, result.submitted_s, time.perf_counter()))
            interrupt, self._interrupt = self._interrupt, None
            if interrupt is not None:
                raise interrupt
            return result

    execute_nowait = execute

    async def execute_async(self, *args: Any, **kwargs: Any) -> GraphResult:
        """Run all calls on a thread, while the event loop runs."""
        return await asyncio.to_thread(self.execute, *args, **kwargs)

    def _run(self, result: GraphResult, values: list[Any]) -> None:
        """Run all executors until none can go on, and complete the result from what they have sent to the driver."""
        if self._loop is not None:
            self._loop.start()
        advanced = True
        while advanced:
            advanced = False
            for executor in self._executors:
                while executor.advance():
                    advanced = True
                    self._collect(result, values)
        if self._exited:
            name = self.plan.members[self._exited[0]]
            self._end = GraphActorDiedError(f"{name} exited, and with it the graph; compile it again")
        # After an exit some messages may never come.
        if all(reader.sequence > result.number for _, reader in self._collected):
            complete_result(self.plan, result, values)
        elif not result._done:
            result.complete(None, self._end)

    def _collect(self, result: GraphResult, values: list[Any]) -> None:
        """Read what executors have sent to the driver. The first failure that counts fails the result."""
        while self._reported:
            self._fail(result, messages.decode(messages.ERROR, self._reported.pop(0), ()), True)
        for edge, reader in self._collected:
            message = reader.poll()
            if message is not None:
                values[edge.value] = value = self._read(edge, reader.received(*message))
                if type(value) is Failure:
                    self._fail(result, value.error, edge.value in self.plan.fatal_values)

    def _fail(self, result: GraphResult, error: BaseException, fatal: bool) -> None:
        if isinstance(getattr(error, "cause", None), KeyboardInterrupt):
            self._interrupt = KeyboardInterrupt()
        if fatal and not result._done:
            result.complete(None, error)

    def _read(self, edge: Edge, received: Received) -> Any:
        self._bytes[edge.index] += received.nbytes
        try:
            value = messages.decode(received.kind, received.body, received.buffers, shared=received.shared)
        except Exception as error:
            label = self.plan.source_label(edge.value)
            text = f"{label} could not be unpickled by the driver: {messages.error_text(error, repr)}"
            return Failure[BaseException](GraphValueError(text))
        return Failure(value) if received.kind == messages.ERROR else value

    # Inspection

    def show(self) -> str:
        """Return the graph as text: objects with their calls in order, and the edges between them."""
        return describe(self.plan, max_inflight=self.max_inflight)

    def draw(self, path: str | Path) -> None:
        """Write the graph as Mermaid text, into a file that ends in .md or .mmd; ValueError for another ending."""
        drawing.write(path, self.plan, max_inflight=self.max_inflight)

    def stats(self) -> dict[str, Any]:
        """Return counters like `CompiledGraph.stats`. There is no leased memory here."""
        answers = {member: executor.stats() | {"lent_bytes": 0} for member, executor in enumerate(self._executors, 1)}
        collected = {edge.index: (reader.sequence, self._bytes[edge.index]) for edge, reader in self._collected}
        counters = stats.graph_stats(self.plan, answers, collected)
        executions = {"submitted": self._count, "completed": self._count}
        arrivals = Arrivals(self.plan, self._records(), list(self._executions))
        time = stats.where_time_went(self.plan, stats.spent_of_answers(answers), arrivals)
        return {"executions": executions, **counters, "time": time, "unanswered": []}

    def publish_metrics(self, name: str = "graph") -> None:
        """Do nothing: there is no Ray that would export metrics."""

    def explain(self, last: int = 200) -> str:
        """Return as text where the time of the `last` executions went, like `CompiledGraph.explain`."""
        return critical_path.explain(self.plan, self._records(), list(self._executions)[-last:])

    def trace(self, path: str | Path) -> list[str]:
        """Write the last executions as a trace for Perfetto or chrome://tracing. Return an empty list."""
        trace_file.save(path, trace.chrome_trace(self.plan, self._records(), list(self._executions)))
        return []

    def _records(self) -> list[CallRecord]:
        """Return the records of the last calls of all objects."""
        return [record for executor in self._executors for record in executor.recorder.records()]

    # Ending

    def recompile(self) -> InlineGraph:
        """End this graph and return a new one with the same nodes, objects and options."""
        self.teardown()
        return InlineGraph(self.plan, self._objects, max_inflight=self.max_inflight, timeout_s=self.timeout_s)

    def teardown(self, timeout: float = 5.0) -> None:
        """End the graph: `execute` raises GraphClosedError from now on. A second call does nothing."""
        with self._lock:
            self._end = self._end or GraphClosedError("the graph was torn down; compile it again")
        if self._loop is not None:
            self._loop.stop()

    def __enter__(self) -> InlineGraph:
        return self

    def __exit__(self, *_: object) -> None:
        self.teardown()

    def __repr__(self) -> str:
        state = "ready" if self._end is None else "ended"
        return f"InlineGraph({len(self.plan.tasks)} calls on {len(self.plan.members) - 1} objects, {state})"


class _EventLoopThread:
    """Event loop on a thread of its own. Like an actor's loop it runs between calls too: background tasks continue."""

    def __init__(self) -> None:
        # With a factory, so that the loop does not become that of the calling thread.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run, name="raylane-inline", daemon=True)

    def start(self) -> None:
        """Start the thread. A second call does nothing."""
        if self._thread.ident is None:
            self._thread.start()

    def stop(self) -> None:
        """Cancel all tasks and end the thread. A second call does nothing."""
        if self._thread.ident is None:
            self.loop.close()
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.loop.stop)
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def _run(self) -> None:
        self.loop.run_forever()
        self._runner.close()  # cancels the tasks that have not ended

"""The public compiled graph: `execute` and its variants, inspection, teardown.

execute  -> submit.Submitter     inputs to the actors
get      -> collect.Collector    results from the actors
stats    -> control.ControlChannels
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from raylane import _ray
from raylane.core import trace_file
from raylane.core.deadline import Deadline
from raylane.errors import GraphClosedError, GraphError, GraphFullError
from raylane.graph.channels.layout import GraphOptions
from raylane.graph.channels.lease import POLL_INTERVAL_S
from raylane.graph.driver.collect import Collector
from raylane.graph.driver.deploy import deploy, wait_until_alive
from raylane.graph.driver.metrics import Publisher
from raylane.graph.driver.repair import Repairer
from raylane.graph.driver.repair_states import RepairState
from raylane.graph.driver.result import Executions, GraphResult
from raylane.graph.driver.submit import NoMemory, NotAdmitted, Paused, Prepared, SubmitBusy, Submitter
from raylane.graph.inspect import critical_path, drawing, stats, trace
from raylane.graph.inspect.arrivals import Arrivals, CallRecord, DriverRecord
from raylane.graph.inspect.text import describe
from raylane.graph.lifecycle import State
from raylane.graph.plan.ir import Plan

NAMED_EXECUTIONS = 1000
"""Number of past executions from which `stats` finds the members that an actor waited for."""


class CompiledGraph:
    """A graph of actor calls that runs over shared memory. Created by `raylane.compile`.

    Thread-safe. As a context manager it ends with `teardown`.
    """

    def __init__(self, plan: Plan, actors: Sequence[Any], options: GraphOptions) -> None:
        """Open the channels of a plan and create its graph; `raylane.compile` calls this."""
        connections, setup = deploy(plan, actors, options)
        self.plan = plan
        self.max_inflight = options.max_inflight
        self.timeout_s = options.timeout_s
        self._options = options
        self._connections = connections
        self._executions = Executions()
        self._publisher = Publisher()
        self._collector = Collector(plan, connections, self._executions, options.timeout_s)
        self._submitter = Submitter(plan, connections, self._executions, self._collector, options)
        self._submit = self._submitter.submit
        self._repairer = (
            Repairer(self, connections, setup, self._collector, self._submitter, options) if options.repairs else None
        )

    # Executing

    def execute(self, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> GraphResult:
        """Start one execution with these inputs and return its result, which may not be done yet.

        Waits while `max_inflight` executions are under way, at most the graph's `timeout` (GraphTimeoutError; then
        nothing was started). The inputs may be changed as soon as this returns.

        `timeout_s` is a deadline for this execution, the wait included: then its result fails with GraphTimeoutError,
        and actors on this host skip its calls that have not begun. A method that runs is not interrupted.

        TypeError if the inputs are not those that the graph names; GraphValueError if an input cannot be pickled;
        GraphActorDiedError or GraphClosedError if the graph has ended. With `on_death="repair"` also waits while an
        actor restarts, and raises GraphActorDiedError if Ray does not restart it.
        """
        if timeout_s is None:
            return self._submit(args, kwargs, self.timeout_s)
        wait_s = timeout_s if self.timeout_s is None else min(timeout_s, self.timeout_s)
        return self._submit(args, kwargs, wait_s, Deadline(timeout_s))

    def execute_nowait(self, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> GraphResult:
        """Start one execution like `execute`, but raise GraphFullError instead of waiting."""
        return self._submit(args, kwargs, 0, None if timeout_s is None else Deadline(timeout_s))

    async def execute_async(self, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> GraphResult:
        """Start one execution like `execute`, but let the event loop run during the wait. Await the result as well."""
        end = None if timeout_s is None else Deadline(timeout_s)
        deadline = Deadline(self.timeout_s)
        if end is not None and end.at < deadline.at:
            deadline = end
        prepared: Prepared | None = None
        while True:
            try:
                # The inputs are encoded once, however often this waits.
                if prepared is not None:
                    return self._submitter.submit_prepared(prepared, end)
                return self._submit(args, kwargs, 0, end)
            except GraphFullError as error:
                reason = type(error)
                if isinstance(error, NotAdmitted):
                    prepared = error.prepared
            remaining_s = deadline.left_s()
            if remaining_s is not None and remaining_s <= 0:
                raise self._submitter.timeout_error(deadline.timeout_s) from None
            # Readers post no doorbell when they return memory, so this is the one wait that polls.
            if reason is NoMemory:
                await asyncio.sleep(POLL_INTERVAL_S)
                continue
            # Another thread submits, perhaps pickling a large input, or the graph is repaired: wait on a thread.
            if reason is SubmitBusy or reason is Paused:
                loop = asyncio.get_running_loop()
                wait = self._submitter.wait_until_free if reason is SubmitBusy else self._submitter.wait_until_resumed
                await loop.run_in_executor(None, wait, remaining_s)
                continue
            try:
                oldest = self._executions.pending[0]
            except IndexError:  # an execution has ended meanwhile
                await asyncio.sleep(0)
            else:
                await oldest.wait_until_ended(self._collector, None if end is None else remaining_s)

    @property
    def spans_hosts(self) -> bool:
        """True if messages of the graph travel between hosts."""
        return self._connections.network is not None

    @property
    def ended_by(self) -> GraphError | None:
        """Error that has ended the graph; None while it runs."""
        return self._connections.lifecycle.error

    def drain(self, timeout: float | None = None, *, remaining: int = 0, stop_at_failure: bool = False) -> bool:
        """Wait until at most `remaining` executions are under way, for `timeout` seconds at most (None: no limit).

        Return False after the timeout. With `stop_at_failure` also return False as soon as an execution has failed of
        which other calls still run. Reads no result.
        """
        pending = self._executions.pending

        def failed() -> bool:
            return stop_at_failure and any(result._done for result in tuple(pending))

        self._collector.collect_until(lambda: len(pending) <= remaining or failed(), Deadline(timeout))
        return len(pending) <= remaining

    def ended(self, result: GraphResult) -> bool:
        """Return True if every call of an execution has ended: a result may fail long before. Does not wait."""
        return self._collector.collect_until(lambda: result._values is None, Deadline(0))

    def late_members(self, result: GraphResult) -> list[int]:
        """Return the members (1, 2, ... as in `plan.members`) whose calls of an execution have not ended, ascending."""
        return [] if self.ended(result) else self._collector.late_members(result.number)

    # Inspection

    def show(self) -> str:
        """Return the graph as text: actors with their calls in order, edges with their channels. Does not wait."""
        return describe(self.plan, self._connections.describe_channels(), max_inflight=self.max_inflight)

    def draw(self, path: str | Path) -> None:
        """Write the graph as Mermaid text, into a file that ends in .md or .mmd; ValueError for another ending."""
        drawing.write(path, self.plan, self._connections.describe_channels(), max_inflight=self.max_inflight)

    def stats(self) -> dict[str, Any]:
        """Return the counters since the graph was compiled. Counting is always on.

        `executions`: submitted, completed. `calls`, by name: count and seconds spent waiting (from the end of the
        previous call until all inputs have arrived), computing and sending. `edges`, by name: messages, bytes and the
        transport that was asked for. `lent_bytes`: memory that readers of a member's arrays keep. `time`, by actor: in
        words the shares of waiting (and for whom, in the last 1,000 executions), computing and sending. Asks every
        actor and waits up to 5 s for one that is busy in a method; `unanswered` names those that did not answer.

        The words cost each actor up to 8 ms, in which its graph waits: for frequent samples use `publish_metrics`.
        """
        counters, answers = self._counters()
        # Only the actors that have just answered: a busy one would take five more seconds.
        calls, executions, _ = self._records(NAMED_EXECUTIONS, answers)
        arrivals = Arrivals(self.plan, calls, executions)
        return {**counters, "time": stats.where_time_went(self.plan, stats.spent_of_answers(answers), arrivals)}

    def publish_metrics(self, name: str = "graph") -> None:
        """Add the counters of `stats` to Ray's metrics, which Ray exports to Prometheus. `name` is the tag `graph`.

        The counters are `raylane_graph_executions_submitted` and `_completed`; `raylane_graph_waiting_seconds`,
        `_computing_seconds` and `_sending_seconds` with the tag `actor`; `raylane_graph_edge_messages` and
        `_edge_bytes` with the tag `edge`. Call this from time to time, for example once in a hundred steps: each call
        adds what is new since the last one, and executions cost nothing more. Asks every actor, like `stats`.
        """
        counters = self._counters()[0]
        pids = {member: info.place.pid for member, info in enumerate(self._connections.infos, 1)}
        processes = {self.plan.members[member]: pid for member, pid in pids.items()}
        # Of several readers of an edge the highest counter is taken, which restarts with none of them.
        alone = {edge.index: edge.readers[0] for edge in self.plan.edges if len(edge.readers) == 1}
        processes |= {stats.edge_label(self.plan, edge): pids.get(reader, 0) for edge, reader in alone.items()}
        self._publisher.publish(name, counters, processes)

    def _counters(self) -> tuple[dict[str, Any], dict[int, Any]]:
        """Return the counters of `stats`, without words, and the answers of the actors by member."""
        # Before the actors are asked: a busy one may take seconds to answer.
        executions = {"submitted": self._executions.submitted, "completed": self._executions.completed}
        collected = self._collector.counters()
        answers, silent = self._connections.control.ask_all("stats")
        counters = stats.graph_stats(self.plan, answers, collected)
        counters["lent_bytes"]["driver"] = self._connections.leased_bytes()
        return {"executions": executions, **counters, "unanswered": silent}, answers

    def explain(self, last: int = 200) -> str:
        """Return as text where the time of the `last` executions went: the critical path with the median of each leg.

        The path leads from the submission to the result, through the calls and messages that decided when the next one
        could start. It ends when the driver has read the result, so a driver that reads late makes it longer. Asks
        every actor and waits up to 5 s for one that is busy; executions without complete records are left out.
        """
        calls, executions, _ = self._records(last)
        return critical_path.explain(self.plan, calls, executions)

    def trace(self, path: str | Path) -> list[str]:
        """Write the last executions (up to 8,192 calls of each actor) as a trace for Perfetto or chrome://tracing.

        Return the names of actors that did not answer within 5 s, because they were busy.
        """
        calls, executions, silent = self._records()
        pids = {member: info.place.pid for member, info in enumerate(self._connections.infos, 1)}
        trace_file.save(path, trace.chrome_trace(self.plan, calls, executions, pids=pids))
        return silent

    def _records(
        self, last: int | None = None, members: Collection[int] | None = None
    ) -> tuple[list[CallRecord], list[DriverRecord], list[str]]:
        """Return the records of calls and executions, on the driver's clock, and the names of actors without answer.

        Of the last executions (or all that are kept), and of these members (or all).
        """
        oldest = 0 if last is None else self._executions.completed - last
        answers, silent = self._connections.control.ask_all("trace", members)
        offsets = {member: self._connections.clock_offset_s(member) for member in answers}
        calls: list[CallRecord] = [
            (task, execution, *(at_s - offsets[member] for at_s in times))
            for member, records in answers.items()
            for task, execution, *times in records
            if execution >= oldest
        ]
        return calls, [record for record in self._executions.records() if record[0] >= oldest], silent

    # Ending

    def recompile(self) -> CompiledGraph:
        """End this graph and return a new one: same nodes, same actors, same options.

        Use this after an actor has died that Ray restarts (`max_restarts`). Waits until all actors are alive again and
        free, at most the graph's `timeout` (600 s without one). Pending results of this graph raise GraphClosedError,
        or the error that has ended the graph. A restarted actor has the state that its `__init__` leaves.

        GraphActorDiedError names an actor that Ray does not restart; GraphTimeoutError an actor that is not alive in
        time, or is busy. After both this method can be called again.
        """
        self.teardown()
        actors = self._connections.actors
        wait_until_alive(self.plan, actors, self._options.start_timeout_s)
        return CompiledGraph(self.plan, actors, self._options)

    def replace(self, old_actor: Any, new_actor: Any) -> None:
        """Let another actor take the place of a dead one that Ray does not restart. Only with `on_death="repair"`.

        Waits until the new actor has started and its channels are open, at most the graph's `timeout` (600 s without
        one). The new actor needs the methods that the graph calls; the handle of the dead one stays in constants. With
        the same actor twice this waits again for a restart that Ray was too late with.

        GraphPlanError if the new actor cannot take part (then call this again), GraphActorDiedError if it has died,
        GraphTimeoutError if it is not ready in time, GraphError if the old actor is alive.
        """
        if self._repairer is None:
            raise GraphError(
                "replace needs a graph that was compiled with on_death='repair'. Compile with another actor"
            )
        for actor in (old_actor, new_actor):
            if not _ray.is_handle(actor):
                raise TypeError(f"replace: {type(actor).__name__} is no actor: pass handles of actors")
        self._repairer.replace(old_actor, new_actor)

    def teardown(self, timeout: float = 5.0) -> None:
        """End the graph and free its memory.

        Pending results raise GraphClosedError. Waits at most `timeout` seconds for actors that are busy; they leave the
        graph after their present method. Arrays of results stay valid. A second call does nothing. Python also does
        this at exit and, without waiting, when the graph is garbage.
        """
        self._collector.fail(GraphClosedError("the graph was torn down; compile it again"))
        # Results first, then the actors: a pending `get` must not wait for an actor that is busy.
        self._collector.close(timeout)
        if self._repairer is not None:
            self._repairer.close(timeout)
        self._connections.close(timeout)
        self._submitter.release_memory(timeout)

    def __enter__(self) -> CompiledGraph:
        return self

    def __exit__(self, *_: object) -> None:
        self.teardown()

    def __repr__(self) -> str:
        running = self._connections.lifecycle.state is State.RUNNING
        state = f"{self._executions.inflight} under way" if running else "ended"
        if running and self._repairer is not None and self._repairer.state is not RepairState.INTACT:
            state += f", repair: {self._repairer.state.value}"
        return f"CompiledGraph({len(self.plan.tasks)} calls on {len(self.plan.members) - 1} actors, {state})"

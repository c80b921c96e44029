"""Session of one graph in one actor: opens the channels, creates the `Executor`, obeys the driver's orders, cleans up.

The driver sends orders over a control channel of the graph's own, because an ordinary call to the actor would wait for
the method that the actor runs at that moment:

    driver  --orders ring-->   session: "stats", "trace", "close", `MembersDied`, `MembersRestarted`
    driver  <--reports ring--  session: answers, failures of executions, defects, the exit of the actor

Created by `bootstrap.join_graph`, on the actor's own thread; from then on only the graph loop's thread uses it.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable
from typing import Any

from raylane import _ray
from raylane.core.deadline import Deadline
from raylane.core.process.place import Place, alive
from raylane.core.signals import wake
from raylane.core.signals.semaphore import try_wait
from raylane.errors import GraphClosedError, GraphError, GraphPlanError
from raylane.graph.channels import published
from raylane.graph.channels.deadlines import ExecutionDeadlines
from raylane.graph.channels.ends import ChannelEnds, notify_new_readers, open_shared
from raylane.graph.channels.lease import LeasePool, LeaseReader
from raylane.graph.channels.peer_network import PeerNetwork
from raylane.graph.channels.ring import WAKE, ProcessDoorbell, RingWriter
from raylane.graph.lifecycle import Event, ExecutorState, Lifecycle
from raylane.graph.plan.ir import DRIVER
from raylane.graph.values import message as messages
from raylane.graph.worker import exclusive
from raylane.graph.worker.executor import Executor
from raylane.graph.worker.program import ANSWER, EXITED, TROUBLE, MembersDied, MembersRestarted, Program

MAX_ANSWER_BYTES = 64 << 20
"""Size limit of an answer to the driver; a trace of 8,192 calls takes about 1 MB."""


class Session:
    """One graph in this actor. `lifecycle` leaves RUNNING when the loop must remove it."""

    def __init__(
        self,
        program: Program,
        instance: Any,
        loop: asyncio.AbstractEventLoop | None,
        network: PeerNetwork | None,
        doorbell: ProcessDoorbell,
        exclusive_lock: threading.RLock,
    ) -> None:
        """Open all channels. `loop` is that of an asyncio actor; `network` exists if the graph spans hosts.

        `doorbell` and `exclusive_lock` are those of the graph loop.
        """
        layout, plan, options = program.layout, program.plan, program.layout.options
        self._layout = layout
        self.name = layout.graph
        self.flag = layout.flag
        """Flag of the rings of this graph on the page of the process's doorbell."""
        self.actor_name = _ray.describe_self()
        self.owner_name = program.owner_name
        # A driver on another host has another pid namespace or kernel: a link notices its end.
        self._owner = program.owner if layout.near_driver else None
        self.network = network
        """Connections to other hosts, if the graph spans hosts."""
        self.lifecycle = Lifecycle() if network is None else network.lifecycle
        self._exclusive_instance = instance if options.exclusive else None
        if network is not None:
            # Links first: writers below need them.
            network.connect(layout, Deadline(options.timeout_s))
        ends = ChannelEnds(layout, links={} if network is None else network.links)
        edges = [edge.index for edge in plan.edges_from(layout.member)]
        # The driver admits an execution only when the one `max_inflight` before it was read by every reader.
        read_within = options.max_inflight * len(edges)
        self._pool = LeasePool(
            options.max_lent_bytes, options.timeout_s, read_within, waits=False, lifecycle=self.lifecycle
        )
        self._leases = LeaseReader()
        self._borrowed_wake: tuple[Place, int] | None = None
        """Owner and number of the eventfd that this session uses."""
        self._encoder = messages.Encoder()
        self._reports_sent = 0
        self._reopening: MembersRestarted | None = None
        """Order that is obeyed when all earlier executions have run here."""
        self._orders = ends.reader(layout.orders, self._leases, doorbell)
        # Answers are no part of an execution, and a trace may be larger than what an edge may lend.
        answers = LeasePool(max(options.max_lent_bytes, MAX_ANSWER_BYTES), options.timeout_s, lifecycle=self.lifecycle)
        self._reports = ends.writer(layout.reports, answers)
        published.check_available(plan, layout.member)
        self._writers = {
            edge: ends.edge_writer(plan.edges[edge], plan.source_label(plan.edges[edge].value), self._pool)
            for edge in edges
        }
        self.executor = Executor(
            plan,
            layout.member,
            instance,
            {edge.index: ends.reader(edge.index, self._leases, doorbell) for edge in plan.edges_to(layout.member)},
            self._writers,
            loop=loop,
            lock=exclusive_lock if options.exclusive else None,
            on_exit=self._exit_actor,
            on_failure=self._report_failure,
            timeout_s=options.timeout_s,
            doorbell=doorbell,
            first_execution=layout.first_execution,
            deadlines=ExecutionDeadlines(open_shared(layout.deadlines, layout.names[DRIVER]), options.max_inflight)
            if layout.deadlines
            else None,
        )
        # Last, when nothing can fail any more: a descriptor, and a session that was not created is not closed.
        self.wake_refused = self._fetch_wake_fd(program) if layout.near_driver else None
        """Reason why this process cannot wake the driver's asyncio loop; None if it can."""

    def _fetch_wake_fd(self, program: Program) -> str | None:
        """Fetch the driver's eventfd and give it to all writers to the driver. Return the reason if that fails."""
        try:
            # A copy of the driver's descriptor. Fetched now, at compile, while the number certainly means the eventfd.
            fd = wake.borrow(program.owner, program.wake_fd)
        except OSError as error:
            return str(error)
        self._borrowed_wake = program.owner, program.wake_fd
        to_driver = [w for edge, w in self._writers.items() if DRIVER in program.plan.edges[edge].readers]
        for writer in (*to_driver, self._reports):
            if isinstance(writer, published.PublishingWriter):
                writer = writer.under
            if isinstance(writer, RingWriter):  # messages over a link: the driver's receiver writes the eventfd
                writer.wake_with(fd)
        return None

    def call_before_user_code(self, hook: Callable[[], None]) -> None:
        """Call `hook` before any code of the actor runs for this graph."""
        self.executor.before_user_code = hook

    def obey(self) -> bool:
        """Obey one order of the driver. Return False if there is none. Does not wait."""
        reopening = self._reopening
        if reopening is not None and self.executor.has_run_all_before(reopening.execution):
            self._answer_reopening(self._reopen)
            return True
        # After the exit of the actor, orders are for the process that takes its place.
        if self.executor.state is ExecutorState.STOPPED or try_wait(self._orders.full):
            return False
        (order,) = pickle.loads(self._orders.receive().body)
        if self._reopening is not None:  # the driver counts answers, so they keep the order of the orders
            self._answer_reopening(lambda order: GraphClosedError("another order came before the channels were open"))
        if isinstance(order, MembersRestarted):
            self._reopening = order
            return True
        answer: Any = None
        if isinstance(order, MembersDied):
            self._mark_dead(order)
        elif order == "close":
            # The loop removes the session after this; the answer is written before, and the driver waits for it.
            self.lifecycle.advance(Event.LEAVE)
            self._take_back()
        elif order == "stats":
            sent = {edge: writer.written_bytes for edge, writer in self._writers.items()}
            leased = self._pool.leased_bytes() + (0 if self.network is None else self.network.leased_bytes())
            answer = self.executor.stats() | {"sent_bytes": sent, "lent_bytes": leased}
        elif order == "trace":
            answer = self.executor.recorder.records()
        else:
            answer = GraphError(f"{self.actor_name} does not know the order {order!r}")
        self._report(ANSWER, answer)
        return True

    def _mark_dead(self, order: MembersDied) -> None:
        self.executor.mark_dead(order.members, order.execution)
        for member in order.members:
            self._pool.drop_reader(self._layout.names[member])

    def _answer_reopening(self, obey: Callable[[MembersRestarted], GraphError | None]) -> None:
        order, self._reopening = self._reopening, None
        assert order is not None
        self._report(ANSWER, obey(order))

    def _reopen(self, order: MembersRestarted) -> GraphError | None:
        """Open the channels to processes that take the place of dead ones. Return the error if one cannot be opened."""
        try:
            doorbells = {
                member: open_shared(path, self._layout.names[member]) for member, path in order.doorbells.items()
            }
        except GraphPlanError as error:  # the new process has ended too
            return error
        notify_new_readers(self._layout, self._writers.items(), doorbells)
        for pid in order.ended_pids:
            self._leases.forget_process(pid)
        return None

    def _report(self, name: str, answer: Any, flags: int = 0) -> None:
        self._reports.write(self._reports_sent, self._encoder.encode((name, answer)), flags)
        self._reports_sent += 1

    def _report_failure(self, execution: int, error: messages.Message, flags: int) -> None:
        """Report to the driver that an execution fails.

        A driver on another host gets the report over the channel for alarms: messages of edges and of the reports
        channel may overtake one another there, and the reports ring would be overrun.
        """
        report = messages.Message(messages.ERROR, pickle.dumps((execution, bytes(error.body)), 5))
        if isinstance(self._reports, RingWriter):
            self._reports.write(self._reports_sent, report, flags & WAKE)
            self._reports_sent += 1
        elif self.network is not None:
            self.network.report(report)

    def _exit_actor(self) -> None:
        """Report that a method has exited the actor, then exit: Ray takes seconds, the driver should not wait."""
        self._report(EXITED, None, WAKE)
        _ray.exit_this_actor()

    def fail(self, error: BaseException) -> None:
        """Report to the driver that a defect of raylane or of this machine has ended the graph here."""
        self._report(TROUBLE, f"{self.actor_name} cannot continue with the graph: {messages.error_text(error)}")

    def check_owner(self) -> None:
        """Advance the lifecycle to ORPHANED if the driver on this host has ended."""
        if self._owner is not None and not alive(self._owner):
            self.lifecycle.advance(Event.OWNER_GONE)
            self._take_back()

    def _take_back(self) -> None:
        """Take what was sent and not read, because the graph has ended everywhere."""
        for writer in self._writers.values():
            writer.take_back()

    def close(self) -> None:
        """Release everything. Leased memory stays valid for the readers that keep it."""
        self.lifecycle.advance(Event.CLOSE)  # first: no thread of the network waits from now on
        self.executor.close()
        for writer in self._writers.values():
            if isinstance(writer, published.PublishingWriter):
                writer.close()
        if self.network is not None:
            self.network.close()
        borrowed, self._borrowed_wake = self._borrowed_wake, None
        if borrowed is not None:
            wake.give_back(*borrowed)
        if self._exclusive_instance is not None:
            exclusive.remove_graph(self._exclusive_instance)

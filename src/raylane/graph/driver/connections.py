"""The driver's ends of all channels of one graph, and its watch over the actors. Created by `deploy`."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from raylane import _ray
from raylane.core.deadline import Deadline
from raylane.core.memory.segment import Segment
from raylane.core.process.place import Place, alive, here
from raylane.core.process.watcher import Watch, watcher
from raylane.core.signals import wake
from raylane.errors import GraphClosedError, GraphError, GraphTimeoutError
from raylane.graph.channels.deadlines import ExecutionDeadlines
from raylane.graph.channels.lease import LeasePool, LeaseReader
from raylane.graph.channels.peer_network import PeerNetwork
from raylane.graph.channels.published import EdgeWriter, PublishingWriter
from raylane.graph.channels.receiver import JOIN_S
from raylane.graph.channels.ring import ProcessDoorbell, RingReader
from raylane.graph.driver.control import ControlChannels
from raylane.graph.lifecycle import Event, Lifecycle, State
from raylane.graph.nodes import EDGE_TRANSPORTS
from raylane.graph.plan import routing
from raylane.graph.plan.ir import DRIVER, Plan
from raylane.graph.plan.routing import CONTROL_LEVEL, Routes
from raylane.graph.worker.program import ActorInfo

EXIT_S = 1.0
"""Seconds to wait for the end of a process whose memory has vanished: its files are closed a moment before."""

CUDA_NOTE = "CUDA tensors go through host memory"
LARGE_CUDA_NOTE = "large CUDA tensors by direct transport"


class Connections:
    """Channels of one graph, as the driver uses them."""

    def __init__(self, plan: Plan, actors: Sequence[Any], infos: Sequence[ActorInfo], *, repairs: bool = False) -> None:
        """Create without channels. `actors` and `infos` are those of members 1, 2, ...

        With `repairs` the graph continues after the death of an actor.
        """
        with_gpus = {i: info.place for i, info in enumerate(infos, 1) if info.sees_gpu}
        # A channel that publishes tensors cannot be opened anew.
        self.plan = plan if repairs else routing.publishing_cuda(plan, with_gpus)
        self.repairs = repairs
        self.actors = list(actors)
        """Handles: a graph keeps its actors alive."""
        self.infos = list(infos)
        self.lifecycle = Lifecycle()
        self._on_end: Callable[[GraphError], object] = functools.partial(self.lifecycle.advance, Event.FAIL)
        """Function that ends the graph; replaced by `watch`."""
        self.on_death: Callable[[int, Place], bool] | None = None
        """Function (member, place of its process) that begins the repair of the graph. False if nothing repairs it."""
        self.kept_segments: list[Segment] = []
        """Segments whose descriptors stay open until the end, so that restarted actors can open them."""
        self.doorbell = ProcessDoorbell()
        self.routes = Routes(())
        self.network: PeerNetwork | None = None
        """Connections to other hosts, if the graph spans hosts."""
        self.inputs: list[tuple[EdgeWriter, int]] = []
        """(writer, value) of each edge that carries an input."""
        self.readers: dict[int, RingReader] = {}
        """Reading end of each edge that leads to the driver."""
        self.pool: LeasePool | None = None
        """Memory for inputs."""
        self.deadlines: ExecutionDeadlines
        """Deadlines of executions, which actors on this host see; set by `ChannelSetup`."""
        self.leases = LeaseReader()
        # Looked up now: an error message must not need a handle whose actor is dead.
        ids = [_ray.actor_id_of(actor) for actor in self.actors]
        self.control = ControlChannels([info.name for info in self.infos], ids, self.lifecycle, repairs=repairs)
        self._watches: dict[int, Watch] = {}
        """Watches of the actors' processes on this host, by member."""
        self.wake_fd = wake.own()
        """Eventfd of this process, which wakes its asyncio loops."""
        self.wake_refused: str | None = None
        """Reason why an actor of this host cannot write to `wake_fd`; None if all can."""

    def wake_from_receivers(self) -> None:
        """Let the receivers of messages from other hosts write to the eventfd, as actors of this host do."""
        for edge in self.readers:
            route = self.routes.edges[edge]
            if route.ring_of(DRIVER) != route.writer:
                assert self.network is not None
                self.network.ring_writer(edge).own_wake_fd(os.dup(self.wake_fd))

    def describe_channels(self) -> dict[int, list[tuple[str, str]]]:
        """Return [(kind, note)] for each edge, for `show` and `draw`."""
        kinds = {}
        for edge in self.plan.edges:
            route = self.routes.edges[edge.index]
            kind, notes = routing.kind(route), [routing.note(route, self.plan.members)]
            if edge.transport not in EDGE_TRANSPORTS:
                kind, notes = edge.transport, [f"tickets: {kind}", *notes]
            elif edge.publishes_cuda:
                notes.append(LARGE_CUDA_NOTE)
            elif any(self.infos[member - 1].sees_gpu for member in (edge.writer, *edge.readers) if member != DRIVER):
                notes.append(CUDA_NOTE)
            kind = "tcp" if edge.transport == "tcp" else kind
            kinds[edge.index] = [(kind, "; ".join(filter(None, notes)))]
        return kinds

    def leased_bytes(self) -> int:
        """Return the bytes that this process has leased to readers of its host."""
        driver_bytes = 0 if self.pool is None else self.pool.leased_bytes()
        return driver_bytes + (0 if self.network is None else self.network.leased_bytes())

    def clock_offset_s(self, member: int) -> float:
        """Return time.perf_counter() of a member minus that of this process, measured when the graph was compiled.

        0 within one machine; otherwise accurate to half a round trip.
        """
        if self.network is None or self.infos[member - 1].place.same_host(here()):
            return 0.0
        link = self.network.links.get((member, CONTROL_LEVEL))
        return 0.0 if link is None else link.clock_offset_s

    def watch(self, on_end: Callable[[GraphError], None], on_failure: Callable[[int, Any], None]) -> None:
        """Call `on_end` when an actor has died or a link is lost, and `on_failure` when an execution has failed.

        `on_failure` gets the number of the execution and a pickled error. Both are called from any thread.
        """
        self._on_end = on_end
        self.control.on_failure = on_failure
        for member in range(1, len(self.plan.members)):
            if not self.routes.orders[member - 1].relays:  # else on another host: the link notices its end
                self.watch_member(member)

    def watch_member(self, member: int) -> None:
        """Watch the present process of a member on this host, and no other process of it."""
        previous = self._watches.pop(member, None)
        if previous is not None:
            previous.forget()
        place = self.infos[member - 1].place
        on_end = functools.partial(self._process_ended, member, place)
        watch = watcher.watch_identified(place.pid, place.start_ticks, on_end)
        if watch is None:  # the process has ended since it was described
            on_end()
        else:
            self._watches[member] = watch

    def _process_ended(self, member: int, place: Place) -> None:
        if self.infos[member - 1].place == place:  # else another process has taken its place
            self.ended(member)

    def ended(self, member: int) -> None:
        """End the graph, or begin its repair, because a member's process has ended. From any thread."""
        self.control.dead.add(member)
        if self.repairs and self.on_death is None:  # the repairer, which is created next, begins with the dead members
            return
        if self.on_death is None or not self.on_death(member, self.infos[member - 1].place):
            self._on_end(self.control.died(member))

    def broken(self, text: str) -> None:
        """End the graph, because it cannot continue for this reason. From any thread."""
        # An actor that leaves the graph breaks its connections; it has reported why.
        self._on_end(self.control.poll() or GraphTimeoutError(f"{text}. graph.recompile() starts the graph again"))

    def failed(self, execution: int, error: Any) -> None:
        """Pass on the pickled error of an execution. From any thread."""
        self.control.on_failure(execution, error)

    def lost(self, member: int) -> GraphError:
        """Return the error for a message whose memory vanished. Waits up to EXIT_S for the writer's process to end.

        Usually the writer has been killed; the kernel closes its files a moment before its process has ended.
        """
        trouble = self.control.poll()
        if trouble is not None:
            return trouble
        if member in self.control.dead:  # it may have reported its exit, which takes Ray seconds
            return self.control.died(member)
        mine, place = here(), self.infos[member - 1].place
        deadline = Deadline(EXIT_S)
        while member and place.same_host(mine) and place.pid_namespace == mine.pid_namespace and alive(place):
            if deadline.left_s() == 0:
                break
            time.sleep(0.005)
        else:
            if member:
                return self.control.died(member)
        return GraphClosedError(
            f"cannot open the memory of a value from {self.plan.members[member]}, although its process runs: it has "
            "left the graph, or has closed its /proc entries to this user. Compile the graph again"
        )

    def disown(self, error: GraphError) -> None:
        """Give up the graph in a forked child: no order is sent to its actors, now or at exit."""
        self.lifecycle.fork(error)
        self.control.disown()

    def release_memory(self) -> None:
        """Free the memory for inputs and the mappings of results. Call after `close`, while no thread submits."""
        if self.lifecycle.state is not State.FORKED:  # the rings of a forked child are those of its parent
            for writer, _ in self.inputs:
                writer.take_back()
        if self.pool is not None:
            self.pool.close()
        self.leases.close()

    def close(self, timeout_s: float) -> None:
        """Let the actors leave the graph, waiting for them at most `timeout_s` seconds. A second call does nothing."""
        # From here on no pool waits for memory, so the orders below do not wait either.
        if not self.lifecycle.advance(Event.CLOSE):
            return
        for writer, _ in self.inputs:
            if isinstance(writer, PublishingWriter):
                writer.close()
        self.control.close(timeout_s)
        self.on_death = self.control.on_exit = None
        for segment in self.kept_segments:
            segment.close_fd()
        for watch in self._watches.values():
            watch.forget()
        self._watches.clear()  # watches refer to this object, which holds the actors: cut the cycle
        if self.network is not None:
            self.network.close(min(timeout_s, JOIN_S))

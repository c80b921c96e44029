"""From a plan to channels that are open on every member, and back: the doing half of `compile` and of `teardown`.

1. Every actor is asked, in parallel and by an ordinary call, who and where it is (`residence.hello`).
2. The rings of each host are made by one process there, and every actor gets its program (`residence.enter`).
3. From then on nothing goes through Ray.

An error in between undoes what was done: actors that have entered are told to leave.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import ray

from raylane import _ray
from raylane.core.deadline import Deadline
from raylane.core.place import here
from raylane.core.semaphore import Segment, block, init, try_wait
from raylane.errors import GraphActorDiedError, GraphError, GraphPlanError, GraphTimeoutError
from raylane.graph import message as m
from raylane.graph import residence
from raylane.graph.channels import ring
from raylane.graph.channels.lease import LeasePool, LeaseReader
from raylane.graph.channels.ring import RingReader, RingSpec, RingWriter
from raylane.graph.plan import DRIVER, Edge, Plan
from raylane.graph.program import Hello, Outbound, Program, only
from raylane.graph.watch import Watch, watcher

log = logging.getLogger("raylane.graph")

CONTROL_SLOTS = 4
KEPT_FREE = 1
"""Slots of a control line that only the order to close may take: it must get through to an actor that is busy."""


class _Line:
    """The control line to one actor: orders one way, answers the other. One order at a time."""

    def __init__(self, writer: RingWriter, reader: RingReader) -> None:
        self.writer = writer
        self.reader = reader
        self.asked = 0
        self.answered = 0


class Wiring:
    """The driver's ends of all channels of one graph."""

    def __init__(self, plan: Plan, actors: Sequence[Any], hellos: Sequence[Hello]) -> None:
        self.plan = plan
        self.actors = list(actors)
        """Handles: a graph keeps its actors alive."""
        self.hellos = list(hellos)
        self.bell = Segment.make(4096)
        init(self.bell.address)
        self.inputs: list[tuple[RingWriter, int]] = []
        """Writers of the input edges, each with the index of its value."""
        self.readers: dict[int, RingReader] = {}
        """Edge to the driver's end of it."""
        self.pool: LeasePool | None = None
        self.leases = LeaseReader()
        self._lines: list[_Line] = []
        self._asking = threading.Lock()
        self._dead: set[int] = set()
        """Members whose process has ended."""
        self._watched: list[Watch] = []
        self._closed = False

    # Orders

    def ask(self, member: int, word: str, *rest: Any, timeout_s: float | None = 5.0) -> Any:
        """Give an order to an actor's lane and wait for the answer. GraphTimeoutError if it is busy,
        GraphActorDiedError if it has ended."""
        with self._asking:
            self._order(member, word, *rest)
            return self._answer(member, Deadline(timeout_s))

    def _order(self, member: int, word: str, *rest: Any) -> None:
        line = self._lines[member - 1]
        while line.answered < line.asked and not try_wait(line.reader.full):  # answers that came too late
            line.reader.take()
            line.answered += 1
        if line.asked - line.answered >= CONTROL_SLOTS - (0 if word == "close" else KEPT_FREE):
            raise GraphTimeoutError(f"{self.hellos[member - 1].who} has not answered earlier questions: it is busy")
        line.writer.write(line.asked, m.Message(m.VALUE, pickle.dumps((word, *rest), 5)))
        line.asked += 1

    def _answer(self, member: int, deadline: Deadline) -> Any:
        line = self._lines[member - 1]
        while True:
            left = deadline.left_s()
            if block(line.reader.full, 0.05 if left is None else min(left, 0.05)):
                taken = line.reader.take()
                line.answered += 1
                if line.answered == line.asked:  # else the answer to a question that was given up
                    return m.decode(taken.kind, taken.body, taken.buffers)[1]
                continue
            if member in self._dead:
                raise self._died(member)
            if left is not None and left <= 0:
                raise GraphTimeoutError(
                    f"{self.hellos[member - 1].who} did not answer within {deadline.timeout_s} s: a method runs there"
                )

    def tell_to_wake(self, pid: int, fd: int) -> str | None:
        """Have all actors that send to the driver write to that eventfd too; the reason if one of them cannot."""
        senders = sorted({self.plan.edges[edge].writer for edge in self.readers})
        for member in senders:
            refused: str | None = self.ask(member, "wake", pid, fd)
            if refused is not None:
                return refused
        return None

    def channels(self) -> dict[int, list[tuple[str, str]]]:
        """For each edge its kind of channel and what there is to say of it, for `show` and `draw`."""
        return {edge.index: [("shared memory", self._cuda_note(edge))] for edge in self.plan.edges}

    def _cuda_note(self, edge: Edge) -> str:
        """CUDA tensors have no channel kind of their own yet: this is the place that will choose one."""
        at_gpus = [member for member in (edge.writer, *edge.readers) if member and self.hellos[member - 1].gpus]
        return "CUDA tensors go through host memory" if at_gpus else ""

    # Deaths

    def watch(self, fail: Callable[[GraphError], None]) -> None:
        """Call `fail` when an actor of the graph has died."""
        for member in range(1, len(self.plan.members)):

            def ended(member: int = member) -> None:
                self._dead.add(member)
                fail(self._died(member))

            try:
                self._watched.append(watcher.watch(self.hellos[member - 1].place.pid, ended))
            except ProcessLookupError:
                ended()

    def _died(self, member: int) -> GraphActorDiedError:
        who = self.hellos[member - 1].who
        return GraphActorDiedError(
            f"{who} ended, and with it the graph: its other actors live on. Ask Ray why "
            "(ray list actors --detail), then compile again with a living actor",
            actor=_ray.actor_id_of(self.actors[member - 1]),
        )

    # The end

    def close(self, timeout_s: float) -> None:
        """Tell the actors to leave; wait until they have, or have died, or the time is over (0: without
        waiting). Once."""
        if self._closed:
            return
        self._closed = True
        if self.pool is not None:
            self.pool.closed = True
        deadline = Deadline(timeout_s)
        living = [member for member in range(1, len(self._lines) + 1) if member not in self._dead]
        with self._asking:
            for member in living:
                with contextlib.suppress(GraphTimeoutError):
                    self._order(member, "close")
            for member in living if timeout_s else ():
                try:
                    self._answer(member, deadline)
                except GraphActorDiedError:
                    continue
                except GraphTimeoutError:
                    log.warning("%s is busy; it leaves the graph when it is done", self.hellos[member - 1].who)
        for watch in self._watched:
            watch.forget()


def wire(
    plan: Plan,
    actors: Sequence[Any],
    *,
    max_inflight: int,
    timeout_s: float | None,
    max_lent_bytes: int,
    exclusive: bool,
) -> Wiring:
    """Open every channel of the plan. Waits for the actors to start and to finish what they are doing."""
    deadline = Deadline(timeout_s)
    hellos = _call(plan, actors, [(residence.hello,)] * len(actors), deadline)
    wiring = Wiring(plan, actors, hellos)
    builder = _Builder(wiring, max_inflight)
    try:
        programs = builder.programs(timeout_s, max_lent_bytes, exclusive=exclusive)
        _call(plan, actors, [(residence.enter, program) for program in programs], deadline)
    except BaseException:
        wiring.close(1.0)
        raise
    finally:
        builder.close_descriptors()
    return wiring


def _call(plan: Plan, actors: Sequence[Any], calls: Sequence[tuple[Any, ...]], deadline: Deadline) -> list[Any]:
    """Run a function in every actor, all at once; errors are translated here."""
    refs = [actor.__ray_call__.remote(*call) for actor, call in zip(actors, calls, strict=True)]
    answers = []
    for member, ref in enumerate(refs, 1):
        try:
            answers.append(ray.get(ref, timeout=deadline.left_s()))
        except ray.exceptions.GetTimeoutError as error:
            raise GraphTimeoutError(
                f"{plan.members[member]} did not answer within {deadline.timeout_s} s: it has not started, or runs a "
                "method that does not end; compile when it is free, or with a larger timeout_s"
            ) from error
        except ray.exceptions.RayActorError as error:
            raise GraphActorDiedError(f"{plan.members[member]} is dead: {error}") from error
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, GraphError):
                raise error.cause from None
            raise GraphPlanError(f"{plan.members[member]} cannot take part: {error}") from error
    return answers


class _Builder:
    """Makes the rings of this host."""

    def __init__(self, wiring: Wiring, max_inflight: int) -> None:
        self.wiring = wiring
        self.plan = wiring.plan
        self.slots = max_inflight
        self.names = [f"{name} ({hello.who})" for name, hello in zip(self.plan.members[1:], wiring.hellos, strict=True)]
        self.names.insert(DRIVER, f"{self.plan.members[DRIVER]} ({here()})")
        self.rings: dict[int, tuple[RingSpec, Segment]] = {}
        self.segments: list[Segment] = [wiring.bell]
        self._bells: dict[int, Segment] = {}

    def programs(self, timeout_s: float | None, max_lent_bytes: int, *, exclusive: bool) -> list[bytes]:
        wiring, plan = self.wiring, self.plan
        wiring.pool = LeasePool(max_lent_bytes, timeout_s)
        for edge in plan.edges:
            self.rings[edge.index] = self._ring([self.names[reader] for reader in edge.readers], self.slots)
        for edge in plan.edges_to(DRIVER):
            spec, segment = self.rings[edge.index]
            wiring.readers[edge.index] = RingReader(segment, spec, edge.readers.index(DRIVER), wiring.leases)
        for edge in plan.edges_from(DRIVER):
            wiring.inputs.append((self._writer(self.rings[edge.index], edge.readers), edge.value))
        graph = uuid.uuid4().hex
        programs = []
        for member in range(1, len(plan.members)):
            control, report = self._ring([self.names[member]], CONTROL_SLOTS), self._ring(["driver"], CONTROL_SLOTS)
            wiring._lines.append(
                _Line(self._writer(control, (member,)), RingReader(report[1], report[0], 0, wiring.leases))
            )
            program = Program(
                graph=graph,
                member=member,
                plan=only(plan, member),
                owner=here(),
                owner_who=_ray.describe_self(),
                inbound={
                    edge.index: (self.rings[edge.index][0], edge.readers.index(member))
                    for edge in plan.edges_to(member)
                },
                outbound={edge.index: self._outbound(edge.index, edge.readers) for edge in plan.edges_from(member)},
                control=(control[0], 0),
                report=Outbound(report[0], (wiring.bell.path,)),
                max_inflight=self.slots,
                timeout_s=timeout_s,
                max_lent_bytes=max_lent_bytes,
                exclusive=exclusive,
            )
            programs.append(_ray.dumps(program))
        return programs

    def _ring(self, readers: Sequence[str], slots: int) -> tuple[RingSpec, Segment]:
        spec, segment = ring.make(readers, slots)
        self.segments.append(segment)
        return spec, segment

    def _bell_path(self, member: int) -> str:
        return self.wiring.bell.path if member == DRIVER else self.wiring.hellos[member - 1].bell

    def _outbound(self, edge: int, readers: Sequence[int]) -> Outbound:
        return Outbound(self.rings[edge][0], tuple(self._bell_path(reader) for reader in readers))

    def _writer(self, made: tuple[RingSpec, Segment], readers: Sequence[int]) -> RingWriter:
        spec, segment = made
        for reader in readers:
            if reader not in self._bells:
                self._bells[reader] = Segment.open(self._bell_path(reader))
        assert self.wiring.pool is not None
        return RingWriter(segment, spec, [self._bells[reader] for reader in readers], self.wiring.pool)

    def close_descriptors(self) -> None:
        """All who need them have opened them by now, or never will."""
        for segment in self.segments:
            segment.close_fd()

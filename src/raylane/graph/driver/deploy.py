"""From a plan to channels that are open on every member, and back: the doing half of `compile` and of `teardown`.

1. Every actor is asked, in parallel and by an ordinary call, who and where it is (`residence.hello`).
2. Only if the graph spans hosts: every process with a hop makes its share of the rings and expects connections
   (`residence.post`).
3. Every actor gets its program (`residence.enter`), made by `building`, and opens its channels.
4. From then on nothing goes through Ray.

An error in between undoes what was done: actors that have entered are told to leave.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from raylane import _ray
from raylane.core import wake
from raylane.core.deadline import Deadline
from raylane.core.place import alive, here
from raylane.core.semaphore import Segment, block, init, try_wait
from raylane.errors import GraphActorDiedError, GraphClosedError, GraphError, GraphPlanError, GraphTimeoutError
from raylane.graph.channels.lease import LeasePool, LeaseReader
from raylane.graph.channels.peer_link import Writer
from raylane.graph.channels.peer_network import Station
from raylane.graph.channels.receiver import JOIN_S
from raylane.graph.channels.ring import RingReader
from raylane.graph.driver.channel_setup import Builder
from raylane.graph.plan import routing
from raylane.graph.plan.ir import DRIVER, Edge, Plan
from raylane.graph.plan.routing import LINES, Routes
from raylane.graph.values import message as m
from raylane.graph.watch import Watch, watcher
from raylane.graph.worker import session as residence
from raylane.graph.worker.program import CONTROL_SLOTS, EXITED, TROUBLE, Hello, Posting

log = logging.getLogger("raylane.graph")

REASON_S = 5.0
"""How long to wait for the reason of an actor that has left, when another one has noticed it."""
ENDS_WITHIN_S = 1.0
KEPT_FREE = 1
"""Slots of a control line that only the order to close may take: it must get through to an actor that is busy."""


class _Line:
    """The control line to one actor: orders one way, answers the other. One order at a time."""

    def __init__(self, writer: Writer, reader: RingReader) -> None:
        self.writer = writer
        self.reader = reader
        self.asked = 0
        self.answered = 0
        self.answers: collections.deque[Any] = collections.deque()
        """Read and not yet taken by whoever has asked."""


class Collected:
    """One edge into the driver."""

    __slots__ = ("bytes", "full", "reader", "value")

    def __init__(self, reader: RingReader, value: int) -> None:
        self.reader = reader
        self.full = reader.full
        self.value = value
        self.bytes = 0


class Wiring:
    """The driver's ends of all channels of one graph."""

    def __init__(self, plan: Plan, actors: Sequence[Any], hellos: Sequence[Hello]) -> None:
        self.plan = plan
        self.actors = list(actors)
        """Handles: a graph keeps its actors alive."""
        self.hellos = list(hellos)
        self.bell = Segment.make(4096)
        init(self.bell.address)
        self.routes: Routes = Routes((), (), frozenset())
        """Which way each channel takes."""
        self.station: Station | None = None
        """This process's connections to other hosts, if the graph spans hosts."""
        self.inputs: list[tuple[Writer, int]] = []
        """Writers of the input edges, each with the index of its value."""
        self.readers: dict[int, RingReader] = {}
        """Edge to the driver's end of it."""
        self.pool: LeasePool | None = None
        self.leases = LeaseReader()
        self._lines: list[_Line] = []
        self._asking = threading.Lock()
        self._asked: int | None = None
        """The member whose answer is waited for; whoever waits reads its line."""
        self._hearing = threading.Lock()  # guards the readers of all lines, `heard` and `_trouble`; held briefly
        self.heard = 0
        """Messages read from lines: each has rung the driver's bell."""
        self._trouble: GraphError | None = None
        self._told: Callable[[int, Any], None] = lambda execution, body: None
        """Callback for failures, set by `watch`."""
        self._dead: set[int] = set()
        """Members whose process has ended."""
        self._watched: list[Watch] = []
        self._closed = False
        self.wake_fd = wake.make()
        """The eventfd of the driver's asyncio loop; `Awaiting` closes it."""
        self.wake_refused: str | None = None
        """Why an actor of this host cannot write to it."""

    def add_line(self, writer: Writer, reader: RingReader) -> None:
        """The control line of the next member."""
        self._lines.append(_Line(writer, reader))

    # Orders

    def ask(self, member: int, word: str, *rest: Any, timeout_s: float | None = 5.0) -> Any:
        """Give an order to an actor's lane and wait for the answer. GraphTimeoutError if it is busy,
        GraphActorDiedError if it has ended, GraphClosedError if it was told to leave."""
        deadline = Deadline(timeout_s)
        with self._asking:
            if self._closed:
                raise GraphClosedError("the graph was torn down, and its actors have left it")
            line = self._lines[member - 1]
            self._asked = member
            try:
                while line.asked - line.answered >= CONTROL_SLOTS - KEPT_FREE:  # questions that were given up
                    self._next_answer(member, deadline)
                self._order(line, word, *rest)
                while True:
                    answer = self._next_answer(member, deadline)
                    if line.answered == line.asked:  # else it answers one that was given up
                        return answer
            finally:
                self._asked = None

    def _order(self, line: _Line, word: str, *rest: Any) -> None:
        line.writer.write(line.asked, m.Message(m.VALUE, pickle.dumps((word, *rest), 5)))
        line.asked += 1

    def _next_answer(self, member: int, deadline: Deadline) -> Any:
        line = self._lines[member - 1]
        while True:
            left = deadline.left_s()
            if block(line.reader.full, 0.05 if left is None else min(left, 0.05)):
                self._hear(member)
            if line.answers:
                line.answered += 1
                return line.answers.popleft()
            trouble = self._trouble
            if trouble is not None:  # a new object: the traceback of one that is kept would keep this wiring
                raise type(trouble)(trouble.message, **trouble.fields)
            if member in self._dead:
                raise self.died(member)
            if left is not None and left <= 0:
                raise GraphTimeoutError(
                    f"{self.hellos[member - 1].who} did not answer within {deadline.timeout_s} s: a method runs there"
                )

    def _hear(self, member: int) -> None:
        """Read one message of a member's line; only after one was taken from its semaphore."""
        line = self._lines[member - 1]
        with self._hearing:
            self.heard += 1
            taken = line.reader.take()
            if taken.kind == m.ERROR:
                execution, body = pickle.loads(taken.body)
                self._told(execution, body)
                return
            word, answer = m.decode(taken.kind, taken.body, taken.buffers)
            if word == TROUBLE:
                self._trouble = self._trouble or GraphClosedError(answer)
            elif word == EXITED:
                self._trouble = self._trouble or self.died(member)
            else:
                line.answers.append(answer)

    def listen(self, *, to_all: bool = False) -> GraphError | None:
        """Read what actors have said unasked: failures, which are told, and what ends the graph, which is returned.
        Does not wait. Whoever waits for an answer of an actor reads the line of that actor, except with `to_all`."""
        for member, line in enumerate(self._lines, 1):
            while (to_all or member != self._asked) and not try_wait(line.reader.full):
                self._hear(member)
        return self._trouble

    def wake_from_hops(self) -> None:
        """Have the threads that receive messages from other hosts write to the eventfd, as actors of this host do."""
        for edge in self.readers:
            route = self.routes.edges[edge]
            if route.readers_beside(DRIVER) is not route.local:
                assert self.station is not None
                self.station.ring_writer(edge).wake_with(os.dup(self.wake_fd))

    def channels(self) -> dict[int, list[tuple[str, str]]]:
        """For each edge its kind of channel and what there is to say of it, for `show` and `draw`."""
        found = {}
        for edge in self.plan.edges:
            route = self.routes.edges[edge.index]
            notes = [routing.note(route, self.plan.members), self._cuda_note(edge)]
            found[edge.index] = [(routing.kind(route), "; ".join(filter(None, notes)))]
        return found

    def _cuda_note(self, edge: Edge) -> str:
        """CUDA tensors have no channel kind of their own yet: this is the place that will choose one."""
        at_gpus = [member for member in (edge.writer, *edge.readers) if member and self.hellos[member - 1].gpus]
        return "CUDA tensors go through host memory" if at_gpus else ""

    def lent_bytes(self) -> int:
        """What this process has lent to readers of its host."""
        own = 0 if self.pool is None else self.pool.lent_bytes()
        return own + (0 if self.station is None else self.station.lent_bytes())

    def clock_offset_s(self, member: int) -> float:
        """time.perf_counter() of a member less that of this process, measured when the graph was compiled: 0 within
        one machine; else right within half a round trip."""
        if self.station is None or self.hellos[member - 1].place.same_host(here()):
            return 0.0
        hop = self.station.hops.get((member, LINES))
        return 0.0 if hop is None else hop.clock_offset_s

    # Deaths

    def watch(self, fail: Callable[[GraphError], None], told: Callable[[int, Any], None]) -> None:
        """Call `fail` when an actor of the graph has died, or a connection between two hosts is lost; call `told` with
        the number of an execution and a pickled error when a call of it has failed. From any thread."""
        self._told = told

        def ended(member: int) -> None:
            self._dead.add(member)
            fail(self.died(member))

        for member in range(1, len(self.plan.members)):
            if self.routes.lines[member - 1].control.relays:
                continue  # of another host: its connection tells
            try:
                place = self.hellos[member - 1].place
                self._watched.append(watcher.watch(place.pid, functools.partial(ended, member)))
            except ProcessLookupError:
                ended(member)
        if self.station is not None:
            self.station.listen(ended, lambda text: fail(GraphTimeoutError(f"{text}. Compile the graph again")), told)

    def lost(self, member: int) -> GraphError:
        """The error for a message whose memory could not be opened any more. As a rule its sender has been killed, and
        its files are closed a moment before its process has ended."""
        trouble = self.listen()
        if trouble is not None:
            return trouble
        mine, place = here(), self.hellos[member - 1].place
        deadline = Deadline(ENDS_WITHIN_S)
        while member and place.same_host(mine) and place.pid_namespace == mine.pid_namespace and alive(place):
            if deadline.left_s() == 0:
                break
            time.sleep(0.005)
        else:
            if member:
                return self.died(member)
        return GraphClosedError(
            f"{self.plan.members[member]} has sent a value whose memory cannot be opened, although the process lives: "
            "it has left the graph, or closed its /proc entries to this user. Compile the graph again"
        )

    def died(self, member: int) -> GraphActorDiedError:
        """The error for the end of a member."""
        who = self.hellos[member - 1].who
        return GraphActorDiedError(
            f"{who} ended, and with it the graph: its other actors live on. Ask Ray why "
            "(ray list actors --detail), then compile again with a living actor",
            actor=_ray.actor_id_of(self.actors[member - 1]),
        )

    # The end

    def disown(self) -> None:
        """In a forked child: it tells the actors nothing, now or at its end."""
        self._closed = True
        self._asking, self._hearing = threading.Lock(), threading.Lock()

    def close(self, timeout_s: float) -> None:
        """Tell the actors to leave; wait until they have, or have died, or the time is over (0: without
        waiting). Once."""
        if self._closed:
            return
        self._closed = True
        if self.station is not None:
            self.station.let_nobody_wait()
        if self.pool is not None:
            self.pool.closed = True
        deadline = Deadline(timeout_s)
        living = [member for member in range(1, len(self._lines) + 1) if member not in self._dead]
        with self._asking:
            for member in living:
                with contextlib.suppress(GraphError):  # out of reach: it finds out by itself
                    self._order(self._lines[member - 1], "close")
            for member in living if timeout_s else ():
                line = self._lines[member - 1]
                try:
                    while line.answered < line.asked:
                        self._next_answer(member, deadline)
                except GraphTimeoutError:
                    log.warning("%s is busy; it leaves the graph when it is done", self.hellos[member - 1].who)
                except GraphError:  # dead, or has left by itself
                    continue
        for watch in self._watched:
            watch.forget()
        self._watched.clear()  # they refer to this wiring, which holds the actors: it is freed now
        if self.station is not None:
            self.station.close(min(timeout_s, JOIN_S))


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
    everybody = range(1, len(plan.members))
    hellos = _call(plan, actors, dict.fromkeys(everybody, (residence.hello,)), deadline)
    wiring = Wiring(plan, actors, [hellos[member] for member in everybody])
    builder = Builder(
        wiring, max_inflight=max_inflight, timeout_s=timeout_s, max_lent_bytes=max_lent_bytes, exclusive=exclusive
    )
    postings: dict[int, Posting] = {}
    try:
        builder.make_rings()
        postings = builder.postings()
        if postings:
            builder.post(postings.pop(DRIVER))
            calls = {member: (residence.post, builder.graph, posting) for member, posting in postings.items()}
            builder.posted(_call(plan, actors, calls, deadline))
        builder.open_own(deadline)
        programs = enumerate(builder.programs(), 1)
        entering = {member: (residence.enter, program) for member, program in programs}
        refused = _call(plan, actors, entering, deadline)
        wiring.wake_refused = next(filter(None, refused.values()), None)
        wiring.wake_from_hops()
    except BaseException as error:
        wiring.close(0.0)
        os.close(wiring.wake_fd)
        for member in postings:
            actors[member - 1].__ray_call__.remote(residence.abandon, builder.graph)
        if isinstance(error, OSError) and not isinstance(error, GraphError):
            raise GraphPlanError(
                f"cannot make the channels of {len(plan.edges)} edges with {max_inflight} slots each: {error}. Lower "
                "max_inflight, or raise the limits of this process (ulimit -n, ulimit -v, shared memory)"
            ) from error
        raise
    finally:
        builder.close_descriptors()
    return wiring


def _call(
    plan: Plan, actors: Sequence[Any], calls: Mapping[int, tuple[Any, ...]], deadline: Deadline
) -> dict[int, Any]:
    """Run a function in these members, all at once; errors are translated here."""
    refs = {member: actors[member - 1].__ray_call__.remote(*call) for member, call in calls.items()}
    answers = {}
    noticed: GraphClosedError | None = None
    for member, ref in refs.items():
        try:
            answers[member] = _answer_of(plan.members[member], ref, deadline)
        except GraphClosedError as error:  # another one has left before: for a reason of its own, which is worth more
            noticed = noticed or error
            left = deadline.left_s()
            deadline = Deadline(REASON_S if left is None else min(left, REASON_S))
        except GraphTimeoutError:
            if noticed is None:
                raise
    if noticed is not None:
        raise noticed
    return answers


def _answer_of(name: str, ref: Any, deadline: Deadline) -> Any:
    try:
        return ray.get(ref, timeout=deadline.left_s())
    except ray.exceptions.GetTimeoutError as error:
        raise GraphTimeoutError(
            f"{name} did not answer within {deadline.timeout_s} s: it has not started, or runs a "
            "method that does not end; compile when it is free, or with a larger timeout_s"
        ) from error
    except ray.exceptions.ActorUnavailableError as error:
        raise GraphActorDiedError(
            f"{name} cannot be reached at the moment: Ray restarts it, or has lost it. Compile again later: {error}"
        ) from error
    except ray.exceptions.RayActorError as error:
        raise GraphActorDiedError(f"{name} is dead: {error}") from error
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, GraphError):
            raise error.cause from None
        raise GraphPlanError(f"{name} cannot take part: {error}") from error

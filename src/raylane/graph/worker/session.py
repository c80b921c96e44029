"""One graph's stay in one actor: opens its channels, runs its tasks (`resident`), obeys its owner, lets go at the end.

The owner speaks over a control ring of the graph's own, because an ordinary call to the actor would wait for whatever
the actor does at the moment. Made by `enter`, which an ordinary call runs on the actor's own thread; from then on the
lane's thread is the only user.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
from collections.abc import Callable
from typing import Any

from raylane import _ray
from raylane.core import wake
from raylane.core.deadline import Deadline
from raylane.core.place import here
from raylane.core.semaphore import Segment, try_wait
from raylane.errors import GraphError, GraphPlanError
from raylane.graph.channels.lease import LeasePool, LeaseReader
from raylane.graph.channels.peer_link import Writer
from raylane.graph.channels.peer_network import Station, open_shared
from raylane.graph.channels.ring import WAKE, RingReader, RingSpec, RingWriter
from raylane.graph.plan.ir import DRIVER
from raylane.graph.values import message as m
from raylane.graph.worker import exclusive as guard
from raylane.graph.worker import loop as lane
from raylane.graph.worker import thread_state as context
from raylane.graph.worker.executor import Resident
from raylane.graph.worker.program import (
    CONTROL_SLOTS,
    EXITED,
    HOST_VARIABLE,
    TROUBLE,
    Hello,
    Outbound,
    Posted,
    Posting,
    Program,
)
from raylane.transport import endpoint as endpoints

ANSWER_BYTES = 64 << 20
ORDERS_EVERY = 64
"""Tasks that may run one after the other before the owner is heard."""

log = logging.getLogger("raylane.graph")


class Residence:
    """See above. `over` is set when the graph shall leave the lane."""

    def __init__(self, program: Program, instance: Any, loop: asyncio.AbstractEventLoop | None) -> None:
        self.name = program.graph
        self.who = _ray.describe_self()
        self.owner_who = program.owner_who
        self.over = False
        self._undisturbed = 0
        """Tasks since the last look for orders."""
        self._guarded = instance if program.exclusive else None
        self._station = _stations.pop(program.graph, None)
        """This actor's connections to other hosts, if it has any."""
        if self._station is not None:
            self._station.connect(program.hops, Deadline(program.timeout_s))
        # The owner admits an execution when the one `max_inflight` before it was read by everybody.
        read_within = program.max_inflight * len(program.outbound)
        self._pool = LeasePool(program.max_lent_bytes, program.timeout_s, read_within, waits=False)
        self._leases = LeaseReader()
        self._segments: dict[str, Segment] = {}
        self._wake_fd: int | None = None
        self._encoder = m.Encoder()
        self._reports = 0
        self._control = self._reader(*program.control)
        limit_bytes = max(program.max_lent_bytes, ANSWER_BYTES)  # a trace may be larger than what an edge may lend
        answers = LeasePool(limit_bytes, program.timeout_s)  # these are no part of an execution
        self._report = self._writer(program.report, program.report_channel, CONTROL_SLOTS, answers)
        readers = {edge: self._reader(spec, index) for edge, (spec, index) in program.inbound.items()}
        writers = {
            edge: self._writer(out, edge, program.max_inflight, self._pool) for edge, out in program.outbound.items()
        }
        self._to_driver = [
            w for edge, w in writers.items() if DRIVER in program.plan.edges[edge].readers and isinstance(w, RingWriter)
        ]
        """Over a hop the driver's own thread wakes it."""
        if isinstance(self._report, RingWriter):
            self._to_driver.append(self._report)
        self._writers = writers
        self.resident = Resident(
            program.plan,
            program.member,
            instance,
            readers,
            {edge: writer.write for edge, writer in writers.items()},
            loop=loop,
            guard=lane.lane().exclusive if program.exclusive else None,
            exit=self._exit,
            tell=self._tell,
            timeout_s=program.timeout_s,
        )
        # Last, when nothing can fail any more: these are descriptors, and nobody closes a residence that was not made.
        self._owner = None if program.owner is None else lane.Watched(program.owner)
        self.wake_refused = None if program.wake is None else self._learn_to_wake(*program.wake)
        """Why this process cannot wake the driver's asyncio loop, if so."""

    def _reader(self, spec: RingSpec, index: int) -> RingReader:
        return RingReader(self._opened(spec.path), spec, index, self._leases)

    def _opened(self, path: str) -> Segment:
        """A segment of rings, of which there is one for all rings that a process has made."""
        if path not in self._segments:
            self._segments[path] = open_shared(path, self.owner_who)
        return self._segments[path]

    def _writer(self, out: Outbound, channel: int, slots: int, pool: LeasePool) -> Writer:
        """A ring's own writer where no message leaves this host: then nothing stands between."""
        own = None
        if out.ring is not None:
            bells = [open_shared(path, who) for path, who in zip(out.bells, out.ring.readers, strict=True)]
            own = RingWriter(self._opened(out.ring.path), out.ring, bells, pool)
        if self._station is not None and out.hops:
            return self._station.writer(own, channel, out.hops, slots)
        assert own is not None
        return own

    @property
    def taken(self) -> int:
        return self.resident.taken + self._control.sequence

    @property
    def impatient(self) -> bool:
        """See `lane.Residence`."""
        return self.resident.lacks_memory

    def run_within(self, enter: Callable[[], None]) -> None:
        """See `lane.Residence`."""
        self.resident.enter = enter

    def advance(self) -> bool:
        """Run at most one task, or obey. False if there was nothing to do."""
        if self.resident.advance():
            self._undisturbed += 1
            if self._undisturbed < ORDERS_EVERY:
                return True
        self._undisturbed = 0
        if try_wait(self._control.full):
            return False
        self._obey()
        return True

    def _obey(self) -> None:
        (word,) = pickle.loads(self._control.take().body)
        if word == "close":
            self.over = True
            answer: Any = None
        elif word == "stats":
            sent = {edge: writer.bytes for edge, writer in self._writers.items()}
            lent = self._pool.lent_bytes() + (0 if self._station is None else self._station.lent_bytes())
            answer = self.resident.stats() | {"sent_bytes": sent, "lent_bytes": lent}
        elif word == "trace":
            answer = list(self.resident.records)
        else:
            answer = GraphError(f"{self.who} does not know the order {word!r}")
        self._send_report(word, answer)

    def _send_report(self, word: str, answer: Any, flags: int = 0) -> None:
        self._report.write(self._reports, self._encoder.encode((word, answer)), flags)
        self._reports += 1

    def _tell(self, execution: int, error: m.Message, flags: int) -> None:
        """See `Resident`. Over a hop not by the line: its messages and those of the edges may overtake one another, and
        the ring of the line would be overrun."""
        told = m.Message(m.ERROR, pickle.dumps((execution, bytes(error.body)), 5))
        if isinstance(self._report, RingWriter):
            self._report.write(self._reports, told, flags & WAKE)
            self._reports += 1
        elif self._station is not None:
            self._station.tell_driver(told)

    def _exit(self) -> None:
        """A method has asked for its actor to end, which takes Ray seconds: the driver is told at once."""
        self._send_report(EXITED, None, WAKE)
        _ray.exit_this_actor()

    def _learn_to_wake(self, pid: int, fd: int) -> str | None:
        """Get hold of the owner's eventfd. Return the reason if the kernel says no."""
        try:
            self._wake_fd = wake.fetch(pid, fd)
        except OSError as error:
            return str(error)
        for writer in self._to_driver:
            writer.wake_fd = self._wake_fd
        return None

    def give_up(self, error: BaseException) -> None:
        """A defect of ours, or of this machine: tell the owner, and leave."""
        self.over = True
        text = f"{self.who} could not go on with the graph: {m.shown(error)}"
        self._send_report(TROUBLE, text)

    def orphaned(self) -> bool:
        if self._station is not None and self._station.owner_gone:
            return True
        return self._owner is not None and self._owner.gone()

    def close(self) -> None:
        """Let go of everything. What readers still hold of lent memory stays valid."""
        self._pool.closed = True
        self.resident.leave()
        if self._owner is not None:
            self._owner.close()
        if self._station is not None:
            self._station.close()
        fd, self._wake_fd = self._wake_fd, None
        if fd is not None:
            os.close(fd)
        if self._guarded is not None:
            guard.leave(self._guarded)


# What `compile` runs in an actor, on its own thread.


def hello(instance: Any) -> Hello:
    """Who and where this actor is. Makes its lane, which does not run yet."""
    torch = context.loaded("torch")
    return Hello(
        place=here(),
        who=_ray.describe_self(),
        bell=lane.lane().bell.path,
        host=os.environ.get(HOST_VARIABLE, ""),
        gpus=torch is not None and torch.cuda.is_available(),
    )


_stations: dict[str, Station] = {}
"""By graph, between `post` and `enter`. Touched by ordinary calls of the actor only."""


def post(instance: Any, graph: str, posting: Posting) -> Posted:
    """Make this actor's share of the rings, and expect connections of a graph that spans hosts."""
    for old, found in list(_stations.items()):
        if found.stale():
            abandon(instance, old)
    station = Station(posting.directions)
    try:
        rings = station.post(posting)
        source = endpoints.endpoint().source()
    except BaseException:
        station.close()
        raise
    _stations[graph] = station
    return Posted(source, rings)


def abandon(instance: Any, graph: str) -> None:
    """The compilation failed: undo `post`, if `enter` was not reached."""
    station = _stations.pop(graph, None)
    if station is not None:
        station.close()


def enter(instance: Any, packed: bytes) -> str | None:
    """Take part in a graph from now on. Return why this process cannot wake the driver's asyncio loop, if so.
    GraphPlanError if a method is missing or cannot be used."""
    program: Program = pickle.loads(packed)
    loop = _ray.actor_loop()
    if program.exclusive and loop is not None:
        raise GraphPlanError(
            f"exclusive=True: {_ray.describe_self()} is an asyncio actor, whose calls interleave by design; "
            "use an asyncio.Lock in its methods"
        )
    if program.directions is not None and program.graph not in _stations:
        raise GraphPlanError(f"{_ray.describe_self()} came too late: the compilation was given up")
    station = _stations.get(program.graph)
    if program.exclusive:
        guard.enter(instance, lane.lane().exclusive)
    try:
        residence = Residence(program, instance, loop)
    except BaseException:
        if program.exclusive:
            guard.leave(instance)
        if station is not None:
            station.close()
        raise
    lane.lane().adopt(residence, context.read())
    return residence.wake_refused

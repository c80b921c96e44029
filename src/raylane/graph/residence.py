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
from typing import Any

from raylane import _ray
from raylane.core import wake
from raylane.core.place import here
from raylane.core.semaphore import Segment, try_wait
from raylane.errors import GraphError, GraphPlanError
from raylane.graph import context, guard, lane
from raylane.graph import message as m
from raylane.graph.channels.lease import LeasePool, LeaseReader
from raylane.graph.channels.ring import RingReader, RingSpec, RingWriter
from raylane.graph.plan import DRIVER
from raylane.graph.program import Hello, Outbound, Program
from raylane.graph.resident import Resident

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
        self._owner = lane.Watched(program.owner)
        self._pool = LeasePool(program.max_lent_bytes, program.timeout_s)
        self._leases = LeaseReader()
        self._wake_fd: int | None = None
        self._encoder = m.Encoder()
        self._reports = 0
        self._control = self._reader(*program.control)
        self._report = self._writer(program.report)
        self._to_driver: list[RingWriter] = []
        readers = {edge: self._reader(spec, index) for edge, (spec, index) in program.inbound.items()}
        writers = {edge: self._writer(out) for edge, out in program.outbound.items()}
        self._to_driver = [w for edge, w in writers.items() if DRIVER in program.plan.edges[edge].readers]
        self._writers = writers
        self.resident = Resident(
            program.plan,
            program.member,
            instance,
            readers,
            {edge: writer.write for edge, writer in writers.items()},
            loop=loop,
            guard=lane.lane().exclusive if program.exclusive else None,
            exit=_ray.exit_this_actor,
        )

    def _reader(self, spec: RingSpec, index: int) -> RingReader:
        return RingReader(Segment.open(spec.path), spec, index, self._leases)

    def _writer(self, out: Outbound) -> RingWriter:
        assert out.ring is not None
        bells = [Segment.open(path) for path in out.bells]
        return RingWriter(Segment.open(out.ring.path), out.ring, bells, self._pool)

    @property
    def taken(self) -> int:
        return self.resident.taken + self._control.sequence

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
        word, *rest = pickle.loads(self._control.take().body)
        if word == "close":
            self.over = True
            answer: Any = None
        elif word == "stats":
            sent = {edge: writer.bytes for edge, writer in self._writers.items()}
            answer = self.resident.stats() | {"sent_bytes": sent, "lent_bytes": self._pool.lent_bytes()}
        elif word == "trace":
            answer = list(self.resident.records)
        elif word == "wake":
            answer = self._learn_to_wake(*rest)
        else:
            answer = GraphError(f"{self.who} does not know the order {word!r}")
        self._report.write(self._reports, self._encoder.encode((word, answer)))
        self._reports += 1

    def _learn_to_wake(self, pid: int, fd: int) -> str | None:
        """Get hold of the owner's eventfd; the reason if the kernel says no."""
        try:
            self._wake_fd = wake.fetch(pid, fd)
        except OSError as error:
            return str(error)
        for writer in self._to_driver:
            writer.wake_fd = self._wake_fd
        return None

    def orphaned(self) -> bool:
        return self._owner.gone()

    def close(self) -> None:
        """Let go of everything. What readers still hold of lent memory stays valid."""
        self._pool.closed = True
        self._owner.close()
        fd, self._wake_fd = self._wake_fd, None
        if fd is not None:
            os.close(fd)
        if self._guarded is not None:
            guard.leave(self._guarded)


# What `compile` runs in an actor, on its own thread.


def hello(instance: Any) -> Hello:
    """Who and where this actor is. Makes its lane, which does not run yet."""
    import sys

    torch: Any = sys.modules.get("torch")
    return Hello(
        place=here(),
        who=_ray.describe_self(),
        bell=lane.lane().bell.path,
        node_ip=_ray.node_ip(),
        listener=None,
        asynchronous=_ray.actor_loop() is not None,
        gpus=torch is not None and torch.cuda.is_available(),
    )


def enter(instance: Any, packed: bytes) -> None:
    """Take part in a graph from now on. GraphPlanError if a method is missing or cannot be used."""
    program: Program = pickle.loads(packed)
    loop = _ray.actor_loop()
    if program.exclusive and loop is not None:
        raise GraphPlanError(
            f"exclusive=True: {_ray.describe_self()} is an asyncio actor, whose calls interleave by design; "
            "use an asyncio.Lock in its methods"
        )
    residence = Residence(program, instance, loop)
    if program.exclusive:
        guard.enter(instance, lane.lane().exclusive)
    lane.lane().adopt(residence, context.read())

"""Records that the driver sends to an actor to run its share of a graph, and the actor's first answer. Pure.

The records travel by cloudpickle, because constants of a graph may be anything that an ordinary call accepts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from raylane.core.place import Place
from raylane.core.portable import FLAGS
from raylane.graph.channels.ring import RingSpec
from raylane.graph.channels.specs import LinkSpec, NetworkSpec, OutboundSpec
from raylane.graph.plan.ir import Plan

HOST_VARIABLE = "RAYLANE_HOST"
"""Environment variable whose values separate hosts.

Processes with different values are treated as if on different hosts: for containers that share a kernel but not /proc,
and for tests.
"""
CONTROL_SLOTS = 4
"""Maximum number of unanswered orders to one actor."""
TROUBLE, EXITED = "trouble", "exited"
"""Names of reports that answer no order: a defect has ended the graph in the actor; a method has exited the actor."""


def graph_flag(graph: str) -> int:
    """Return the flag that stands for a graph on the pages of its actors' doorbells. Several graphs may share one."""
    return int(graph[:8], 16) % FLAGS


def report_slots(max_inflight: int) -> int:
    """Return the slots of the channel for reports: answers, one failure for each execution in flight, two last reports.

    Failures cannot overrun the channel. An actor reports the failure of an execution before it writes the messages that
    the failed call owes, and the driver reads those last: so it reads the report before the execution ends.
    """
    return CONTROL_SLOTS + max_inflight + 2


@dataclass(frozen=True)
class ActorInfo:
    """Facts about an actor that the driver needs to plan channels."""

    place: Place
    name: str
    """Description of the actor for messages."""
    doorbell: str
    """Path of the doorbell's segment."""
    host: str
    """Value of RAYLANE_HOST in the actor's environment."""
    gpus: bool
    """True if torch is loaded in the actor and sees a GPU."""


@dataclass(frozen=True)
class Program:
    """Share of one member in a graph."""

    graph: str
    member: int
    plan: Plan
    owner: Place | None
    """Place of the driver if it runs on the same host; otherwise a link notices that the driver has ended."""
    owner_name: str
    inbound: Mapping[int, tuple[RingSpec, int]]
    """Ring on this host and this member's index among its readers, by edge."""
    outbound: Mapping[int, OutboundSpec]
    """Sending end of each edge that this member writes."""
    orders: tuple[RingSpec, int]
    """Ring of the driver's orders and this member's index among its readers."""
    reports: OutboundSpec
    """Sending end of the channel for answers and failures."""
    reports_channel: int
    max_inflight: int
    timeout_s: float | None
    max_lent_bytes: int
    exclusive: bool
    wake: tuple[int, int] | None
    """(pid, file descriptor) of the eventfd that wakes the driver's asyncio loop, if the driver is on the same host."""
    network: NetworkSpec | None = None
    """Set if this member sends to other hosts or receives from them."""
    links: tuple[LinkSpec, ...] = ()
    """Links that this member opens."""


def share_of(plan: Plan, member: int) -> Plan:
    """Return the plan without the arguments of other members' tasks: constants travel only to where they are used."""
    return replace(plan, tasks=tuple(t if t.member == member else replace(t, args=(), kwargs=()) for t in plan.tasks))

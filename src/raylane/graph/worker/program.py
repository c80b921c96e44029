"""Records that the driver sends to an actor to run its share of a graph, and the actor's first answer. Pure.

The records travel by cloudpickle, because constants of a graph may be anything that an ordinary call accepts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from raylane.core.process.place import Place
from raylane.graph.channels.layout import GraphLayout
from raylane.graph.plan.ir import Plan

ANSWER, TROUBLE, EXITED = "answer", "trouble", "exited"
"""Names of reports: the answer to an order; a defect has ended the graph in the actor; a method has exited the actor.
"""


@dataclass(frozen=True)
class ActorInfo:
    """Facts about an actor that the driver needs to plan channels. They hold as long as the actor's process."""

    place: Place
    name: str
    """Description of the actor for messages."""
    doorbell: str
    """Path of the doorbell's segment."""
    host: str
    """Value of RAYLANE_HOST in the actor's environment."""
    sees_gpu: bool
    """True if the actor had loaded torch by now, and its torch sees a GPU."""


@dataclass(frozen=True)
class MembersDied:
    """Order to a neighbour of dead members: treat each message that a dead member has not sent as its failure."""

    members: tuple[int, ...]
    execution: int
    """Number of the first execution that has not begun."""


@dataclass(frozen=True)
class MembersRestarted:
    """Order to a neighbour of members that have new processes: open the channels to these processes.

    Obeyed and answered when the neighbour has run every task before `execution`.
    """

    execution: int
    """Number of the next execution."""
    doorbells: Mapping[int, str]
    """Path of the doorbell of each new process, by member."""
    ended_pids: tuple[int, ...]
    """Processes that have ended."""


@dataclass(frozen=True)
class Program:
    """Share of one member in a graph."""

    layout: GraphLayout
    plan: Plan
    owner: Place
    """Place of the driver. Where it runs on another host, a link notices that it has ended."""
    owner_name: str
    wake_fd: int
    """Number in the driver of the eventfd that wakes its asyncio loop."""


def share_of(plan: Plan, member: int) -> Plan:
    """Return the plan without the arguments of other members' tasks: constants travel only to where they are used."""
    return replace(plan, tasks=tuple(t if t.member == member else replace(t, args=(), kwargs=()) for t in plan.tasks))

"""Layout of a graph's channels: one description, which every process reads by its own member number. Pure.

The driver makes the layout from the routes (`plan.routing`). Each process finds in it which rings it creates, which
channels it relays, which links it opens and accepts, and where its own ends are (`ends`). A layout travels from the
driver to an actor by cloudpickle: once without rings and addresses of other processes, where a graph spans hosts and
they do not exist yet, then complete, within a `worker.program.Program`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raylane.core.native import FLAGS
from raylane.graph.channels.ring import RingSpec
from raylane.graph.plan.ir import DRIVER
from raylane.graph.plan.routing import Route
from raylane.transport.value.source import Source

CONTROL_SLOTS = 4
"""Maximum number of unanswered orders to one actor."""


def report_slots(max_inflight: int) -> int:
    """Return the slots of the channel for reports: answers, one failure for each execution in flight, two last reports.

    Failures cannot overrun the channel. An actor reports the failure of an execution before it writes the messages that
    the failed call owes, and the driver reads those last: so it reads the report before the execution ends.
    """
    return CONTROL_SLOTS + max_inflight + 2


@dataclass(frozen=True)
class GraphOptions:
    """Options of `raylane.compile` that hold while the graph runs, and for `recompile`."""

    max_inflight: int
    timeout_s: float | None
    start_timeout_s: float | None
    """Limit for actors that have not started, or that Ray restarts."""
    max_lent_bytes: int
    exclusive: bool
    repairs: bool = False
    """True if the graph continues after the death of an actor (`on_death="repair"`)."""


@dataclass(frozen=True)
class GraphLayout:
    """Channels of one graph that `member` writes, reads or relays. Channel numbers are those of `routing.Routes`."""

    graph: str
    """Name of the graph, unique everywhere: a hexadecimal number."""
    member: int
    names: tuple[str, ...]
    """Name of each member for messages."""
    edge_count: int
    options: GraphOptions
    near_driver: bool
    """True if this process is on the driver's host, where the driver creates all rings."""
    routes: Mapping[int, Route]
    """Routes by channel."""
    doorbells: Mapping[int, str]
    """Path of the doorbell of each member that reads a ring which this process writes."""
    links: tuple[tuple[int, int, int], ...]
    """(from, to, level) of each link that begins or ends here; empty if this process exchanges nothing with hosts."""
    rings: Mapping[tuple[int, int], RingSpec]
    """Rings by (channel, member that writes there: the writer itself or a relay)."""
    sources: Mapping[int, Source]
    """Address of each process to which this one opens a link."""
    deadlines: str = ""
    """Path of the deadlines of executions (`channels.deadlines`); empty for a process on another host."""
    first_execution: int = 0
    """Number of the first execution in which this process takes part."""

    @property
    def key(self) -> bytes:
        """Name of the graph for listeners."""
        return bytes.fromhex(self.graph)

    @property
    def orders(self) -> int:
        """Channel of the driver's orders to this member."""
        return self.edge_count + 2 * self.member - 2

    @property
    def reports(self) -> int:
        """Channel of this member's answers and failures."""
        return self.orders + 1

    @property
    def alarm_channel(self) -> int:
        """Channel on which a member reports over a link to the driver why it left the graph."""
        return self.edge_count + 2 * (len(self.names) - 1)

    def slots(self, channel: int) -> int:
        """Return the number of messages that fit into a channel."""
        if channel < self.edge_count:
            return self.options.max_inflight
        return report_slots(self.options.max_inflight) if (channel - self.edge_count) % 2 else CONTROL_SLOTS

    @property
    def flag(self) -> int:
        """Flag that stands for this graph on the pages of its actors' doorbells. Several graphs may share one."""
        return int(self.graph[:8], 16) % FLAGS

    def new_ring(self, channel: int, writer: int, readers: Sequence[int]) -> RingSpec:
        """Return the ring of a channel in which a member writes for these readers of its host."""
        # In the driver each ring has a flag of its own (as long as there are enough); in an actor each graph has one.
        flags = tuple(channel % FLAGS if reader == DRIVER else self.flag for reader in readers)
        return RingSpec(tuple(self.names[reader] for reader in readers), self.slots(channel), flags, writer)

    def readers_here(self, channel: int) -> tuple[int, ...]:
        """Return the readers of this host to which this process writes a channel."""
        return self.routes[channel].rings.get(self.member, ())

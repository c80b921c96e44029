"""Layout of a graph's channels: one description, which every process reads by its own member number.

The driver makes the layout from the routes (`plan.routing`). Each process finds in it which rings it creates, which
channels it relays, which links it opens and accepts, and opens its own ends (`ChannelEnds`). A layout travels from the
driver to an actor by cloudpickle: once without rings and addresses of other processes, where a graph spans hosts and
they do not exist yet, then complete, within a `worker.program.Program`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from raylane.core.portable import FLAGS
from raylane.core.semaphore import Segment
from raylane.errors import GraphPlanError
from raylane.graph.channels.lease import LeasePool, LeaseReader
from raylane.graph.channels.peer_link import FanOutWriter, PeerLink, Writer
from raylane.graph.channels.ring import Doorbell, RingReader, RingSpec, RingWriter
from raylane.graph.plan.ir import DRIVER
from raylane.graph.plan.routing import Route
from raylane.transport.source import Source

CONTROL_SLOTS = 4
"""Maximum number of unanswered orders to one actor."""


def report_slots(max_inflight: int) -> int:
    """Return the slots of the channel for reports: answers, one failure for each execution in flight, two last reports.

    Failures cannot overrun the channel. An actor reports the failure of an execution before it writes the messages that
    the failed call owes, and the driver reads those last: so it reads the report before the execution ends.
    """
    return CONTROL_SLOTS + max_inflight + 2


@dataclass(frozen=True)
class Layout:
    """Channels of one graph that `member` writes, reads or relays. Channel numbers are those of `routing.Routes`."""

    graph: str
    """Name of the graph, unique everywhere: a hexadecimal number."""
    member: int
    names: tuple[str, ...]
    """Name of each member for messages."""
    edge_count: int
    max_inflight: int
    timeout_s: float | None
    max_lent_bytes: int
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
            return self.max_inflight
        return report_slots(self.max_inflight) if (channel - self.edge_count) % 2 else CONTROL_SLOTS

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


class ChannelEnds:
    """Opens the ends of one process. Maps each segment once, whatever the number of rings in it."""

    def __init__(
        self, layout: Layout, made: Iterable[Segment] = (), links: Mapping[tuple[int, int], PeerLink] = {}
    ) -> None:
        """Create without ends. `made` are segments of this process, `links` its links by (member, level)."""
        self._layout = layout
        self._segments = {segment.path: segment for segment in made}
        self._links = links

    def _open(self, path: str, owner: int) -> Segment:
        if path not in self._segments:
            self._segments[path] = open_shared(path, self._layout.names[owner])
        return self._segments[path]

    def _open_ring(self, spec: RingSpec) -> Segment:
        return self._open(spec.path, DRIVER if self._layout.near_driver else spec.writer)

    def reader(self, channel: int, leases: LeaseReader, doorbell: Doorbell) -> RingReader:
        """Open the reading end of a channel, whose writer rings `doorbell` of this process."""
        layout = self._layout
        writer = layout.routes[channel].ring_of(layout.member)
        spec = layout.rings[channel, writer]
        index = layout.routes[channel].rings[writer].index(layout.member)
        return RingReader(self._open_ring(spec), spec, index, leases, doorbell)

    def ring_writer(self, channel: int, pool: LeasePool) -> RingWriter:
        """Open the writing end of the ring that this process writes for the readers of its host."""
        spec = self._layout.rings[channel, self._layout.member]
        readers = self._layout.readers_here(channel)
        doorbells = [self._open(self._layout.doorbells[reader], reader) for reader in readers]
        return RingWriter(self._open_ring(spec), spec, doorbells, pool)

    def writer(self, channel: int, pool: LeasePool) -> Writer:
        """Open the writing end of a channel: the ring's own writer where no message leaves this host."""
        own = self.ring_writer(channel, pool) if self._layout.readers_here(channel) else None
        found = self.fan_out(channel, own) or own
        assert found is not None, f"channel {channel} has no reader"
        return found

    def fan_out(self, channel: int, ring: RingWriter | None) -> FanOutWriter | None:
        """Return the writer over the links of this process, which must be open; None if a channel needs none."""
        onward = self._layout.routes[channel].onward(self._layout.member)
        links = [self._links[to] for to in onward]
        return FanOutWriter(ring, links, channel, self._layout.slots(channel)) if links else None


def open_shared(path: str, owner: str) -> Segment:
    """Map shared memory of another process, called `owner` in messages.

    GraphPlanError if that is impossible: then the two processes are not on one host after all.
    """
    try:
        return Segment.open(path)
    except OSError as error:
        raise GraphPlanError(
            f"cannot open shared memory of {owner} ({path}): {error}. raylane assumes that processes of one kernel, "
            "pid namespace and user share /proc; where they do not, give them different values of the environment "
            "variable RAYLANE_HOST, and they will use the network"
        ) from error

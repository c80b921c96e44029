"""Ends of channels: opens what one process writes and reads, as the graph's layout describes it.

Used by the driver (`channel_setup`), by actors (`session`), and for relays (`peer_network`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from raylane.core.memory.segment import Segment
from raylane.errors import GraphPlanError
from raylane.graph.channels.layout import GraphLayout
from raylane.graph.channels.lease import LeasePool, LeaseReader
from raylane.graph.channels.peer_link import FanOutWriter, PeerLink, Writer
from raylane.graph.channels.published import EdgeWriter, PublishingWriter
from raylane.graph.channels.ring import ProcessDoorbell, RingReader, RingSpec, RingWriter
from raylane.graph.plan.ir import DRIVER, Edge


class ChannelEnds:
    """Opens the ends of one process. Maps each segment once, whatever the number of rings in it."""

    def __init__(
        self, layout: GraphLayout, segments: Iterable[Segment] = (), links: Mapping[tuple[int, int], PeerLink] = {}
    ) -> None:
        """Create without ends. `segments` are those of this process, `links` its links by (member, level)."""
        self._layout = layout
        self._segments = {segment.path: segment for segment in segments}
        self._links = links

    def _open(self, path: str, owner: int) -> Segment:
        if path not in self._segments:
            self._segments[path] = open_shared(path, self._layout.names[owner])
        return self._segments[path]

    def _open_ring(self, spec: RingSpec) -> Segment:
        return self._open(spec.path, DRIVER if self._layout.near_driver else spec.writer)

    def doorbell(self, reader: int) -> Segment:
        """Open the doorbell of a member that reads what this process writes."""
        return self._open(self._layout.doorbells[reader], reader)

    def reader(self, channel: int, leases: LeaseReader, doorbell: ProcessDoorbell) -> RingReader:
        """Open the reading end of a channel, whose writer rings `doorbell` of this process."""
        layout = self._layout
        writer = layout.routes[channel].ring_of(layout.member)
        spec = layout.rings[channel, writer]
        index = layout.routes[channel].rings[writer].index(layout.member)
        # Message n of an edge belongs to execution n; control channels begin anew with each process.
        sequence = layout.first_execution if channel < layout.edge_count else 0
        return RingReader(self._open_ring(spec), spec, index, leases, doorbell, sequence)

    def ring_writer(self, channel: int, pool: LeasePool) -> RingWriter:
        """Open the writing end of the ring that this process writes for the readers of its host."""
        spec = self._layout.rings[channel, self._layout.member]
        readers = self._layout.readers_here(channel)
        doorbells = [self.doorbell(reader) for reader in readers]
        return RingWriter(self._open_ring(spec), spec, doorbells, pool)

    def edge_writer(self, edge: Edge, label: str, pool: LeasePool) -> EdgeWriter:
        """Open the writing end of an edge; `label` names its value."""
        writer = self.writer(edge.index, pool)
        return PublishingWriter(writer, edge, self._layout.slots(edge.index), label) if edge.may_publish else writer

    def writer(self, channel: int, pool: LeasePool) -> Writer:
        """Open the writing end of a channel: the ring's own writer where no message leaves this host."""
        ring = self.ring_writer(channel, pool) if self._layout.readers_here(channel) else None
        writer = self.fan_out(channel, ring) or ring
        assert writer is not None, f"channel {channel} has no reader"
        return writer

    def fan_out(self, channel: int, ring: RingWriter | None) -> FanOutWriter | None:
        """Return the writer over the links of this process, which must be open; None if a channel needs none."""
        onward = self._layout.routes[channel].onward(self._layout.member)
        links = [self._links[to] for to in onward]
        return FanOutWriter(ring, links, channel) if links else None


def notify_new_readers(
    layout: GraphLayout, writers: Iterable[tuple[int, EdgeWriter]], doorbells: Mapping[int, Segment]
) -> None:
    """Let the writers of edges (by number) ring these doorbells: those of members whose processes are new."""
    for edge, writer in writers:
        for index, reader in enumerate(layout.readers_here(edge)):
            if reader in doorbells:
                assert isinstance(writer, RingWriter), "graphs with other edges are not repaired"
                writer.replace_reader(index, doorbells[reader])


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

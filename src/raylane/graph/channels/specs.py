"""Records that describe the channels of a graph to the processes that open them. Pure.

The records travel from the driver to actors by cloudpickle, within a `worker.program.Program` or a `PeerSetup`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raylane.graph.channels.ring import RingSpec
from raylane.transport.source import Source


@dataclass(frozen=True)
class OutboundSpec:
    """Sending end of one channel: a ring for readers on this host, links to relays of other hosts, or both."""

    ring: RingSpec | None
    doorbells: tuple[str, ...]
    """Paths of the doorbells of the ring's readers."""
    links: tuple[tuple[int, int], ...] = ()
    """(member, level) of each link."""


@dataclass(frozen=True)
class NetworkSpec:
    """Facts that every process of a graph that spans hosts needs."""

    key: bytes
    """Name of the graph for listeners."""
    member: int
    """Member number of the process that gets this record."""
    names: tuple[str, ...]
    """Name of each member for messages."""
    alarm_channel: int
    """Channel on which a member reports to the driver why it left the graph."""
    timeout_s: float | None
    max_lent_bytes: int


@dataclass(frozen=True)
class RelaySpec:
    """Channel whose messages arrive over a link, and the readers to whom this process relays them."""

    channel: int
    source: tuple[int, int]
    """(member, level) of the link."""
    onward: OutboundSpec
    slots: int


@dataclass(frozen=True)
class PeerSetup:
    """First message to a member of a graph that spans hosts: everything that must be ready before links are opened."""

    network: NetworkSpec
    peers: tuple[tuple[int, int], ...]
    """(member, level) of each link that will be opened to this process."""
    rings: tuple[tuple[int, RingSpec], ...]
    """(channel, ring) of each ring that the process must create, because it writes the ring's messages."""
    relays: tuple[RelaySpec, ...]


@dataclass(frozen=True)
class PeerEndpoint:
    """Answer to a `PeerSetup`: address of the process, and its new rings by channel."""

    source: Source
    rings: Mapping[int, RingSpec]


@dataclass(frozen=True)
class LinkSpec:
    """Link that a process must open."""

    member: int
    level: int
    source: Source

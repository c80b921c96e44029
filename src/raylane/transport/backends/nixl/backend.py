"""nixl: the reader takes the blocks out of the source's memory through NVIDIA's NIXL, over UCX.

For programs that ask for it by name. Where the network has RDMA, neither process copies; on one host, and over
networks without RDMA, `host` and `tcp` are at least as fast.
"""

from __future__ import annotations

from raylane.errors import ProtocolError, TransportUnavailableError
from raylane.transport.backends.base import Capability, Process
from raylane.transport.backends.channels import Channel, ChannelBackend
from raylane.transport.backends.nixl.agent import missing
from raylane.transport.backends.nixl.agents import Agents
from raylane.transport.backends.nixl.channel import NixlChannel
from raylane.transport.link import wire
from raylane.transport.link.connection import Connection

AGENT = "agent"
"""Key of the RendezvousEntry in which the source tells the name of its agent."""


class NixlBackend(ChannelBackend):
    """One-sided read through NIXL, of memory that the source registers and offers on request."""

    name = "nixl"
    capability = Capability(
        summary="one-sided reads through NIXL (RDMA where the network has it)",
        rank=None,
        same_process=True,
        same_host=True,
        across_hosts=True,
        on_device=True,
        in_the_clear=True,
        remedy="nothing if tcp works. For nixl, run pip install 'raylane[nixl]' on every node.",
    )

    def missing(self) -> str | None:
        """Return that NIXL is not installed or does not fit torch, or None."""
        return missing()

    def open_channel(self, connection: Connection, rank: int, process: Process) -> Channel:
        """Open this end of a channel. TransportUnavailableError if one of the two processes has no NIXL."""
        agents = process.part(Agents)
        # Both ends create their agents at the same time: that takes half a second.
        if rank == 0:
            connection.send(wire.RendezvousEntry(AGENT, agents.offering().name.encode()))
            return NixlChannel(agents, connection, "")
        # The reader sends nothing here: its agent starts no connection before its first read.
        agents.prepare_reading()
        message = connection.receive()
        if isinstance(message, wire.Refusal):
            raise TransportUnavailableError(f"{connection.peer} cannot open the channel: {message.reason}")
        if not isinstance(message, wire.RendezvousEntry) or message.key != AGENT:
            raise ProtocolError(f"{connection.peer} sent {type(message).__name__} instead of the name of its agent")
        return NixlChannel(agents, connection, message.value.decode())

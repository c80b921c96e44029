"""Transfer by a tensor transport that was written for Ray, under the name it was registered by with raylane."""

from __future__ import annotations

import pickle

from raylane import _ray
from raylane.errors import ProtocolError, TransportUnavailableError
from raylane.transport.backends.base import Capability, Process
from raylane.transport.backends.channels import Channel, ChannelBackend
from raylane.transport.backends.ray_managers.channel import ManagerChannel, this_actor
from raylane.transport.backends.ray_managers.registered import find
from raylane.transport.link import wire
from raylane.transport.link.connection import Connection

ACTOR = "actor"
"""Key of the RendezvousEntry with the pickled handle of the reader's actor."""


class ManagedBackend(ChannelBackend):
    """Transfer by the manager of this name (`registered`)."""

    # Only on request, because nothing tells which processes a manager connects, and how well.
    capability = Capability(
        summary="by a tensor transport that was written for Ray",
        rank=None,
        same_process=True,
        same_host=True,
        across_hosts=True,
    )

    def __init__(self, name: str) -> None:
        self.name = name

    def open_channel(self, connection: Connection, rank: int, process: Process) -> Channel:
        """Open this end of a channel. TransportUnavailableError if nobody has registered a manager of this name."""
        registered = find(self.name)
        # In the source this may be the first use of the name: whoever published the value needed only the name.
        if registered is None:
            raise TransportUnavailableError(
                f"tensor_transport={self.name!r} is not registered in this Ray cluster. Call raylane.add_ray_transport"
            )
        if rank == 1:
            # Managers of collective transports find the ranks of the two processes by their actors.
            actor = this_actor()
            connection.send(wire.RendezvousEntry(ACTOR, b"" if actor is None else _ray.dumps(actor)))
            return ManagerChannel(registered, connection, None)
        message = connection.receive()
        if not isinstance(message, wire.RendezvousEntry) or message.key != ACTOR:
            raise ProtocolError(f"expected the reader's actor, got {type(message).__name__}")
        return ManagerChannel(registered, connection, pickle.loads(message.value) if message.value else None)

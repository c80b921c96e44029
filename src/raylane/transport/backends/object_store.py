"""object_store: the source puts the blocks into Ray's object store and the reader takes them from there.

For `raylane.get(ref, tensor_transport="object_store")`, and when no other way exists. A value that its producer
declared `object_store` never comes here: Ray carries its bytes from the start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray

from raylane import _ray
from raylane.core.deadline import Deadline
from raylane.core.place import Place
from raylane.errors import SourceLostError, TransferTimeoutError, TransportError
from raylane.transport import wire
from raylane.transport.backends.base import Arrival, Backend, Capability, copied
from raylane.transport.backends.tcp import gone_or_odd
from raylane.transport.source import Source
from raylane.transport.ticket import Ticket

if TYPE_CHECKING:
    from raylane.transport.endpoint import Endpoint


class ObjectStoreBackend(Backend):
    name = "object_store"
    capability = Capability(
        summary="through Ray's object store", same_process=True, same_host=True, across_hosts=True, calls_ray=True
    )

    def refusal(self, source: Source, here: Place) -> str | None:
        return None

    def fetch(self, ticket: Ticket, endpoint: Endpoint, deadline: Deadline) -> Arrival:
        source = ticket.origin()
        with endpoint.links().borrow(endpoint.address_of(source), source, deadline) as link:
            link.send(wire.Put(ticket.key))
            answer = link.receive()
            if isinstance(answer, wire.PutReply):
                ref = _ray.adopt_ref(answer.object_id, answer.owner)
                try:
                    arrays = ray.get(ref, timeout=deadline.left_s())
                except ray.exceptions.GetTimeoutError as error:
                    raise TransferTimeoutError(
                        f"Ray's object store did not deliver the value of {source} within {deadline.timeout_s} s"
                    ) from error
                except ray.exceptions.RayError as error:
                    raise SourceLostError(
                        f"Ray's object store lost the value of {source}: {error}", source=source.label
                    ) from error
                blocks = copied(ticket, endpoint, arrays)
                del arrays, ref
                link.send(wire.Done(ticket.key))
                return Arrival(blocks=blocks, mutated=answer.mutated, creator_read=answer.creator_read)
            if isinstance(answer, wire.Refusal):
                raise TransportError(
                    f"{source} could not put {ticket.nbytes} bytes into Ray's object store: {answer.reason!r}. Free "
                    "memory there, or take another transport",
                    source=source.label,
                )
        raise gone_or_odd(answer, source, ticket)

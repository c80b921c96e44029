"""object_store: the source puts the blocks into Ray's object store, and the reader takes them from there.

Used for `raylane.get(ref, tensor_transport="object_store")` and when no other transport works. A value whose producer
declared `object_store` is never read by this module: Ray carries its bytes inside the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray

from raylane import _ray
from raylane.core.deadline import Deadline
from raylane.core.place import Place
from raylane.errors import SourceLostError, TransferTimeoutError, TransportError
from raylane.transport import wire
from raylane.transport.backends.base import Backend, Capability, FetchResult, copy_to_pool
from raylane.transport.backends.tcp import answer_error
from raylane.transport.source import Source
from raylane.transport.ticket import Ticket

if TYPE_CHECKING:
    from raylane.transport.endpoint import Endpoint


class ObjectStoreBackend(Backend):
    """Transfer through Ray's object store, requested over a link."""

    name = "object_store"
    capability = Capability(
        summary="through Ray's object store", same_process=True, same_host=True, across_hosts=True, calls_ray=True
    )

    def refusal(self, source: Source, here: Place) -> str | None:
        """Return None: Ray moves objects between any two processes of the cluster."""
        return None

    def fetch(self, ticket: Ticket, endpoint: Endpoint, deadline: Deadline) -> FetchResult:
        """Let the source put the blocks, get the object and copy it into pooled memory."""
        source = ticket.origin()
        with endpoint.links().borrow(endpoint.address_of(source), source, deadline) as link:
            link.send(wire.Put(ticket.key))
            answer = link.receive()
            if isinstance(answer, wire.PutReply):
                # Adopting registers this process as a borrower, so that Ray keeps the object until the copy is done.
                ref = _ray.adopt_ref(answer.object_id, answer.owner)
                try:
                    arrays = ray.get(ref, timeout=deadline.left_s())
                except ray.exceptions.GetTimeoutError as error:
                    raise TransferTimeoutError(
                        f"could not read a value of {source}: Ray's object store did not deliver it within "
                        f"{deadline.timeout_s} s. Raise the timeout"
                    ) from error
                except ray.exceptions.RayError as error:
                    raise SourceLostError(
                        f"could not read a value of {source}: Ray's object store lost it: {error}", source=source.label
                    ) from error
                blocks = copy_to_pool(ticket, endpoint, arrays)
                # Drop this process's references before the source drops its ref, so that Ray frees the object at once.
                del arrays, ref
                link.send(wire.Release(ticket.key))
                return FetchResult(blocks=blocks, mutated=answer.mutated, creator_read=answer.creator_read)
            if isinstance(answer, wire.Refusal):
                raise TransportError(
                    f"{source} could not put {ticket.nbytes} bytes into Ray's object store: {answer.reason!r}. Free "
                    "memory there, or use another transport",
                    source=source.label,
                )
        raise answer_error(answer, source, ticket)

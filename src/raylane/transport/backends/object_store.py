"""object_store: the source puts the blocks into Ray's object store, and the reader takes them from there.

Used for `raylane.get(ref, tensor_transport="object_store")` and when no other transport works. A value whose producer
declared `object_store` is never read by this module: Ray carries its bytes inside the result.
"""

from __future__ import annotations

import ray

from raylane import _ray
from raylane.core.deadline import Deadline
from raylane.errors import SourceLostError, TransferTimeoutError, TransportError
from raylane.transport.backends.answers import answer_error
from raylane.transport.backends.base import Backend, Capability, FetchResult, Process
from raylane.transport.hold.blocks import copy_to_pool
from raylane.transport.link import wire
from raylane.transport.value.ticket import Ticket


class ObjectStoreBackend(Backend):
    """Transfer through Ray's object store, requested over a link."""

    name = "object_store"
    capability = Capability(
        summary="through Ray's object store",
        rank=90,
        same_process=True,
        same_host=True,
        across_hosts=True,
        by_ray=True,
        remedy="check the Ray cluster with `ray status`.",
    )

    def fetch(self, ticket: Ticket, process: Process, deadline: Deadline) -> FetchResult:
        """Let the source put the blocks, get the object and copy it into pooled memory."""
        source = ticket.origin()
        with process.links().borrow(process.address_of(source), source, deadline) as link:
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
                blocks = copy_to_pool(ticket, process.pool, arrays)
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

"""local: source and reader are one process; the value is the producer's own objects, and nothing moves.

The reader redeems such a ticket from the store itself; this file says when, and serves the snapshot case, where "the
same objects" are a private view of the snapshot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raylane.core.deadline import Deadline
from raylane.core.place import Place
from raylane.core.segment import map_segment
from raylane.transport.backends.base import Arrival, Backend, Capability, freed
from raylane.transport.source import Source
from raylane.transport.ticket import Ticket

if TYPE_CHECKING:
    from raylane.transport.endpoint import Endpoint


class LocalBackend(Backend):
    name = "local"
    capability = Capability(summary="the very same tensor objects, within one process", same_process=True)

    def refusal(self, source: Source, here: Place) -> str | None:
        if source.place.same_process(here):
            return None
        return f"the value is in another process ({source.place}); this is {here}"

    def fetch(self, ticket: Ticket, endpoint: Endpoint, deadline: Deadline) -> Arrival:
        entry = endpoint.store.get(ticket.key)
        if entry is None or entry.segment < 0:
            raise freed(ticket)
        blocks = map_segment(entry.segment, [block.nbytes for block in ticket.blocks])
        return Arrival(blocks=blocks, mutated=False, creator_read=False)

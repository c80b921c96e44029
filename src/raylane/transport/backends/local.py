"""local: source and reader are one process, so nothing moves; the value consists of the producer's own objects.

The reader takes such a value from the store itself. This module states when that applies, and serves snapshots, which
are mapped privately instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raylane.core.deadline import Deadline
from raylane.core.place import Place
from raylane.core.segment import map_segment
from raylane.transport.backends.base import Backend, Capability, FetchResult, freed_error
from raylane.transport.source import Source
from raylane.transport.ticket import Ticket

if TYPE_CHECKING:
    from raylane.transport.endpoint import Endpoint


class LocalBackend(Backend):
    """Access within the producing process."""

    name = "local"
    capability = Capability(summary="the very same tensor objects, within one process", same_process=True)

    def refusal(self, source: Source, here: Place) -> str | None:
        """Return None if source and reader are the same process, else the two processes."""
        if source.place.same_process(here):
            return None
        return f"the value is in another process ({source.place}); this is {here}"

    def fetch(self, ticket: Ticket, endpoint: Endpoint, deadline: Deadline) -> FetchResult:
        """Map the snapshot of a value copy-on-write. Does not wait."""
        entry = endpoint.store.get(ticket.key)
        if entry is None or entry.segment < 0:
            raise freed_error(ticket)
        # A private mapping: the reader may write to its tensors without changing the snapshot.
        blocks = map_segment(entry.segment, [block.nbytes for block in ticket.blocks])
        return FetchResult(blocks=blocks, mutated=False, creator_read=False)

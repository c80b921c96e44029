"""local: source and reader are one process, so nothing moves; the value consists of the producer's own objects.

The reader takes such a value from the store itself. This module states when that applies, and serves snapshots, which
are mapped privately instead.
"""

from __future__ import annotations

from raylane.core.deadline import Deadline
from raylane.core.memory.sealed import map_segment
from raylane.transport.backends.base import Backend, Capability, FetchResult, Process
from raylane.transport.value.ticket import Ticket, freed_error


class LocalBackend(Backend):
    """Access within the producing process."""

    name = "local"
    capability = Capability(
        summary="the very same tensor objects, within one process",
        rank=10,
        same_process=True,
        parts=True,
        into=True,
        own_objects=True,
    )

    def fetch(self, ticket: Ticket, process: Process, deadline: Deadline) -> FetchResult:
        """Map the snapshot of a value copy-on-write. Does not wait."""
        entry = process.store.get(ticket.key)
        if entry is None or entry.segment < 0:
            raise freed_error(ticket)
        # A private mapping: the reader may write to its tensors without changing the snapshot.
        blocks = map_segment(entry.segment, [block.nbytes for block in ticket.blocks])
        return FetchResult(blocks=blocks, mutated=False, creator_read=False)

"""Transfer by a tensor transport that was written for Ray, under the name it was registered by with raylane."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raylane.core.deadline import Deadline
from raylane.core.place import Place
from raylane.transport.backends.base import Backend, Capability, FetchResult
from raylane.transport.backends.gloo import fetch_by_channel
from raylane.transport.source import Source
from raylane.transport.ticket import Ticket

if TYPE_CHECKING:
    from raylane.transport.endpoint import Endpoint


class AdapterBackend(Backend):
    """Transfer by the manager of this name (`managers`)."""

    def __init__(self, name: str) -> None:
        self.name = name
        # Only on request, because nothing tells which processes a manager connects, and how well.
        self.capability = Capability(
            summary="by a tensor transport that was written for Ray",
            on_request=True,
            same_process=True,
            same_host=True,
            across_hosts=True,
        )

    def refusal(self, source: Source, here: Place) -> str | None:
        """Return None: whether the manager connects two processes turns out when it is used."""
        return None

    def fetch(self, ticket: Ticket, endpoint: Endpoint, deadline: Deadline) -> FetchResult:
        """Let the manager receive the blocks into pooled memory; the first time, open a channel."""
        return fetch_by_channel(self.name, ticket, endpoint, deadline)

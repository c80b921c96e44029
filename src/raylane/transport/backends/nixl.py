"""nixl: the reader takes the blocks out of the source's memory through NVIDIA's NIXL, over UCX.

For programs that ask for it by name. Where the network has RDMA, neither process copies; on one host, and over
networks without RDMA, `host` and `tcp` are at least as fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raylane.core.deadline import Deadline
from raylane.core.place import Place
from raylane.transport.backends.base import Backend, Capability, FetchResult
from raylane.transport.backends.gloo import fetch_by_channel
from raylane.transport.source import Source
from raylane.transport.ticket import Ticket
from raylane.transport.tls import cleartext_refusal

if TYPE_CHECKING:
    from raylane.transport.endpoint import Endpoint


class NixlBackend(Backend):
    """One-sided read through NIXL, of memory that the source registers and offers on request."""

    name = "nixl"
    capability = Capability(
        summary="one-sided reads through NIXL (RDMA where the network has it)",
        on_request=True,
        same_process=True,
        same_host=True,
        across_hosts=True,
    )

    def refusal(self, source: Source, here: Place) -> str | None:
        """Return None or that it may not be used; whether both have NIXL turns out when they open a channel."""
        return cleartext_refusal(self.name)

    def fetch(self, ticket: Ticket, endpoint: Endpoint, deadline: Deadline) -> FetchResult:
        """Ask the source to offer its memory, and read it into pooled memory; the first time, open a channel."""
        return fetch_by_channel(self.name, ticket, endpoint, deadline)

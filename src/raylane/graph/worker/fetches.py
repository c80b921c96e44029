"""Tensors that are on their way into an actor over the transports of their edges (`channels.published`).

The graph loop does not wait for a transfer: a thread of the endpoint fetches, and posts the doorbell of the process at
the end. Meanwhile the loop serves its other graphs and the orders of this one.
"""

from __future__ import annotations

from typing import Any

from raylane.core.signals.semaphore import post
from raylane.graph.channels.published import Fetch, Fetched
from raylane.graph.channels.ring import ProcessDoorbell


class Fetches:
    """Transfers of one graph in this actor. Used by the graph loop's thread alone."""

    def __init__(self, edges: dict[int, Fetched], doorbell: ProcessDoorbell | None) -> None:
        """Create without transfers. `edges` has the inbound edges with a transport of their own, by index."""
        self.edges = edges
        self._doorbell = doorbell
        self.pending: list[tuple[Any, Fetch]] = []
        """(edge as the executor has it, transfer) for each message of the next task that is on its way."""

    def start(self, edge: int, inbound: Any, body: Any) -> int:
        """Start to fetch the tensors of a message; return their size in bytes."""
        fetch = Fetch(self.edges[edge], body, self._notify)
        self.pending.append((inbound, fetch))
        nbytes: int = fetch.nbytes
        return nbytes

    def take(self) -> list[tuple[Any, Fetch]] | None:
        """Return all transfers if all are done, else None."""
        if not all(fetch.done() for _, fetch in self.pending):
            return None
        finished, self.pending = self.pending, []
        if self._doorbell is not None:
            # Each transfer has posted the doorbell once, without a message, or is about to.
            self._doorbell.read += len(finished)
        return finished

    def close(self) -> None:
        """Forget the transfers: their threads end by themselves, at the latest after the time limit of the graph."""
        self.pending = []
        self._doorbell = None

    def _notify(self) -> None:
        doorbell = self._doorbell
        if doorbell is not None:
            post(doorbell.address)

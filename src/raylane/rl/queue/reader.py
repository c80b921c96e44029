"""Items of a queue as values: read from the memory of this host, or fetched from the actors of others.

Called by `handle`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import ray

from raylane.core.deadline import Deadline
from raylane.core.memory.segment import Segment
from raylane.errors import QueueTimeoutError, SourceLostError, TransferTimeoutError
from raylane.rl.queue.blocks import read_item
from raylane.rl.queue.book import ItemTicket
from raylane.rl.queue.calls import call
from raylane.rl.queue.host import ItemRange
from raylane.transport.link.endpoint import endpoint

LARGE_BYTES = 1 << 16
"""Size from which the copy of an item lies in memory of the transport's pool."""
GONE = (
    ray.exceptions.ActorDiedError,
    ray.exceptions.OwnerDiedError,
    ray.exceptions.ObjectLostError,
    SourceLostError,
)
"""Errors of a host whose memory is gone. Others say nothing about it: a slow host, or this process itself."""
MOST_SEGMENTS = 128
"""Number of segments that a consumer keeps mapped."""


class UnreadableError(Exception):
    """Items whose memory is gone."""

    def __init__(self, numbers: list[int], host: str, cause: Exception | str) -> None:
        super().__init__(numbers, host, cause)
        self.numbers, self.host, self.cause = numbers, host, cause


class ItemReader:
    """Reads items from the memory of this host, or from the actors of others."""

    def __init__(self, actor: Any, node: str) -> None:
        self._actor, self._node = actor, node
        self._lock = threading.Lock()  # guards the segments
        self._segments: dict[str, Segment] = {}
        """Segments by path, the last used one at the end."""
        self._hosts: dict[str, Any] = {}

    def read(self, tickets: Sequence[Sequence[ItemTicket]], *, copy: bool) -> list[list[Any]]:
        """Return the values of tickets."""
        far: dict[str, list[ItemTicket]] = {}
        for group in tickets:
            for ticket in group:
                if ticket.host != self._node:
                    far.setdefault(ticket.host, []).append(ticket)
        # One call for all items of a host.
        values: dict[int, Any] = {}
        for host, some in far.items():
            values |= self._fetch(host, some)
        return [
            [values[ticket.number] if ticket.host != self._node else self._here(ticket, copy) for ticket in group]
            for group in tickets
        ]

    def _here(self, ticket: ItemTicket, copy: bool) -> Any:
        # A segment that is mapped already can be read even if its host's actor has died.
        try:
            segment = self._segment(ticket.path)
        except FileNotFoundError as error:
            raise UnreadableError([ticket.number], ticket.host, error) from error
        view = segment.view[ticket.offset : ticket.offset + ticket.nbytes]
        return read_item(_copied(view) if copy else view)

    def _segment(self, path: str) -> Segment:
        with self._lock:
            segment = self._segments.pop(path, None)
            if segment is None:
                # Values that still use the oldest one keep its mapping.
                if len(self._segments) == MOST_SEGMENTS:
                    del self._segments[next(iter(self._segments))]
                segment = Segment.open(path)
            self._segments[path] = segment
            return segment

    def _asked(self, host: str, ranges: list[ItemRange], deadline: Deadline) -> Any:
        """Return the bytes of items from the actor of their host. KeyError if there is none, or if it lacks them."""
        from raylane.transport.api import get

        if host not in self._hosts:
            self._hosts = call(self._actor, "hosts", deadline=deadline)
        (ref,) = ray.get(self._hosts[host].read.remote(ranges), timeout=deadline.left_s())
        return get(ref, timeout=deadline.left_s())

    def _fetch(self, host: str, tickets: list[ItemTicket]) -> dict[int, Any]:
        """Return the values of tickets of another host by number. QueueTimeoutError if the host is slow."""
        numbers = [ticket.number for ticket in tickets]
        ranges = [ItemRange(ticket.path, ticket.offset, ticket.nbytes) for ticket in tickets]
        deadline, asked = Deadline.of_call(None), self._hosts.get(host)
        try:
            try:
                tensors = self._asked(host, ranges, deadline)
            except GONE:
                # Perhaps that actor has a successor, which has these items.
                del self._hosts[host]
                if asked is None:
                    raise
                tensors = self._asked(host, ranges, deadline)
        except KeyError as error:
            raise UnreadableError(numbers, host, "the actor that held the memory has died") from error
        except GONE as error:
            raise UnreadableError(numbers, host, error) from error
        except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnavailableError, TransferTimeoutError) as error:
            raise QueueTimeoutError(
                f"{len(numbers)} items did not come from node {host} within {deadline.timeout_s} s: {error}. They are "
                "given back; take again"
            ) from error
        return {number: read_item(memoryview(tensor.numpy())) for number, tensor in zip(numbers, tensors, strict=True)}


def _copied(view: memoryview) -> memoryview:
    if view.nbytes < LARGE_BYTES:
        return memoryview(bytearray(view))
    # From the pool, whose pages are warm after the first batches: fresh ones would cost more than the copy.
    copied = memoryview(endpoint().pool.take(view.nbytes)).cast("B")
    copied[:] = view
    return copied

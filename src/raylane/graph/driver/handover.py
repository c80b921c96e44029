"""Messages that the driver sends for one execution, and the reasons for which it cannot send them without waiting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from raylane.errors import GraphFullError
from raylane.graph.channels.lease import LeasePool
from raylane.graph.channels.peer_link import Writer
from raylane.graph.channels.ring import LEND_FROM_BYTES
from raylane.graph.values.message import Message

Sent: TypeAlias = tuple[Writer, Message, int]
"""A message, where it goes, and the value that it carries."""


class Busy(GraphFullError):
    """There may be a free place, but another thread is handing an execution over at the moment."""


class NoMemory(GraphFullError):
    """There is a free place, and no memory for the input: readers keep too much."""


def has_memory(pool: LeasePool | None, messages: Sequence[Sent]) -> bool:
    """Return True if these messages can be sent without waiting for memory. Small ones need none."""
    large = [sent for sent in messages if sent[1].buffers or len(sent[1].body) > LEND_FROM_BYTES]
    lent = [nbytes for writer, message, _ in large if (nbytes := writer.lends(message))]
    return not lent or pool is None or pool.has_room(lent)

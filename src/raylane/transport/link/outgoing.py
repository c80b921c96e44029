"""The bytes of an answer that a listener has not sent yet: a queue of parts, some of which are made in their turn."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable

_SEND_BYTES = 4 << 20
Part = tuple["memoryview | Callable[[], memoryview]", object]
"""Bytes to send (or a function that makes them when it is their turn), and the object that keeps them alive."""
_ZEROS = memoryview(bytes(_SEND_BYTES))


def next_parts(out: collections.deque[Part], most: int) -> list[memoryview]:
    """Return up to `most` parts of together at most _SEND_BYTES from the head of the queue.

    A part given as a function is made when it is the head, i.e. when everything before it has been sent.
    """
    if out and not isinstance(out[0][0], memoryview):
        part, keep = out.popleft()
        out.appendleft((part() if callable(part) else part, keep))
    # Cut to _SEND_BYTES, so that one system call does not occupy the thread for long.
    parts: list[memoryview] = []
    room = _SEND_BYTES
    for data, _ in itertools.islice(out, most):
        if not isinstance(data, memoryview) or not room:
            break
        parts.append(data[:room])
        room -= parts[-1].nbytes
    return parts


def consume(out: collections.deque[Part], sent: int) -> None:
    """Remove `sent` bytes from the head of the queue."""
    while sent:
        data, keep = out.popleft()
        if not isinstance(data, memoryview):
            raise AssertionError("a part was sent before it was made")
        if sent < data.nbytes:
            out.appendleft((data[sent:], keep))
        sent -= min(sent, data.nbytes)


def blank(out: collections.deque[Part]) -> None:
    """Replace the head of the queue, whose memory is unmapped, by zeros; the Trailer will declare the value invalid."""
    data, _ = out.popleft()
    remaining_bytes = data.nbytes if isinstance(data, memoryview) else 0
    while remaining_bytes:
        out.appendleft((_ZEROS[:remaining_bytes], None))
        remaining_bytes -= out[0][0].nbytes  # type: ignore[union-attr]

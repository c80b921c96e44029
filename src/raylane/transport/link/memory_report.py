"""The question to all processes of the cluster what they hold; `raylane memory` prints the answers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import msgspec

from raylane import _ray
from raylane.core.deadline import Deadline
from raylane.errors import ProtocolError, RaylaneError
from raylane.transport.link import directory, wire
from raylane.transport.link.connection import is_gone
from raylane.transport.link.endpoint import endpoint
from raylane.transport.value.source import Source

MOST_THREADS = 32
"""Number of processes that are asked at the same time."""


class Report(msgspec.Struct, frozen=True):
    """Answer of one process: its holdings, or the reason why there is none."""

    process: str
    """Class and id of the actor, `the driver` or `a task worker`."""
    pid: int
    host: str
    address: str
    """IP address of the node."""
    holdings: wire.Holdings | None
    why_not: str = ""


def ask_everywhere(timeout_s: float, most: int) -> list[Report]:
    """Return what each process holds that has published since its Ray session began, with `most` values of each.

    Waits at most `timeout_s` seconds (and somewhat longer for connections); a process that does not answer has a reason
    in its report. Processes that have died are left out.
    """
    # One deadline for all: with more processes than threads, stopped ones must not use up a timeout each.
    deadline = Deadline(timeout_s)
    sources = directory.everywhere()
    if not sources:
        return []
    with ThreadPoolExecutor(min(MOST_THREADS, len(sources)), thread_name_prefix="raylane-memory") as threads:
        asked = [threads.submit(_ask, key, source, deadline, most) for key, source in sources.items()]
        return [report for answer in asked if (report := answer.result()) is not None]


def _ask(key: str, source: Source, deadline: Deadline, most: int) -> Report | None:
    """Return the report of one process, or None if it has died."""
    process = endpoint()
    holdings, why_not = None, ""
    try:
        with process.links().borrow(process.address_of(source), source, deadline) as link:
            link.send(wire.HoldingsQuery(most))
            answer = link.receive()
            if not isinstance(answer, wire.Holdings):
                raise ProtocolError(f"the answer was {type(answer).__name__}")
            holdings = answer
    except RaylaneError as error:
        if is_gone(error):
            # Killed without an exit handler. Nobody else may publish on that host again, so clean up here too.
            _ray.kv_delete(key)
            return None
        why_not = str(error)
    return Report(source.label, source.place.pid, source.place.hostname, source.host, holdings, why_not)

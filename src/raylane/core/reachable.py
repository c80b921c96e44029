"""A quick look whether a server listens at an address, for clients that would try for minutes."""

from __future__ import annotations

import socket

CONNECT_TIMEOUT_S = 15.0
"""Time in seconds in which a Ray cluster must accept a connection."""


def check_reachable(address: str) -> None:
    """Raise OSError if nothing accepts a connection at `host:port`; do nothing for other texts, such as `auto`."""
    host, colon, port = address.rpartition(":")
    if not (colon and port.isdecimal()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OverflowError as error:
        raise OSError(f"no such port: {error}") from error

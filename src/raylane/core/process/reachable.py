"""A quick look whether a Ray cluster listens at an address, for clients of Ray, which would try for minutes."""

from __future__ import annotations

import socket

from raylane.core.process.environment import use_tls

CONNECT_TIMEOUT_S = 15.0
"""Time in seconds in which a Ray cluster must accept a connection, and then answer."""
SETTINGS = 4
"""Type of the frame that both ends of HTTP/2 send first (RFC 9113, 3.4 and 6.5); gRPC, and so Ray, is HTTP/2."""
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, SETTINGS, 0, 0, 0, 0, 0))
HEADER_BYTES = 9


def check_reachable(address: str) -> None:
    """Raise OSError if no Ray answers at `host:port`; do nothing for other texts, such as `auto`.

    With RAY_USE_TLS only that something accepts a connection is looked at.
    """
    host, colon, port = address.rpartition(":")
    if not (colon and port.isdecimal()):
        return
    if int(port) > 65535:
        raise OSError(f"there is no port {port}: the largest is 65535")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S) as server:
        if use_tls():
            return
        try:
            server.sendall(GREETING)
            header = server.recv(HEADER_BYTES, socket.MSG_WAITALL)
        except OSError as error:
            raise OSError(f"what listens there is no Ray: {error}") from error
    if len(header) < HEADER_BYTES or header[3] != SETTINGS:
        raise OSError("what listens there is no Ray: it does not speak gRPC. Look for the port of the head, often 6379")

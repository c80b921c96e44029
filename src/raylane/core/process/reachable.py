"""A quick look whether a Ray cluster listens at an address, for clients of Ray, which would try for minutes."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping

from raylane.core.process.environment import use_tls

CONNECT_TIMEOUT_S = 15.0
"""Time in seconds in which a Ray cluster must accept a connection, and then answer."""
DATA, HEADERS, SETTINGS = 0, 1, 4
"""Types of frames of HTTP/2 (RFC 9113, 6), which gRPC, and so Ray, speaks; both ends send SETTINGS first (3.4)."""
END_STREAM, END_HEADERS = 1, 4
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, SETTINGS, 0, 0, 0, 0, 0))
HEADER_BYTES = 9
MAX_FRAMES = 20
REQUEST = {
    ":method": "POST",
    ":scheme": "http",
    ":path": "/ray.rpc.NodeInfoGcsService/GetClusterId",
    ":authority": "ray",
    "te": "trailers",
    "content-type": "application/grpc",
}
"""Headers of the request with which every client of Ray begins. It changes nothing in the cluster."""
UNAUTHENTICATED = b"grpc-status\x0216"
"""Part of the answer of a gRPC server that misses a token or does not know it (status 16)."""
TOKEN_REMEDY = "Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the token of the cluster"


def check_reachable(address: str, token_headers: Mapping[str, str] | None = None) -> None:
    """Raise OSError if no Ray answers at `host:port`; do nothing for other texts, such as `auto`.

    PermissionError if Ray refuses a request with these headers. With RAY_USE_TLS only that something accepts a
    connection is looked at.
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
            raise OSError(
                "what listens there is no Ray: it does not speak gRPC. Look for the port of the head, often 6379"
            )
        if UNAUTHENTICATED in _answer(server, header, _request({**REQUEST, **(token_headers or {})})):
            lack = "another token than that of the cluster" if token_headers else "no token"
            raise PermissionError(f"Ray refuses this process, which has {lack}. {TOKEN_REMEDY}")


def _request(headers: Mapping[str, str]) -> bytes:
    """Return the frames of one empty message of gRPC, with these headers, on stream 1."""
    # Header fields without compression: a length before each text (RFC 7541, 6.2.2).
    texts = [text.encode() for header in headers.items() for text in header]
    fields = b"".join(b"\0" * (index % 2 == 0) + _length(text) + text for index, text in enumerate(texts))
    return _frame(HEADERS, END_HEADERS, fields) + _frame(DATA, END_STREAM, bytes(5))


def _frame(kind: int, flags: int, content: bytes) -> bytes:
    return len(content).to_bytes(3, "big") + bytes((kind, flags, 0, 0, 0, 1)) + content


def _length(text: bytes) -> bytes:
    """Return the length of a text, below 16 KiB, as an integer with a prefix of seven bits (RFC 7541, 5.1)."""
    high, low = divmod(len(text) - 127, 128)
    return bytes([len(text)]) if high < 0 else bytes((127, 128 + low, high))


def _answer(server: socket.socket, header: bytes, request: bytes) -> bytes:
    """Return the contents of the frames that answer a request; `header` begins the one that is being received."""
    contents = b""
    with contextlib.suppress(OSError), server.makefile("rb") as file:  # Ray itself will say what is wrong
        server.sendall(request)
        for _ in range(MAX_FRAMES):
            contents += file.read(int.from_bytes(header[:3], "big"))
            if header[3] in (DATA, HEADERS) and header[4] & END_STREAM:
                break
            header = file.read(HEADER_BYTES)
            if len(header) < HEADER_BYTES:
                break
    return contents

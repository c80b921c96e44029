"""Identity of the process at the other end of a Unix socket, as the kernel knows it."""

from __future__ import annotations

import socket
import struct


def uid_of(sock: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket (SO_PEERCRED, unix(7))."""
    uid: int = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
    return uid

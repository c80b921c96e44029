"""TLS for TCP connections between hosts, by Ray's own settings: RAY_USE_TLS and the files that it names.

Both ends present the certificate of their node, and accept a peer whose certificate the cluster's CA has signed. Names
in certificates are not compared, because addresses of nodes change: the handshake of `wire`, which follows inside TLS,
proves that the peer belongs to this cluster and is the listener that was meant.

Unix sockets stay as they are: both ends are processes of one user on one host, and no other user can read them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import socket
import ssl
from collections.abc import Iterable
from typing import Any

from raylane.core import settings
from raylane.core.process import vm
from raylane.core.process.environment import use_tls
from raylane.errors import TransportError

_STAGE_BYTES = 1 << 18
"""Size of the copy from which one call of `sendmsg` encrypts."""
_CERT, _KEY, _CA = "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"


def cleartext_refusal(transport: str) -> str | None:
    """Return why a transport that nobody encrypts is not used, or None if it may be."""
    if not use_tls() or settings.ALLOW_CLEARTEXT.read():
        return None
    return (
        f"RAY_USE_TLS is set, and {transport} cannot encrypt what it sends; use 'tcp' or 'auto', or set "
        f"{settings.ALLOW_CLEARTEXT.name}=1 on a network where nobody else listens"
    )


def server_context() -> ssl.SSLContext | None:
    """Return the settings of a listener; None without TLS. TransportError if the files cannot be used."""
    return _context(True, *map(os.environ.get, (_CERT, _KEY, _CA))) if use_tls() else None


@functools.lru_cache(maxsize=16)
def _context(server: bool, cert: str | None, key: str | None, ca: str | None) -> ssl.SSLContext:
    for name, path in ((_CERT, cert), (_KEY, key), (_CA, ca)):
        if not path:
            raise TransportError(f"RAY_USE_TLS is set, but {name} is not: set it to the path of a PEM file")
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise TransportError(f"{name}={path!r} cannot be read: {error.strerror}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # After the handshake a write must never depend on a read: the listener waits for one of both at a time.
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    if server:
        # Tickets would make an idle connection readable, which means to a pool of links that it has ended.
        context.num_tickets = 0
    context.sslsocket_class = TlsSocket
    try:
        # An empty password, because OpenSSL would ask for one on the terminal.
        context.load_cert_chain(str(cert), str(key), password="")
    except ssl.SSLError as error:
        raise TransportError(
            f"{_CERT}={cert!r} and {_KEY}={key!r} are no certificate and its key, without password, in PEM format: "
            f"{error}"
        ) from error
    try:
        context.load_verify_locations(str(ca))
    except ssl.SSLError as error:
        raise TransportError(f"{_CA}={ca!r} is no certificate in PEM format: {error}") from error
    return context


class TlsSocket(ssl.SSLSocket):
    """A TLS connection with the methods of a plain socket that links and graphs use.

    As in OpenSSL, one thread at a time may send or receive; any thread may shut the connection down.
    """

    _staged = memoryview(b"")
    """Bytes that the last `sendmsg` took and has not sent: OpenSSL wants the same ones again."""
    _memory = bytearray()
    """Memory of `_staged`; kept, because fresh memory costs more than the copy."""

    def sendmsg(self, buffers: Iterable[Any], *args: Any) -> int:  # type: ignore[override]
        """Send a part of the buffers and return its size. BlockingIOError, or EFAULT if the memory is not mapped.

        While the call cannot go on (BlockingIOError), the next one must begin with the same bytes.
        """
        if not self._staged:
            self._stage(buffers)
        sent = 0
        try:
            while self._staged:  # OpenSSL sends one record of 16 KiB at a time
                count = self.send(self._staged)
                self._staged = self._staged[count:]
                sent += count
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError) as error:
            if not sent:
                raise BlockingIOError from error
        return sent

    def _stage(self, buffers: Iterable[Any]) -> None:
        """Copy the first bytes of these buffers by the kernel: OSError EFAULT for unmapped memory.

        OpenSSL itself would crash there, where sendmsg(2) fails.
        """
        views, total = [], 0
        for buffer in buffers:
            views.append(memoryview(buffer).cast("B")[: _STAGE_BYTES - total])
            total += views[-1].nbytes
            if total == _STAGE_BYTES:
                break
        if total > len(self._memory):
            self._memory = bytearray(total)
        ranges, done, target = [], 0, _address_of(self._memory)
        for view in views:
            if view.readonly:  # memory that stays mapped, such as a frame
                self._memory[done : done + view.nbytes] = view
            elif view.nbytes:
                ranges.append((_address_of(view), target + done, view.nbytes))
            done += view.nbytes
        if ranges:
            vm.read(os.getpid(), ranges)
        self._staged = memoryview(self._memory)[:total]

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Receive bytes. MSG_PEEK only tells whether something has arrived: it returns other bytes."""
        if flags & socket.MSG_PEEK:
            return b"\0" if self.pending() else socket.socket.recv(self, buflen, flags)
        try:
            return super().recv(buflen)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Receive into a buffer, at most one record. MSG_WAITALL has no effect: callers loop."""
        return super().recv_into(buffer, nbytes)

    def recvmsg_into(  # type: ignore[override]
        self, buffers: Iterable[Any], *args: Any
    ) -> tuple[int, list[Any], int, Any]:
        """Fill the first buffers with what one record brings."""
        total = 0
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            while view.nbytes:
                # Waits at most once: afterwards only for what is decrypted already.
                if total and not self.pending():
                    return total, [], 0, None
                got = self.recv_into(view)
                if not got:
                    return total, [], 0, None
                total += got
                view = view[got:]
        return total, [], 0, None

    def shutdown(self, how: int) -> None:
        """Shut the connection down. Unlike in the base class, no thread can ever send in the clear afterwards."""
        socket.socket.shutdown(self, how)


def _address_of(buffer: bytearray | memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def wrap(context: ssl.SSLContext, sock: socket.socket, *, server: bool) -> TlsSocket:
    """Return a TLS connection over this one, which it takes over; the handshake has not begun. OSError if it ended."""
    try:
        wrapped = context.wrap_socket(sock, server_side=server, do_handshake_on_connect=False)
    except BaseException:
        sock.close()
        raise
    # Python's class would talk in the clear over a socket whose peer has vanished before.
    if not isinstance(wrapped, TlsSocket) or wrapped._sslobj is None:  # type: ignore[attr-defined]
        wrapped.close()
        raise ConnectionError("connection closed")
    return wrapped


def connect(sock: socket.socket) -> socket.socket:
    """Return this TCP connection with TLS if Ray uses it; waits for the handshake, at most the socket's timeout."""
    if not use_tls():
        return sock
    try:
        context = _context(False, *map(os.environ.get, (_CERT, _KEY, _CA)))
    except BaseException:
        sock.close()
        raise
    wrapped = wrap(context, sock, server=False)
    try:
        wrapped.do_handshake()
    except BaseException:
        wrapped.close()
        raise
    return wrapped


def tell_plain(sock: socket.socket, frame: bytes) -> None:
    """Send a frame in the clear to a peer that has not begun a TLS handshake."""
    with contextlib.suppress(OSError):
        socket.socket.send(sock, frame)


def drain(sock: socket.socket) -> None:
    """Drop what the peer of a failed handshake has sent: unread bytes would reset the connection before our alert."""
    with contextlib.suppress(OSError):
        socket.socket.recv(sock, 1 << 16, socket.MSG_DONTWAIT)


# X509_V_ERR_* of OpenSSL (x509_vfy.h).
_UNKNOWN_AUTHORITY = frozenset({2, 7, 18, 19, 20, 21})
"""The issuer is not known, or did not sign this certificate."""
_TIME = frozenset({9, 10})
"""Not valid yet, or expired."""


def explain(error: ssl.SSLError) -> str:
    """Return what a failure of TLS means, with the remedy."""
    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _UNKNOWN_AUTHORITY:
            return (
                f"the peer's certificate is not signed by the CA in {_CA} ({error.verify_message}). Give all nodes "
                "certificates of one CA"
            )
        if error.verify_code in _TIME:
            return f"the peer's certificate, or its CA, is not valid now ({error.verify_message}). Renew it"
        return (
            f"the peer's certificate, or the CA in {_CA}, is not accepted ({error.verify_message}). Strict checks "
            "(RFC 5280, in some builds of Python 3.13 and newer) ask for a CA with the extensions "
            "basicConstraints=critical,CA:TRUE and keyUsage=critical,keyCertSign,cRLSign, and for certificates with "
            "subjectKeyIdentifier=hash and authorityKeyIdentifier=keyid"
        )
    if "ALERT" in reason:
        return (
            f"the peer refused the certificate of this process ({reason}). Give all nodes certificates of one CA in "
            f"{_CERT} and {_KEY}, and that CA in {_CA}"
        )
    return (
        f"the peer does not speak TLS ({reason or error}). Set RAY_USE_TLS=1 and the files of TLS for `ray start` on "
        "all nodes and for all drivers, or for none"
    )

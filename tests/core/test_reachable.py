"""Addresses at which no Ray answers, by real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from raylane.core.process import reachable

SILENT, CLOSES = b"silent", b""


@pytest.fixture
def listening(request: pytest.FixtureRequest) -> Iterator[str]:
    """Address of a server that answers the first bytes of a client with `request.param`."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            client, _ = server.accept()
            with client:
                client.recv(100)
                if request.param is SILENT:
                    client.recv(1)  # until the client has given up
                else:
                    client.sendall(request.param)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(60)


@pytest.mark.parametrize(
    ("listening", "match"),
    [
        (SILENT, "no Ray: timed out"),
        (CLOSES, "no Ray: it does not speak gRPC"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no Ray: it does not speak gRPC.*port of the head"),
    ],
    indirect=["listening"],
)
def test_other_servers_are_no_ray(listening: str, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachable, "CONNECT_TIMEOUT_S", 0.2)
    with pytest.raises(OSError, match=match):
        reachable.check_reachable(listening)


def test_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(OSError, match="refused"):
        reachable.check_reachable(f"127.0.0.1:{port}")
    with pytest.raises(OSError, match="no port 99999"):
        reachable.check_reachable("127.0.0.1:99999")
    reachable.check_reachable("auto")

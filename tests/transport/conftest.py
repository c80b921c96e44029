"""A listener of the test's own process, for tests without Ray."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from tests.transport.servers import Server


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.listener.close()
    assert not [t for t in threading.enumerate() if t.name == "raylane-listener"]

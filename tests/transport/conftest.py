"""Fixtures for tests of the listener without Ray."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from tests.transport.servers import Server


@pytest.fixture
def server() -> Iterator[Server]:
    """Run a listener in this process; check that its thread ends with the test."""
    server = Server()
    yield server
    server.listener.close()
    assert not [t for t in threading.enumerate() if t.name == "raylane-listener"]

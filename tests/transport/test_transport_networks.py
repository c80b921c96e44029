"""Transports between three Ray nodes with networks, processes and shared memory of their own, in good and bad weather.

Each node is a machine for raylane: own address, pid namespace and /dev/shm.
"""

from __future__ import annotations

import importlib.util
import re

import pytest
from tests import networks

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.ray]


@pytest.mark.claim("security", "with `RAY_USE_TLS=1` values travel by TLS, with certificates of both ends")
@pytest.mark.parametrize("nodes", ["hosts", "secured_hosts"], ids=["plain", "tls"])
def test_transports_between_three_nodes(nodes: str, request: pytest.FixtureRequest) -> None:
    hosts: networks.Hosts = request.getfixturevalue(nodes)
    text, skipped = hosts.drive("tests.transport.transport_network_driver")
    assert "said: done" in text, text
    for transport in ("gloo", *(["nixl"] if importlib.util.find_spec("nixl") else [])):
        expected = f"refused {transport}: .*cannot encrypt" if "secured" in nodes else f"retried {transport}"
        assert re.search(f"said: {expected}", text), text
    print(text, skipped)  # figures, shown with -s
    if "throttle" in skipped:
        pytest.skip(f"all but slow links was tested: {skipped}")

"""Transports between three Ray nodes with networks, processes and shared memory of their own, in good and bad weather.

Each node is a machine for raylane: own address, pid namespace and /dev/shm.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from tests.faults import networks
from tests.transport import certificates

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.processes]
LIMIT_S = 240


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])
def test_transports_between_three_nodes(secured: bool, tmp_path: Path) -> None:
    why = networks.refused()
    if why is not None:
        pytest.skip(f"namespaces cannot be made here: {why}")
    with networks.network(3) as net:
        if secured:
            authority = certificates.make_authority(tmp_path / "authority")
            net.environment |= certificates.make_certificate(authority, tmp_path / "node", *net.addresses)
        weather = networks.Weather(net)
        driver = networks.start_cluster(net, "transport_network_driver", "one", "two")
        text = weather.until_done(driver, LIMIT_S)
    assert "said: done" in text, text
    for transport in ("gloo", *(["nixl"] if importlib.util.find_spec("nixl") else [])):
        wanted = f"refused {transport}: .*cannot encrypt" if secured else f"retried {transport}"
        assert re.search(f"said: {wanted}", text), text
    print(text, weather.skipped)  # figures, shown with -s
    if "throttle" in weather.skipped:
        pytest.skip(f"all but slow links was tested: {weather.skipped}")

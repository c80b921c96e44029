"""Transports between three Ray nodes with networks, processes and shared memory of their own, in good and bad weather.

Each node is a machine for raylane: own address, pid namespace and /dev/shm.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from tests.faults import networks
from tests.transport import certificates

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.processes]
OWN_SHM = "mount -t tmpfs raylane /dev/shm; "
LIMIT_S = 240


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])
def test_transports_between_three_nodes(secured: bool, tmp_path: Path) -> None:
    why = networks.refused()
    if why is not None:
        pytest.skip(f"namespaces cannot be made here: {why}")
    root = Path(__file__).parents[2]
    paths = f"{root}/src:{root}"
    with networks.network(3) as net:
        head, one, two = net.addresses
        if secured:
            authority = certificates.make_authority(tmp_path / "authority")
            net.environment |= certificates.make_certificate(authority, tmp_path / "node", *net.addresses)
        weather = networks.Weather(net)
        driver = net.start(
            0,
            f"{OWN_SHM}{networks.ray_node(head, None, 'head')}; cd {root}; "
            f"PYTHONPATH={paths} exec {sys.executable} -m tests.faults.transport_network_driver {head}",
        )
        for index, (address, name) in enumerate([(one, "one"), (two, "two")], 1):
            start = networks.ray_node(address, head, name)
            net.start(
                index,
                f"{OWN_SHM}cd {root}; export PYTHONPATH={paths}; "
                f"until {start} >/dev/null 2>&1; do sleep 0.2; done; cat",
            )
        text = weather.until_done(driver, LIMIT_S)
    assert "said: done" in text, text
    for transport in ("gloo", *(["nixl"] if importlib.util.find_spec("nixl") else [])):
        wanted = f"refused {transport}: .*cannot encrypt" if secured else f"retried {transport}"
        assert re.search(f"said: {wanted}", text), text
    print(text, weather.skipped)  # figures, shown with -s
    if "throttle" in weather.skipped:
        pytest.skip(f"all but slow links was tested: {weather.skipped}")
